"""RingParallelism as an object: its sizes, what it tells accelerate, and how it is saved. What it trains: test_trainer.py."""

import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from ring_attn.integrations.accelerate import RingParallelism


@pytest.fixture(autouse=True)
def no_accelerator_before() -> None:
    """accelerate keeps the first configuration of a process for all that follow."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.fixture
def four_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.mark.usefixtures("four_processes")
def test_the_ring_takes_the_processes_that_data_parallelism_leaves(model):
    assert RingParallelism(model).cp_size == 4
    assert RingParallelism(model, dp_shard_size=2).cp_size == 2
    assert RingParallelism(model, 2).cp_size == 2


@pytest.mark.usefixtures("four_processes")
def test_the_launcher_s_variable_goes_first(model, monkeypatch):
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    assert RingParallelism(model).cp_size == 2


def test_its_dims_are_those_of_accelerate(model):
    """A ring's ranks get one batch; FSDP2 shards over the ring too."""
    parallel = RingParallelism(model, 2, dp_shard_size=2, dp_replicate_size=2)
    assert parallel.active_mesh_dims == ["dp_replicate", "dp_shard", "cp"]
    assert parallel.non_dp_dim_names == ["cp"]
    assert parallel.fsdp_dim_names == ["dp_replicate", "dp_shard_cp"]
    assert parallel.dp_cp_dim_names == ["dp_replicate", "dp_shard", "cp"]
    assert (parallel.data_parallel_size, parallel.non_data_parallel_size, parallel.total_size) == (4, 2, 8)


def test_documents_are_placed_on_a_ring_alone(model):
    assert RingParallelism(model).place_documents is None
    with pytest.raises(ValueError, match="place_documents needs a ring, and with cp_size=1"):
        RingParallelism(model, 1, place_documents=True)


def test_one_process_needs_no_ring(model):
    accelerator = Accelerator(cpu=True, parallelism_config=RingParallelism(model))
    assert accelerator.parallelism_config.total_size == 1
    assert accelerator.torch_device_mesh is None
    assert not model._forward_pre_hooks


def test_it_is_saved_without_weights(model):
    """The Trainer pickles its arguments beside a checkpoint, and writes them as JSON to its log."""
    parallel = RingParallelism(model, 2, layout="striped", operators={"kda": lambda *_: None})
    copy = pickle.loads(pickle.dumps(parallel))
    assert (copy.cp_size, copy.layout, copy.cp_backend) == (2, "striped", "ring_attn")
    saved = io.BytesIO()
    torch.save(parallel, saved)
    assert b"Linear" not in saved.getvalue()
    assert (parallel.to_json()["cp_size"], parallel.to_json()["operators"]) == (2, ["kda"])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(layout="spiral"), ValueError, "layout"),
        (dict(cp_backend="torch"), ValueError, "torch's context parallelism"),
        (dict(tp_size=2), NotImplementedError, "tp_size"),
        (dict(cp_size=2, sp_size=2), ValueError, "mutually exclusive"),
        (dict(cp_size=0), ValueError, "cp_size"),
    ],
)
def test_errors(model, options, error, words):
    with pytest.raises(error, match=words):
        RingParallelism(model, **options)


def test_the_model_comes_first():
    with pytest.raises(ValueError, match="load it first"):
        RingParallelism("gpt2")


def test_too_few_processes(model):
    """One process, where two are asked for."""
    with pytest.raises(ValueError, match="started, 1, got dp_replicate_size=1, dp_shard_size=1, tp_size=1, cp_size=2"):
        Accelerator(cpu=True, parallelism_config=RingParallelism(model, 2))


def test_an_accelerate_that_does_not_see_the_processes_is_refused(model):
    """Without use_cpu it is alone on a machine without GPUs: each rank would train with its own part of the gradient."""
    with pytest.raises(ValueError, match=r"sees 1 of the 2 processes.*use_cpu=True"):
        RingParallelism(model, 2)._validate_accelerator(SimpleNamespace(num_processes=1))
