"""``python -m ring_attn doctor``: what is right is said to be, and a wrong kernel, a hang and a trap are seen."""

import io
import json
import os
import time
from types import SimpleNamespace

import pytest
import torch
from launch import PYTHONPATH, as_a_user
from rich.console import Console

import ring_attn
from ring_attn.doctor import kernels, ranks, traps, versions
from ring_attn.doctor.child import from_process
from ring_attn.doctor.command import _row
from ring_attn.doctor.finding import Finding


def by_name(found):
    return {finding.check: finding for finding in found}


@pytest.mark.slow
def test_a_machine_without_gpus_is_right():
    done = as_a_user("-m", "ring_attn", "doctor", "--json", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    found = by_name(Finding(**each) for each in told["findings"])
    assert told["ok"] and found["xla, CPU"].verdict == "right" and "SDPA" in found["xla, CPU"].text
    assert found["triton, CPU"].verdict == "note" and "need an NVIDIA GPU" in found["triton, CPU"].text
    assert f"torch {torch.__version__.split('+')[0]}" in found["packages"].text and ring_attn.__version__ in found["ring-attn"].text


@pytest.mark.slow
def test_two_ranks_agree_and_make_a_ring():
    done = as_a_user("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ring_attn", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    told = " ".join(done.stdout.split())
    for words in (
        "2 ranks with the same versions",
        "strategy ring, 2 ranks right error ",
        "strategy ulysses, 2 ranks right error ",
        "strategy ulysses_ring, 2 ranks note cannot run this: it needs two mesh axes",
        "kernel xla, 2 ranks right error ",
        "kernel cute, 2 ranks note cannot run this: flash-attn-4 needs an NVIDIA GPU",
        "GiB/s to the next rank",
        "nothing is wrong",
    ):
        assert words in told, done.stdout + done.stderr


PLANTED = """
from jax_core.kernels import xla
right = xla.{of}
def wrong(*operands, **options):
    found = right(*operands, **options)
    return found._replace({result}=1.001 * found.{result})
xla.{of} = wrong
"""


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "result", "launcher", "told"),
    [
        ("forward", "out", (), "xla, CPU"),
        ("backward", "dk", (), "xla, CPU"),
        ("backward", "dv", ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), "kernel xla, 2 ranks"),
    ],
)
def test_a_wrong_kernel_ends_the_command_with_1(tmp_path, of, result, launcher, told):
    """Planted in every process of it, also in those that it starts."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED.format(of=of, result=result))
    path = os.pathsep.join((str(tmp_path), PYTHONPATH))
    done = as_a_user(*launcher, "-m", "ring_attn", "doctor", PYTHONPATH=path, CUDA_VISIBLE_DEVICES="", RING_ATTN_CACHE="")
    assert done.returncode == 1, done.stdout + done.stderr
    (last,) = [line for line in done.stdout.splitlines() if line.startswith("wrong: ")]
    assert told in last, done.stdout


def test_a_wrong_kernel_is_found(monkeypatch):
    right = ring_attn.ring_attention
    monkeypatch.setattr(kernels, "RUNS", 1)
    monkeypatch.setattr(ring_attn, "ring_attention", lambda *operands, **options: 1.001 * right(*operands, **options))
    found = {each["kernel"]: each for each in kernels._tried()}
    assert found["xla"]["verdict"] == "wrong", found


def test_a_hang_and_a_crash_are_said(tmp_path, monkeypatch):
    starts = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    (tmp_path / "hangs.py").write_text(starts)  # what it has started holds its pipes
    before = """print('{"kernel": 1}'); print(2); print('{"ker', flush=True)\n"""
    (tmp_path / "crashes.py").write_text(f"import sys; print('no', file=sys.stderr)\n{before}sys.exit(3)")
    (tmp_path / "ends.py").write_text("""print('{"kernel": 1}'); print('null'); raise SystemExit(3)""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    begun = time.monotonic()
    assert from_process("hangs", 1.0, {}) == ([], "timed out after 1 s")
    assert time.monotonic() - begun < 30
    assert from_process("crashes", 30.0, {}) == ([{"kernel": 1}], "the check ended with exit code 3; it said: no")
    assert from_process("ends", 30.0, {}) == ([{"kernel": 1}], None)  # all was said before it ended
    right = Finding("ranks", "right", "")
    monkeypatch.setattr(ranks, "_findings", lambda: (time.sleep(seconds) or right for seconds in (0, 60)))
    assert [finding.text for finding in ranks.check(0.1)] == [
        "",
        "timed out after 0.1 s: a rank has not come, or cannot be reached",
    ]
    monkeypatch.setattr(ranks, "_findings", lambda: (time.sleep(0.6) or right for _ in range(3)))
    assert [*ranks.check(1.0)] == [right] * 3  # longer in all than the limit, which is for each


