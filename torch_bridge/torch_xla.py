"""The torch-xla road: tensors on an XLA device, in SPMD mode, whose graph the ring becomes a part of.

One process sees whole tensors and XLA splits them over the devices of a ``torch_xla.distributed.spmd.Mesh``, so nothing crosses
from torch to JAX here: JAX only traces the pair (``api.global_arrays``), and its HLO goes into torch-xla's graph, as that of
``torch_xla.core.xla_builder.call_jax`` does. But ``call_jax`` lowers for the devices that JAX sees, and JAX must not open a
TPU that torch-xla holds; here the pair is lowered for torch-xla's hardware, over a mesh without devices.

This module loads torch-xla and JAX; it is imported where a tensor's device type is "xla".
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist
import torch_xla.core.xla_builder as xla_builder
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xla_runtime
from jax.sharding import AbstractMesh
from torch.autograd.function import once_differentiable

from jax_core.api.global_arrays import Pair, pair_on_mesh, plan_sequence
from jax_core.masks import dropout
from jax_core.masks.functions import from_mask_mod
from jax_core.request.options import Options
from jax_core.request.spec import both_sides
from jax_core.strategies.contract import Operands

ARRAYS = Operands._fields[: Operands._fields.index("origin")]
Form = tuple[tuple[int, ...], torch.dtype]
Forms = tuple[Form | None, ...]
Tensors = Sequence[torch.Tensor]
_HARDWARE = ("CPU", "TPU")
_WIDE = (torch.float64, torch.int64)


@dataclass(frozen=True)
class Ring:
    """``size`` devices along dimension ``dim`` of ``mesh``; no mesh is no ring. ``held``: the ranks whose shards are here, all."""

    mesh: AbstractMesh | None = None
    dim: int = 0
    size: int = 1
    devices: spmd.Mesh | None = field(default=None, compare=False, repr=False)

    @property
    def held(self) -> Sequence[int]:
        return range(self.size)

    def split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """``tensor``, which nobody has split yet, with its dimension ``dim`` split over the ring."""
        if self.size > 1:
            spmd.mark_sharding(tensor, self.devices, tuple(self.dim if i == dim else None for i in range(tensor.ndim)))
        return tensor


def resolve(mesh: Any = None, mesh_dim: str | int | None = None) -> Ring:
    """The ring that ``mesh`` means for tensors on an XLA device.

    ``mesh``: a ``torch_xla.distributed.spmd.Mesh`` of one dimension, or of several with ``mesh_dim`` (a name, or an index); None
    (the mesh of ``torch_xla.distributed.spmd.set_global_mesh``, or no ring where none was set); "local" (no ring). The other
    dimensions of the mesh split the batch, where they divide it. Raises ValueError for anything else, for a dimension that the mesh
    does not have, and for a mesh of several devices outside SPMD mode.
    """
    mesh = _global_mesh() if mesh is None else mesh
    if mesh is None or (isinstance(mesh, str) and mesh == "local"):
        if mesh_dim is not None:
            raise ValueError(f"mesh_dim chooses a dimension of a mesh, got mesh_dim={mesh_dim!r} and no mesh; give both or neither")
        return Ring()
    if not isinstance(mesh, spmd.Mesh):
        raise ValueError(
            'with tensors on an XLA device mesh must be a torch_xla.distributed.spmd.Mesh, "local" or None, got '
            f"{mesh!r} of type {type(mesh).__name__}; torch_xla.distributed.spmd.get_1d_mesh(name) makes one of all devices"
        )
    if mesh.size() > 1 and not xla_runtime.is_spmd():
        raise ValueError(
            f"a mesh of {mesh.size()} XLA devices needs torch-xla's SPMD mode, which is off; call torch_xla.runtime.use_spmd() "
            "before the first tensor is made"
        )
    return _of_mesh(mesh, mesh_dim)


def _global_mesh() -> spmd.Mesh | None:
    mesh = spmd.get_global_mesh()
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if mesh is None and several and not xla_runtime.is_spmd():
        raise ValueError(
            "with tensors on an XLA device a ring is a mesh of devices in SPMD mode, not a group of processes; got mesh=None among "
            f'{dist.get_world_size()} processes without SPMD. Call torch_xla.runtime.use_spmd() and give a mesh, or mesh="local"'
        )
    return mesh


@cache  # a mesh is made once, and asked for at every call
def _of_mesh(mesh: spmd.Mesh, mesh_dim: str | int | None) -> Ring:
    names = tuple(map(str, mesh.shape()))
    if mesh_dim is None and len(names) > 1:
        raise ValueError(f"a mesh with dimensions {list(names)} needs mesh_dim, the one of the sequence; got None")
    index = 0 if mesh_dim is None else mesh_dim
    if isinstance(index, str) and index in names:
        index = names.index(index)
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(names):
        raise ValueError(f"mesh_dim must be one of the mesh's dimensions {list(names)} or an index of them, got {mesh_dim!r}")
    sizes = tuple(map(int, mesh.mesh_shape))
    return Ring(AbstractMesh(sizes, names), index, sizes[index], mesh)


def attend(
    where: tuple[Any, str | int | None], tensors: dict[str, torch.Tensor | None], dropout_seed: int | None, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of whole tensors in the layout's order; arguments as of :func:`torch_bridge.autograd.attend`.

    Ids may be of 64 bits, and are computed with as they are; ValueError for position ids of 64 bits beside a ``mask_mod``.
    """
    query = tensors["query"]
    assert query is not None
    seed = None if dropout_seed is None else seed_words(dropout_seed, query.device)
    named: dict[str, Any] = {**tensors, "dropout_seed": seed}
    arrays: tuple[Any, ...] = both_sides(Operands(**named))[: len(ARRAYS)]
    ring = resolve(*where)
    if options["mask_mod"] is not None:
        _check_positions(tensors)
        options, arrays = _lift_mask_mod(options, arrays, query.device)
    forms = tuple(None if x is None else (tuple(x.shape), x.dtype) for x in arrays)
    return _Attention.apply(_program(Options(**options), forms, ring), *arrays)


