"""Every way to split a sequence, from torch, over rings of real processes: the oracle's results and gradients, in float64."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from launch import torchrun

from jax_core.testing.oracle import reference_attention

pytestmark = pytest.mark.slow

BATCH, LENGTH, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 64, 8, 2, 8, 4
SEED = 2**40 + 7

# Of torch's names, the oracle's.
NAMES = {
    "q": "query",
    "k": "key",
    "v": "value",
    "sinks": "softmax_aux",
    "softcap": "logits_soft_cap",
    "dropout_p": "dropout_prob",
}
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "documents": (("q_segment_ids",), dict(causal=True, dropout_p=0.3, dropout_seed=SEED)),
    "window": (("sinks", "bias"), dict(sliding_window=(21, 9), softcap=1.5)),
}


def tensors(names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    every = {
        "q": normal(BATCH, LENGTH, HEADS, DIM),
        "k": normal(BATCH, LENGTH, KV_HEADS, DIM),
        "v": normal(BATCH, LENGTH, KV_HEADS, VALUE_DIM),
        "sinks": normal(HEADS),
        "bias": normal(1, HEADS, LENGTH, LENGTH),
        "q_segment_ids": (torch.arange(LENGTH)[None] + torch.tensor([[0], [11]])) // 27,
    }
    return {name: every[name] for name in ("q", "k", "v", *names)}


def expected(names: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """A case with what the oracle makes of it."""
    given = tensors(names)
    floats = {name: x.numpy() for name, x in given.items() if x.is_floating_point()}
    others = {name: x.numpy() for name, x in given.items() if name not in floats}
    settings = {NAMES.get(name, name): value for name, value in options.items()}
    if "dropout_seed" in settings:
        settings["dropout_seed"] = np.array([SEED % 2**32, SEED >> 32], np.uint32)

    def attention(floats: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        return tuple(reference_attention(**{NAMES.get(name, name): x for name, x in floats.items()}, **others, **settings))

    with jax.enable_x64(True):
        results, backward = jax.vjp(attention, floats)
        cotangents = tuple(np.random.default_rng(4).normal(size=x.shape) for x in results)
        (gradients,) = backward(tuple(map(jax.numpy.asarray, cotangents)))
        both = ("out", "lse")
        return dict(
            options=options,
            tensors=given,
            results=dict(zip(both, map(of_jax, results), strict=True)),
            cotangents=dict(zip(both, map(torch.from_numpy, cotangents), strict=True)),
            gradients={name: of_jax(x) for name, x in gradients.items()},
        )


def of_jax(array: jax.Array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("cases") / "cases.pt"
    torch.save({name: expected(*case) for name, case in CASES.items()}, file)
    return file


def check(cases: Path, processes: int, shape: str, *runs: str) -> None:
    printed = torchrun("strategies_worker.py", processes, str(cases), shape, *runs)
    assert printed.count("ok ") >= len(runs) and all(f"ok {run}\n" in printed for run in runs), printed


def test_on_two_ranks(cases):
    check(cases, 2, "2", "all_gather:documents:zigzag:a", "ulysses:window:striped:a")


def test_on_four_ranks_with_two_heads_of_keys(cases):
    runs = (
        "ulysses:documents:zigzag:ab",
        "ulysses_ring:documents:striped:ab",
        "ring_ulysses:window:zigzag:ba",
    )
    check(cases, 4, "2x2", *runs)


def test_two_rings_of_four_that_make_different_calls(cases):
    check(cases, 8, "2x2", "ring:documents:zigzag:ab", "ulysses_ring:window:contiguous:ba")