CRASHES = """
import os, signal
from jax_core.strategies.ulysses import Ulysses
if os.environ.get("RANK") == "0":
    Ulysses.forward = lambda *operands: os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.slow
def test_a_crash_on_a_ring_hides_nothing_before_it(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(CRASHES)
    path = os.pathsep.join((str(tmp_path), PYTHONPATH))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = as_a_user(*launcher, "-m", "ring_attn", "doctor", PYTHONPATH=path, CUDA_VISIBLE_DEVICES="", RING_ATTN_CACHE="")
    told = " ".join(done.stdout.split())
    assert done.returncode == 1 and "SIGSEGV" in done.stderr, done.stdout + done.stderr
    assert "2 ranks with the same versions" in told and "strategy ring, 2 ranks right error" in told, done.stdout
    assert "strategy ulysses," not in told and "nothing is wrong" not in told, done.stdout


def test_a_text_in_brackets_is_printed():
    terminal = Console(file=io.StringIO(), width=160)
    terminal.print(_row(Finding("xla, CPU", "wrong", "q must be [batch, seq, heads, dim]")))
    assert terminal.file.getvalue().split() == "xla, CPU wrong q must be [batch, seq, heads, dim]".split()


def test_traps_are_seen(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setenv("RING_ATTN_STRICT", "1")
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("RING_ATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(traps, "_nvidia_gpus", lambda: ["NVIDIA H200"])
    found = by_name(traps.check())
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"].verdict == "wrong"
    assert "RING_ATTN_STRICT" in found["variables"].text and "NCCL_ALGO=Tree" in found["NCCL"].text
    assert found["cache"].verdict == "right"
    if torch.version.cuda is None:
        assert found["torch's build"].verdict == "wrong"


def test_versions_beyond_what_was_tried_are_wrong(monkeypatch):
    monkeypatch.setattr(versions, "installed", lambda: {"torch": "2.4.0", "jax": "0.10.2"})
    (finding,) = versions._out_of_bounds()
    assert finding.verdict == "wrong" and "torch 2.4.0" in finding.text and "jax" not in finding.text


@pytest.mark.parametrize("told", ["; driver for CUDA 13.0", ""])
def test_a_gpu_is_told_with_its_driver(monkeypatch, told):
    """Where torch can tell it, which its CPU build cannot."""
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.delattr(torch._C, "_cuda_getDriverVersion", raising=False)
    if told:
        monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    text = by_name(versions.check())["GPU 0"].text
    assert text == f"NVIDIA H200, compute capability 9.0, 141 GiB; CUDA {torch.version.cuda}{told}"


@pytest.mark.slow
def test_a_wrong_path_is_one_line():
    for what in ("nowhere.py:train", "nowhere.py", "tools/site.py:nothing"):
        done = as_a_user("-m", "ring_attn", "verify", what, "--ranks", "1")
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        lines = [line for line in done.stderr.splitlines() if not line.startswith("[Gloo]")]
        assert len(lines) == 1 and lines[0].startswith("python -m ring_attn verify: "), done.stderr