def seed_words(seed: int, device: torch.device) -> torch.Tensor:
    """64 bits as two int32 words, low first, as data: a number in the graph would compile it anew for every seed."""
    return torch.from_numpy(np.array([seed % 2**64], "<u8").view("<i4")).to(device)


def keep_mask(seed: int, *indices: torch.Tensor, prob: float) -> torch.Tensor:
    """:func:`torch_bridge.dropout.keep_mask` of tensors on an XLA device."""
    words = seed_words(seed, indices[0].device)
    (kept,) = call(_keep_mask(prob), [words, *(index.to(torch.int32) for index in indices)], _platform())
    return kept


@cache
def _keep_mask(prob: float) -> Callable:
    return partial(dropout.keep_mask, prob=prob)


def _check_positions(tensors: dict[str, torch.Tensor | None]) -> None:
    for name in ("q_position_ids", "kv_position_ids"):
        ids = tensors[name]
        if ids is not None and ids.dtype == torch.int64:  # whether they fit in 32 bits is not known before the graph has run
            raise ValueError(f"mask_mod takes positions of 32 bits: {name} must be int32, got {ids.dtype}; call .to(torch.int32)")


def _lift_mask_mod(options: dict[str, Any], arrays: tuple, device: torch.device) -> tuple[dict[str, Any], tuple]:
    """The mask function as it is now: traced, and the arrays that it closes over as further operands."""
    with _jax_for_torch_xla():
        predicate, consts = from_mask_mod(options["mask_mod"])
    further = [torch.from_numpy(np.atleast_1d(np.array(const))).to(device) for const in consts]
    return {**options, "mask_mod": None, "predicates": (predicate,)}, (*arrays, *further)


@dataclass(frozen=True, eq=False)
class _Program:
    """One attention as functions of torch tensors."""

    forms: Forms
    pair: Pair
    platform: str
    backward_of: Callable[[tuple[str, ...], bool], Callable]  # for the wanted gradients, and whether the LSE's is given

    def forward(self, operands) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = call(self.pair.forward, [x for x in operands if x is not None], self.platform)
        return out, lse

    def backward(self, operands, out, lse, dout, dlse, wanted: list[int]) -> list[torch.Tensor]:
        names = tuple(ARRAYS[number] for number in wanted)
        cotangents = (out, lse, dout) if dlse is None else (out, lse, dout, dlse)
        given = [*cotangents, *(x for x in operands if x is not None)]
        return call(self.backward_of(names, dlse is not None), given, self.platform)


