"""Attention over whole arrays, as torch-xla's graphs have it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import torch
from jax.sharding import AbstractMesh

from jax_core.api.global_arrays import GlobalAttention, attention_on_mesh, plan_sequence
from jax_core.operands import GIVEN, Operands
from jax_core.options import Options
from torch_bridge.backends.operation import GlobalProgram, TensorSpec


def whole_attention(
    options: Options, specs: Sequence[TensorSpec | None], mesh: AbstractMesh | None, dim: int, platform: str
) -> GlobalProgram:
    """Raises ValueError for 64-bit position ids together with a mask function, NotImplementedError for what torch-xla's graphs do
    not have."""
    names = Operands._fields[:GIVEN]
    _check_positions(options, dict(zip(names, specs, strict=False)))
    operands = Operands.of([None if spec is None else _struct(spec) for spec in specs])
    plan = None if mesh is None else plan_sequence(mesh, mesh.axis_names[dim], operands.query.shape[0])
    attention = attention_on_mesh(_without_pallas(options), operands, plan, platform)

    def backward(wanted: tuple[int, ...], given: tuple[bool, ...]) -> Callable[..., object]:
        return partial(_backward, attention, tuple(names[number] for number in wanted), given[1])

    return GlobalProgram(attention.forward, backward)


def _struct(spec: TensorSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, jax.numpy.dtype(str(spec.dtype).removeprefix("torch.")))


def _check_positions(options: Options, specs: dict[str, TensorSpec | None]) -> None:
    if not options.predicates:
        return
    for name, spec in specs.items():
        # Whether the values fit in 32 bits is not known until the graph has run.
        if spec is not None and name.endswith("_position_ids") and spec.dtype == torch.int64:
            raise ValueError(f"mask_mod takes positions of 32 bits: {name} must be int32, got {spec.dtype}; call .to(torch.int32)")


def _without_pallas(options: Options) -> Options:
    """The options with the XLA kernel. Pallas asks JAX for the TPU that it compiles for, but torch-xla holds it; and torch-xla 2.9
    ships a libtpu that is too old for the kernels' format."""
    named = {options.platform, options.cfg.platform if options.cfg else None} - {None, "auto"}
    if "pallas" in named:
        raise NotImplementedError('torch-xla\'s graphs have no Pallas kernels, got platform="pallas"; use platform="xla" or "auto"')
    if options.strategy not in ("auto", "ring"):
        raise NotImplementedError(
            f'torch-xla\'s graphs have the ring around plain XLA, got strategy="{options.strategy}"; use strategy="auto"'
        )
    return options if named else replace(options, platform="xla")


def _backward(attention: GlobalAttention, names: tuple[str, ...], with_dlse: bool, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    out, lse, dout = arrays[:3]
    dlse = arrays[3] if with_dlse else None
    return attention.backward(names, out, lse, dout, dlse, *arrays[3 + with_dlse :])
