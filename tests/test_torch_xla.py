"""Tensors on XLA devices: four CPU devices in SPMD mode, in an environment with torch-xla (`make test-xla`)."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch_xla", reason="torch-xla has an environment of its own: make test-xla")

import torch
import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xla_runtime
from attention_cases import (
    BUILDER,
    CASES,
    CAUSAL,
    DIFFERENTIABLE,
    DROPOUT,
    FUNCTION,
    PACKED,
    SEED,
    SINKS,
    Arrays,
    Case,
    from_layout,
    make_cotangents,
    make_inputs,
    normal,
    small_blocks,
    to_layout,
)
from test_attention import assert_like_the_oracle
from torch import nn

import ring_attn
from jax_core.layout import LAYOUTS, permutation

xla_runtime.use_spmd()

DEVICES = 4
ROOT = Path(__file__).parent.parent
# What torch calls the arguments of the JAX function.
NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "softmax_aux": "sinks",
    "logits_soft_cap": "softcap",
    "softmax_scale": "scale",
    "dropout_prob": "dropout_p",
}


def ring_of(size: int) -> dict[str, Any]:
    """The arguments that make a ring of ``size`` of the four devices; on a mesh of two dimensions the other one splits the batch."""
    if size == 1:
        return {"mesh": "local"}
    mesh = spmd.Mesh(np.arange(DEVICES), (DEVICES // size, size), ("data", "sequence"))
    return {"mesh": mesh, "mesh_dim": "sequence"}


def on_xla(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).to("xla")


def whole(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def torch_results(case: Case, inputs: Arrays, cotangents: Arrays, **settings) -> Arrays:
    """out, lse and the gradients of `ring_attn.ring_attention`, in natural order and float64."""
    dtype = getattr(torch, case.dtype)
    moved, cotangents = to_layout(case, inputs), to_layout(case, cotangents)
    seed = moved.pop("dropout_seed", None)
    tensors = {name: as_tensor(array, dtype) for name, array in moved.items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items() if name in DIFFERENTIABLE}
    options = {**case.options, **settings, **tensors, "layout": case.layout, "cfg": None if case.block is None else small_blocks(case.block)}
    if seed is not None:
        options["dropout_seed"] = int(seed[0]) + (int(seed[1]) << 32)
    out, lse = ring_attn.ring_attention(**{NAMES.get(name, name): value for name, value in options.items()}, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if case.dtype == "float64" else torch.float32)
    gradients = torch.autograd.grad((out, lse), list(leaves.values()), (as_tensor(cotangents["out"], dtype), on_xla(cotangents["lse"])))
    results = {"out": out, "lse": lse} | {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    return from_layout(case, {name: whole(tensor) for name, tensor in results.items()})


def as_tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """NumPy's bfloat16 is not torch's: such numbers go through float32, exactly."""
    return on_xla(array.astype(np.float32)).to(dtype) if array.dtype.name == "bfloat16" else on_xla(array)


NAMED = {case.name: case for case in CASES}
CHOSEN = (
    "whole sequence on one device",
    "causal contiguous",
    "causal zigzag",
    "causal striped over four",
    "window cut by causal",
    "chunks striped",
    "more keys",
    "grouped sinks",
    "segments, positions restart",
    "sinks over empty rows",
    "soft cap and bias",
    "mask function",
    "mask and builder by index",
    "mesh with everything",
    "everything",
    "bfloat16 causal",
    "float64 with everything",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_against_the_oracle(name):
    case = NAMED[name]
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    assert_like_the_oracle(case, torch_results(case, inputs, cotangents, **ring_of(case.ring)), inputs, cotangents)


def test_a_batch_that_the_mesh_does_not_divide_is_whole():
    case = Case("odd batch", ring=2, batch=3, options=CAUSAL | DROPOUT | FUNCTION, arrays=SEED | SINKS | PACKED)
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    assert_like_the_oracle(case, torch_results(case, inputs, cotangents, **ring_of(2)), inputs, cotangents)


def test_devices_in_any_order():
    case = NAMED["causal zigzag"]
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    mesh = spmd.Mesh(np.array([2, 0, 3, 1]), (DEVICES,), ("sequence",))
    assert_like_the_oracle(case, torch_results(case, inputs, cotangents, mesh=mesh), inputs, cotangents)


def test_ids_of_64_bits_are_not_narrowed():
    case = replace(NAMED["segments, positions restart"], options={})
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    wide = {name: array.astype(np.int64) for name, array in inputs.items() if name.endswith("ids")}
    assert wide
    for name in wide:  # equal ids stay equal, and their low 32 bits are all alike
        wide[name] = np.where(wide[name] < 0, wide[name], wide[name] << 32)
    np.testing.assert_array_equal(
        torch_results(case, inputs | wide, cotangents, **ring_of(2))["out"] if "q_position_ids" not in wide else 0,
        torch_results(case, inputs, cotangents, **ring_of(2))["out"] if "q_position_ids" not in wide else 0,
    )
