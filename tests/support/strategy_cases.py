"""Attention from torch with what the oracle makes of it, in float64, for ``strategies_worker.py``. As a program it writes the file
that is named: ``JAX_PLATFORMS=cpu python tests/support/strategy_cases.py cases.pt``.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from jax_core.testing.oracle import reference_attention

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


def write(file: Path) -> None:
    """Every case: its options, whole tensors, results, their cotangents and the gradients."""
    torch.save({name: expected(*case) for name, case in CASES.items()}, file)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
