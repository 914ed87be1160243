"""Layers with a state, their inputs and what the oracle makes of them; for JAX's face and torch's."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import state_oracle

BATCH, LENGTH, HEADS, KEY_HEADS, KEY, VALUE, CHANNELS = 3, 96, 4, 2, 5, 3, 6
CHUNK = 5  # divides no piece


@dataclass(frozen=True)
class Case:
    """``function``: the name of the public one. ``shapes``: of its operands. ``documents``: see :func:`ids_of`."""

    function: str
    shapes: dict[str, tuple[int, ...]]
    state: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    oracle: dict[str, Any] = field(default_factory=dict)
    chunked: bool = True

    def __hash__(self):
        return id(self)


_TOKENS = BATCH, LENGTH
_QKV = {"q": (*_TOKENS, KEY_HEADS, KEY), "k": (*_TOKENS, KEY_HEADS, KEY), "v": (*_TOKENS, HEADS, VALUE)}
_BETA = {"beta": (*_TOKENS, HEADS)}
_GATE = {"g": (*_TOKENS, HEADS)}
_DIAGONAL = {"g": (*_TOKENS, HEADS, KEY)}
_STATE = BATCH, HEADS, KEY, VALUE
_SSD = {
    "x": (*_TOKENS, HEADS, VALUE),
    "dt": (*_TOKENS, HEADS),
    "A": (HEADS,),
    "B": (*_TOKENS, KEY_HEADS, KEY),
    "C": (*_TOKENS, KEY_HEADS, KEY),
}
_X = {"x": (*_TOKENS, CHANNELS)}
_CONV = partial(Case, "causal_conv1d", chunked=False)
CASES = {
    "conv": _CONV(_X | {"weight": (CHANNELS, 4)}, (BATCH, 3, CHANNELS)),
    "conv-silu-bias": _CONV(
        _X | {"weight": (CHANNELS, 4), "bias": (CHANNELS,)}, (BATCH, 3, CHANNELS), {"activation": "silu"}, {"activation": "silu"}
    ),
    "conv-of-two": _CONV(_X | {"weight": (CHANNELS, 2)}, (BATCH, 1, CHANNELS)),
    "conv-over-pieces": _CONV(_X | {"weight": (CHANNELS, 16)}, (BATCH, 15, CHANNELS)),
    "delta": Case("gated_delta_rule", _QKV | _GATE | _BETA, _STATE),
    "delta-norm": Case(
        "gated_delta_rule", _QKV | _GATE | _BETA, _STATE, {"qk_l2norm": True, "scale": 0.7}, {"l2norm": True, "scale": 0.7}
    ),
    "delta-no-decay": Case("gated_delta_rule", _QKV | {"g": None} | _BETA, _STATE, {"qk_l2norm": True}, {"l2norm": True}),
    "kda": Case("kda", _QKV | _DIAGONAL | _BETA, _STATE, {"qk_l2norm": True}, {"l2norm": True}),
    "ssd": Case("ssd", _SSD, (BATCH, HEADS, VALUE, KEY)),
    "ssd-skip": Case("ssd", _SSD | {"D": (HEADS,)}, (BATCH, HEADS, VALUE, KEY)),
    "ssd-skip-dims": Case("ssd", _SSD | {"D": (HEADS, VALUE)}, (BATCH, HEADS, VALUE, KEY)),
    "linear": Case("linear_attention", _QKV, _STATE),
    "retention": Case("linear_attention", _QKV | {"g": (HEADS,)}, _STATE),
    "simple-gla": Case("linear_attention", _QKV | _GATE, _STATE),
    "gla": Case("linear_attention", _QKV | _DIAGONAL, _STATE),
    "gla-constant": Case("linear_attention", _QKV | {"g": (HEADS, KEY)}, _STATE),
}  # fmt: skip
# A few that have everything in them.
ONE_OF_EACH = ("conv-silu-bias", "delta-norm", "kda", "ssd-skip", "gla")


def ids_of(documents: str) -> np.ndarray | None:
    """int32 ``[batch, length]``; "none": no ids. "cuts": at, just before and after every possible cut of a ring of 8, and one over
    several; "padding": on the left, on the right and in the middle, and a row without tokens; "holes": padding over several pieces
    within a document, before the first and after the last, a document between two of one id, and a last one of two tokens."""
    if documents == "none":
        return None
    starts: list[list[int]] = {
        "cuts": [[0, 12, 24, 47, 49, 95], [0, 1, 2, 36, 48], [0, 6, 7, 90]],
        "padding": [[0, 20, 33], [0, 48, 50], [0]],
        "holes": [[0], [0, 50, 52], [0, 30, 76]],
    }[documents]
    ids = np.stack([np.searchsorted(each, np.arange(LENGTH), side="right") - 1 for each in starts]).astype(np.int32)
    if documents == "padding":
        ids[0, :9], ids[0, 40:44], ids[1, 70:], ids[2] = -1, -1, -1, -1
    if documents == "holes":
        ids[0, 30:70], ids[0, 71:80], ids[1, 52:] = -1, -1, 0
        ids[2, :30], ids[2, 78:] = -1, -1
    return ids


def inputs(case: Case, seed: int = 0, dtype: Any = np.float64) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """``(operands, state)``"""
    rng = np.random.default_rng(seed)
    operands = {name: _values(name, shape, rng).astype(dtype) for name, shape in case.shapes.items() if shape is not None}
    return operands, rng.normal(size=case.state).astype(dtype)


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if name in ("g", "A"):
        return -rng.exponential(size=shape)
    if name in ("beta", "dt"):
        return rng.random(shape)
    return rng.normal(size=shape) * (0.5 if name in "kB" else 1)


def cotangents(case: Case, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=case.shapes["v" if "v" in case.shapes else "x"]), rng.normal(size=case.state)


def oracle(case: Case, operands, state, ids):
    """``(y, last)`` in JAX."""
    function = {"causal_conv1d": state_oracle.convolution, "ssd": state_oracle.ssd}.get(case.function, state_oracle.attention)
    return function(operands, state, None if ids is None else jnp.asarray(ids), **case.oracle)


def expected(case: Case, ids) -> tuple[Any, Any]:
    """``((y, last), (gradients by operand, gradient of the state))`` in float64."""
    with jax.enable_x64(True):
        operands, state = inputs(case)
        results, pull = jax.vjp(jax.jit(lambda operands, state: oracle(case, operands, state, ids)), operands, state)
        return jax.device_get((results, pull(cotangents(case))))
