"""``ring_attn.verify``: right programs are accused of nothing, and each mistake that raises no error is found by its result."""

import subprocess
import sys

import pytest
import torch
from launch import environment, torchrun
from torch import nn

from ring_attn import Ring, Verdict, verify
from ring_attn.verification.runs import named_parameters
from ring_attn.verification.verdict import HALF_TOLERANCE, TOLERANCE, tolerance


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_and_models(ranks):
    """On four ranks with data parallelism beside the ring."""
    printed = torchrun("step_verify_worker.py", ranks)
    print(printed)
    assert printed.count("verify worker: all right") == ranks


def test_one_process_has_nothing_to_compare():
    for verdict in (verify(step=lambda ring: nn.Linear(2, 2)), verify(nn.Linear(2, 2), torch.zeros(1, 4), ring=Ring("local"))):
        assert not verdict.ok and "nothing was compared: the ring has one process" in str(verdict)


@pytest.mark.parametrize("given", [{}, {"step": print, "model": nn.Linear(2, 2)}, {"model": nn.Linear(2, 2)}])
def test_either_a_step_or_a_model(given):
    with pytest.raises(ValueError, match="either step="):
        verify(**given)


def test_a_verdict_is_a_report():
    right = Verdict("step, 2 ranks", {"a": 1e-6, "b": 2e-6})
    assert right.ok and str(right) == "right: step, 2 ranks; largest relative error 2.0e-06 (b)"
    wrong = Verdict("step, 2 ranks", {"a": 1e-6, "b": float("nan")}, None, ["it is so"])
    assert not wrong.ok and str(wrong) == "WRONG: step, 2 ranks; largest relative error nan (b)\n- it is so"
    assert tolerance([torch.float32]) == TOLERANCE and tolerance([torch.float32, torch.bfloat16]) == HALF_TOLERANCE


def test_parameters_go_by_the_names_of_the_plain_model():
    plain = nn.Sequential(nn.Linear(2, 2))
    assert set(named_parameters(nn.ModuleDict({"module": plain}))) == set(named_parameters(plain)) == {"0.weight", "0.bias"}
    assert set(named_parameters([plain, torch.zeros(1)])) == {"0.0.weight", "0.0.bias", "1"}
    with pytest.raises(ValueError, match="must return a module"):
        named_parameters(None)


TRAIN = """
from neighbour import WIDTH
import torch
from ring_attn import cross_entropy

def step(ring):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, WIDTH), torch.nn.Linear(WIDTH, 9))
    batch = ring.shard_batch(torch.arange(24)[None] % 9)
    cross_entropy(model(batch.input_ids), batch, ring=ring, num_items=23).backward()
    ring.unshard(batch.input_ids)
    torch.optim.SGD(model.parameters(), 0.1).step()
    return model

raise_if_main = 1 / (__name__ != "__main__")
"""


def command(folder, *arguments):
    whole = [sys.executable, "-m", "ring_attn", "verify", *arguments]
    return subprocess.run(whole, env=environment(), cwd=folder, capture_output=True, text=True, check=False, timeout=480)


@pytest.mark.slow
def test_the_command_verifies_a_step_of_a_file(tmp_path):
    """Whose gradients are not summed."""
    (tmp_path / "neighbour.py").write_text("WIDTH = 4")
    (tmp_path / "train.py").write_text(TRAIN)
    done = command(tmp_path, "train.py:step")
    assert done.returncode == 1, done.stdout + done.stderr
    verdict = "WRONG: step, 1 step of the optimizer (two would see what it leaves behind), 3 parameters, 2 ranks"
    assert verdict in done.stdout
    assert "were not summed over the ring" in done.stdout and "Traceback" not in done.stderr
    done = command(tmp_path, "train.py:steps")
    said = [line for line in done.stderr.splitlines() if "Gloo" not in line]
    assert (done.returncode, said) == (2, ["python -m ring_attn verify: train.py has no function steps"]), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"), [("nothing.py:step", "there is no file nothing.py"), ("train.py", "which function of train.py")]
)
def test_a_wrong_path_is_one_line(tmp_path, what, said):
    done = command(tmp_path, what)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and said in done.stderr, done.stderr