@cache
def _program(options: Options, forms: Forms, ring: Ring) -> _Program:
    platform = _platform()
    with _jax_for_torch_xla():
        structs: list[Any] = [None if form is None else _struct(*form) for form in forms[: len(ARRAYS)]]
        operands = Operands(*structs)
        plan = None if ring.mesh is None else plan_sequence(ring.mesh, ring.mesh.axis_names[ring.dim], operands.query.shape[0])
        pair = pair_on_mesh(_without_pallas(options), operands, plan, platform)

    @cache
    def backward_of(names: tuple[str, ...], with_dlse: bool) -> Callable:
        return partial(_backward, pair, names, with_dlse)

    return _Program(forms, pair, platform, backward_of)


def _without_pallas(options: Options) -> Options:
    """With the XLA kernel. Pallas asks JAX for the TPU that it compiles for, which torch-xla holds; and torch-xla 2.9 brings a
    libtpu that is older than the kernels' form."""
    named = {options.platform, options.cfg.platform if options.cfg else None} - {None, "auto"}
    if "pallas" in named:
        raise NotImplementedError('the torch-xla road has no Pallas kernels, got platform="pallas"; use platform="xla" or "auto"')
    return options if named else replace(options, platform="xla")


def _backward(pair: Pair, names: tuple[str, ...], with_dlse: bool, *arrays):
    cotangents = arrays[:4] if with_dlse else (*arrays[:3], None)
    return pair.backward(names, *cotangents, *arrays[3 + with_dlse :])


def _platform() -> str:
    """JAX's name of torch-xla's hardware."""
    hardware = xla_runtime.device_type()
    if hardware not in _HARDWARE:
        raise NotImplementedError(f"the torch-xla road runs on {' and '.join(_HARDWARE)}, got {hardware}; use torch's own device")
    return hardware.lower()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, program: _Program, *operands: torch.Tensor | None):
        out, lse = program.forward(operands)
        ctx.save_for_backward(*operands, out, lse)
        ctx.set_materialize_grads(False)  # an LSE that nothing was made of has no gradient, not one of zeros
        ctx.program = program
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: torch.Tensor | None, dlse: torch.Tensor | None):
        *operands, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        wanted = [number for number, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        gradients = dict(zip(wanted, ctx.program.backward(operands, out, lse, dout, dlse, wanted), strict=True))
        return None, *(gradients.get(number) for number in range(len(operands)))


def call(function: Callable, tensors: Tensors, platform: str) -> list[torch.Tensor]:
    """``function`` of JAX arrays as a part of the graph of ``tensors``, which are on an XLA device. It is traced once for each
    shape and dtype, so keep one function object."""
    forms = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    return _computation(function, forms, platform)(list(tensors))


@cache
def _computation(function: Callable, forms: tuple[Form, ...], platform: str) -> Callable[[list], list]:
    wide = any(dtype in _WIDE for _, dtype in forms)
    with _jax_for_torch_xla(), jax.enable_x64(wide):
        traced = jax.jit(function, keep_unused=True).trace(*(_struct(*form) for form in forms))
        module = traced.lower(lowering_platforms=(platform,)).compiler_ir("hlo")
    computation = xla_builder.computation_from_module_proto("ring_attn", module.as_serialized_hlo_module_proto())
    return xla_builder.xla_computation_as_func(computation, "ring_attn")


def _struct(shape: tuple[int, ...], dtype: torch.dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax.numpy.dtype(str(dtype).removeprefix("torch.")))


@contextmanager
def _jax_for_torch_xla() -> Iterator[None]:
    """JAX as torch-xla needs it: away from the device that torch-xla holds, and with the partitioner that torch-xla has."""
    config: Any = jax.config  # its attributes are made at run time
    if not config.jax_platforms:  # what the user chose stays
        jax.config.update("jax_platforms", "cpu")
    shardy = config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", shardy)
