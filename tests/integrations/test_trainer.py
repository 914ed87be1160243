"""transformers' Trainer, TRL's SFTTrainer and a loop with accelerate: 20 steps over rings of two against one process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import WORKERS, environment, torchrun

# One process of pytest starts all that the tests here compare.
pytestmark = pytest.mark.xdist_group("trainer")
WORKER = "trainer_worker.py"
CASES = ("trained", "packed", "hybrid", "looped", "streamed")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What the worker measured, by the number of its processes."""
    folder: Path = tmp_path_factory.mktemp("trainer")
    return {1: alone(folder, *CASES), 2: on_ranks(2, folder, *CASES, "refusals"), 4: on_ranks(4, folder, "trained")}


def alone(folder: Path, *cases: str) -> dict[str, Any]:
    out = folder / "1.json"
    command = [sys.executable, str(WORKERS / WORKER), str(out), *cases]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=480)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def on_ranks(ranks: int, folder: Path, *cases: str) -> dict[str, Any]:
    out = folder / f"{ranks}.json"
    torchrun(WORKER, ranks, str(out), *cases)
    return json.loads(out.read_text())


def assert_same(measured: dict[str, Any], expected: dict[str, Any], steps: int = 20) -> None:
    assert len(expected["loss"]) >= steps
    for name, values in expected.items():
        assert measured[name] == pytest.approx(values, rel=2e-5) if name != "generated" else measured[name] == values, name


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_trainer(runs, ranks: int):
    """Four ranks are two rings of two, with batches of their own. There eval_loss is another mean, with and without rings: the
    Trainer weighs batches by the labels that all data-parallel ranks have at a time."""
    expected = {name: values for name, values in runs[1]["trained"].items() if ranks == 2 or name != "eval"}
    assert_same(runs[ranks]["trained"], expected)


def test_trl_with_packing(runs):
    assert_same(runs[2]["packed"], runs[1]["packed"])


def test_layers_with_a_state(runs):
    assert_same(runs[2]["hybrid"], runs[1]["hybrid"])


@pytest.mark.slow
@pytest.mark.costly
def test_layers_with_a_state_packed_by_trl_with_factors_of_low_rank(tmp_path):
    case = "hybrid_sft"
    assert_same(on_ranks(2, tmp_path, case)[case], alone(tmp_path, case)[case], steps=5)


def test_a_loop_with_accelerate(runs):
    assert_same(runs[2]["looped"], runs[1]["looped"])


def test_streamed_data_is_whole_on_each_rank(runs):
    """accelerate's default would read it in one process and deal parts of each batch to all, whatever the mesh."""
    assert_same(runs[2]["streamed"], runs[1]["streamed"])
    assert runs[1]["streamed"] == runs[1]["looped"]


def test_metrics_give_way_to_the_loss_where_told_so(runs):
    """prediction_loss_only=True, which the refusal of metrics of logits names."""
    without_metrics, by_loss_only = runs[2]["refusals"]["losses"]
    assert by_loss_only == without_metrics > 0


REFUSED = (
    "label smoothing",
    "metrics of logits",
    "predictions",
    "logits",
    "different batches",
    "batches that are dealt out",
    "a second ring",
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused(runs, case: str):
    """In words, on all ranks: the worker compares them with what it expects."""
    assert runs[2]["refusals"][case] == "refused"
