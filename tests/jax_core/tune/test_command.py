"""``python -m tools.tune``."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels import xla
from jax_core.tune import lookup
from tools.tune import work
from tools.tune.__main__ import main
from tools.tune.arguments import parsed
from tools.tune.models import SHAPES

SMALL = "--length 64 --heads 2 --dim 8 --dtype float32 --causal --rounds 1".split()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("RING_ATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(xla, "configs", lambda problem: ((FwdParams(16, 16),), (BwdParams(32, 32),)))
    monkeypatch.setattr(xla, "default_params", lambda problem: (FwdParams(64, 64), BwdParams(64, 64)))
    for remembered in (lookup._read_once, lookup._searched_here):
        remembered.cache_clear()


@pytest.mark.slow
def test_a_search_is_kept_shown_and_not_made_again(capsys):
    assert main([*SMALL, "--dry-run"]) == 0
    assert "2:2 heads of 8, 64  1       2           xla float32 dim 8 group 1 causal up to 4096" in capsys.readouterr().out
    assert main(SMALL) == 0
    told = capsys.readouterr().out
    assert "[1/1] 2:2 heads of 8, 64 (" in told and "forward: 2 of 2 tried" in told and "won" in told
    (path,) = Path(os.environ["RING_ATTN_CACHE"]).rglob("*.json")
    assert list(json.loads(path.read_text())["configurations"]) == ["xla float32 dim 8 group 1 causal up to 4096"]
    assert main([*SMALL, "--show"]) == 0
    assert capsys.readouterr().out.count(" cache ") == 2
    assert main(SMALL) == 0
    assert "1 shapes of 1 configurations, 1 of them in" in capsys.readouterr().out


def test_without_a_cache_a_search_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("RING_ATTN_CACHE", "off")
    assert main(SMALL) == 2
    assert "caches are off" in capsys.readouterr().err
    assert main([*SMALL, "--show"]) == 0
    assert capsys.readouterr().out.count("heuristic") == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--platform", "pallas"], 'platform="pallas" cannot compute'),
        (["--kv-heads", "3"], "multiple"),
        (["--window", "1", "2", "3"], "sliding_window must be"),
        (["--softcap", "-1"], "logits_soft_cap must be positive"),
    ],
)
def test_what_cannot_be_is_refused_in_words(capsys, more: list[str], message: str):
    assert main([*SMALL, *more]) == 2
    assert message in capsys.readouterr().err


def test_time_that_is_over_is_told(capsys):
    assert main([*SMALL, "--seconds", "0"]) == 1
    told = capsys.readouterr().out
    assert "not searched: there was no time for it" in told and "the same command goes on" in told


def test_a_search_that_fails_does_not_end_the_others(monkeypatch, capsys):
    def fails(kernel, problem, limits):
        raise MemoryError("too long")

    monkeypatch.setattr(work, "search", fails)
    assert main(SMALL) == 1
    assert "not searched: MemoryError: too long" in capsys.readouterr().out


def test_the_features_are_those_of_a_request():
    every = "--segments --positions --bias --mask --alibi --sinks --fused-backward --softcap 3 --dropout 0.1 --window 20".split()
    (asked,) = work.asked(parsed([*SMALL, *every]))
    assert asked.problem.features >= {
        "causal", "left", "softcap", "dropout_prob", "dropout_seed", "bias", "mask", "q_segment_ids", "q_position_ids",
        "alibi_slopes", "softmax_aux", "fused_backward",
    }  # fmt: skip
    assert asked.problem.scores.mask.left == 20
    (both,) = work.asked(parsed([*SMALL[:-3], "--rounds", "1", "--window", "5", "6"]))
    assert (both.problem.scores.mask.left, both.problem.scores.mask.right) == (5, 6)


def test_the_models_are_each_a_shape():
    options = parsed(["--all-models", "--length", "8192"])
    works = work.asked(options)
    assert sum(one.also + 1 for one in works) == len(SHAPES) > len(works)
    assert len({one.key for one in works}) == len(works)
    for name in ("Llama 3 8B", "Llama 3 70B", "Qwen 3", "Gemma 3", "gpt-oss"):
        assert any(name in one.name for one in works), name


@pytest.mark.slow
def test_workers_end_with_the_time(tmp_path):
    """They would need minutes; what is left is told, and no process stays behind."""
    command = [sys.executable, "-m", "tools.tune", "--all-models", "--workers", "2", "--seconds", "8", "--cache", str(tmp_path)]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "were not searched to their end" in done.stdout
    assert time.monotonic() - begun < 60
