"""What operands must look like: only shapes and dtypes are read, so these have nothing else."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from jax_core.operands import Operands
from jax_core.request.checks import check_operands

BATCH, LENGTH, HEADS, DIM, SIZE = 2, 8, 4, 6, 2
WHOLE = SIZE * LENGTH


def array(*shape: int, dtype: str = "float32") -> Any:
    return SimpleNamespace(shape=shape, dtype=dtype)


QUERY = array(BATCH, LENGTH, HEADS, DIM)
KEY = array(BATCH, LENGTH, 2, DIM)


def check(layout: str = "contiguous", **changed: Any) -> None:
    check_operands(Operands(**{"query": QUERY, "key": KEY, "value": KEY} | changed), layout, SIZE)


SHAPES = {
    "value": [(BATCH, LENGTH, 2, 3), (BATCH, LENGTH, 2, 16)],
    "softmax_aux": [(HEADS,), (1,), (7,), (HEADS, 3)],
    "bias": [(BATCH, HEADS, LENGTH, WHOLE), (1, HEADS, 1, WHOLE), (LENGTH, WHOLE), (WHOLE,), (1, 1, 1, 1)],
    "q_segment_ids": [(LENGTH,), (1, LENGTH), (BATCH, LENGTH)],
    "kv_position_ids": [(LENGTH,), (1, LENGTH), (BATCH, LENGTH)],
    "alibi_slopes": [(HEADS,), (1, HEADS), (BATCH, HEADS)],
}
WRONG_SHAPES = {
    "query": [(LENGTH, HEADS, DIM), (1, LENGTH, HEADS, DIM), (BATCH, LENGTH, 3, DIM), (BATCH, LENGTH, 1, DIM)],
    "key": [(BATCH, LENGTH, 2, DIM - 1), (BATCH, LENGTH - 1, 2, DIM), (BATCH, LENGTH, 1, DIM), (BATCH, LENGTH, 2)],
    "value": [(BATCH, LENGTH, 4, DIM), (BATCH, LENGTH - 1, 2, DIM), (1, LENGTH, 2, DIM), ()],
    "softmax_aux": [(), (0,), (3, 2), (HEADS, 0), (HEADS, 2, 1), (1, HEADS)],
    "bias": [(), (3, HEADS, LENGTH, WHOLE), (BATCH, HEADS, LENGTH, LENGTH), (1, 1, 1, LENGTH, WHOLE), (2, LENGTH, WHOLE)],
    "mask": [(BATCH, HEADS, WHOLE, WHOLE), (LENGTH,), (1, 3, 1, 1)],
    "q_segment_ids": [(WHOLE,), (LENGTH, BATCH), (BATCH, 1, LENGTH), ()],
    "kv_position_ids": [(WHOLE,), (3, LENGTH), (BATCH, HEADS, LENGTH)],
    "alibi_slopes": [(1,), (2,), (HEADS, 1), (3, HEADS), (BATCH, HEADS, 1)],
}
DTYPES = {"mask": "bool", "q_segment_ids": "int32", "kv_position_ids": "int32"}


def named(shapes: dict[str, list[tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, shape) for name, each in shapes.items() for shape in each]


@pytest.mark.parametrize(("name", "shape"), named(SHAPES))
def test_shapes_that_fit(name: str, shape: tuple[int, ...]):
    check(**{name: array(*shape, dtype=DTYPES.get(name, "float32"))})


@pytest.mark.parametrize(("name", "shape"), named(WRONG_SHAPES))
def test_shapes_that_do_not_fit(name: str, shape: tuple[int, ...]):
    """The error names the operand (or that it belongs with query, key and value) and the shape that came."""
    with pytest.raises(ValueError, match=rf"{name}|query.*key") as error:
        check(**{name: array(*shape, dtype=DTYPES.get(name, "float32"))})
    assert any(str(form(shape)) in str(error.value) for form in (tuple, list))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("softmax_aux", ["float32", "bfloat16"], ["int32", "bool"]),
        ("bias", ["float16", "float64"], ["bool", "int8"]),
        ("mask", ["bool"], ["int8", "float32"]),
        ("q_segment_ids", ["int8", "uint8", "uint16", "int32", "int64"], ["uint32", "float32", "bool"]),
        ("kv_position_ids", ["int16", "int64"], ["uint64", "float64"]),
        ("alibi_slopes", ["float32", "bfloat16"], ["int32"]),
    ],
)
def test_dtypes(name: str, right: list[str], wrong: list[str]):
    shape = {"bias": (1, 1, LENGTH, WHOLE), "mask": (LENGTH, WHOLE)}.get(name, (LENGTH,) if name.endswith("ids") else (HEADS,))
    for dtype in right:
        check(**{name: array(*shape, dtype=dtype)})
    for dtype in wrong:
        with pytest.raises(ValueError, match=f"{name} must be of dtype .*; got {dtype}"):
            check(**{name: array(*shape, dtype=dtype)})


def test_query_key_and_value_share_a_floating_dtype():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        check(**{name: array(*QUERY.shape, dtype=dtype) for name in ("query", "key", "value")})
    with pytest.raises(ValueError, match="must share a dtype, got float32, float16, float32; cast them"):
        check(key=array(*KEY.shape, dtype="float16"))
    with pytest.raises(ValueError, match=r"key must be of dtype .*; got int32"):
        check(key=array(*KEY.shape, dtype="int32"))


@pytest.mark.parametrize("side", ["query", "key"])
def test_a_layout_asks_for_lengths_that_it_can_split(side: str):
    odd = {"query": ("query",), "key": ("key", "value")}[side]
    shards = {name: array(BATCH, 7, 2, DIM) for name in odd}
    check("contiguous", **shards)
    check("striped", **shards)
    with pytest.raises(ValueError, match=f"zigzag needs a {side} shard length divisible by 2, got 7"):
        check("zigzag", **shards)


def test_tensors_of_torch_are_read_as_arrays_are():
    tensors = {name: torch.empty(*QUERY.shape, dtype=torch.bfloat16, device="meta") for name in ("query", "key", "value")}
    check(**tensors, bias=torch.empty(1, HEADS, LENGTH, WHOLE, device="meta"), mask=np.ones((LENGTH, WHOLE), bool))
    with pytest.raises(ValueError, match="must share a dtype, got bfloat16, float32, bfloat16"):
        check(**tensors | {"key": torch.empty(*QUERY.shape, device="meta")})
