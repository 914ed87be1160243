"""Mistakes with a sharded model that raise no error by themselves, made by two processes, and what ``cp.verify`` says."""

import subprocess
import sys

import pytest
import tiny_transformers as tiny
from launch import environment, torchrun


@pytest.mark.parametrize("worker", ["sharded_model_mistakes", "verify"])
def test_they_are_told(worker):
    assert "worker: all right" in torchrun(f"{worker}_worker.py", 2)


def test_right_loops_are_told_nothing():
    printed = torchrun("right_loops_worker.py", 4, "llama")
    assert printed.count("right loops worker: all right") == 4


def test_the_command_verifies_a_model_in_a_folder(tmp_path):
    tiny.CAUSAL["llama"]().save_pretrained(tmp_path)
    command = [sys.executable, "-m", "ring_attn", "verify", str(tmp_path), "--packed", "--length", "40"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "right: LlamaForCausalLM with 2 of its 2 layers, random weights, batch [1, 40], 2 ranks" in done.stdout


def test_a_model_that_is_not_there_is_told_in_one_line(tmp_path):
    command = [sys.executable, "-m", "ring_attn", "verify", str(tmp_path / "nothing")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "Gloo" not in line]
    assert done.returncode == 2 and len(said) == 1 and "nothing" in said[0], done.stderr
