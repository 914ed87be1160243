"""Global arrays on a mesh: from PartitionSpecs to ``shard_map`` over local shards."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_core.api.differentiable import local_attention
from jax_core.kernels.merge import sinks_per_head
from jax_core.masks.layout import check_whole_length
from jax_core.operands import Operands
from jax_core.options import Options
from jax_core.request.checks import check_whole
from jax_core.request.dispatch import SHARED_QUERIES

Axes = str | tuple[str, ...] | None  # names of mesh axes
OutSpecs = PartitionSpec | tuple[PartitionSpec, PartitionSpec] | None  # of the output, with the LSE's
Results = TypeVar("Results")
_ORDER = ("query", "key", "value", "softmax_aux", "bias", "q_segment_ids", "kv_segment_ids")  # of in_specs


@dataclass(frozen=True)
class MeshPlan:
    """Which mesh axes split batch, sequence and heads, and how the result is sharded. ``shared_queries``: the queries are not split
    along the sequence, only the keys are."""

    mesh: Mesh | AbstractMesh
    batch: Axes
    sequence: Axes
    heads: Axes
    out_specs: OutSpecs = None
    return_lse: bool = False
    shared_queries: bool = False

    @property
    def queries(self) -> Axes:
        """The axes that split the queries along the sequence."""
        return None if self.shared_queries else self.sequence

    def size(self, axes: Axes) -> int:
        return prod(self.mesh.shape[axis] for axis in axis_names(axes))


def plan_mesh(
    operands: Operands,
    mesh: Mesh,
    axis_name: Axes,
    in_specs: Sequence[PartitionSpec | None] | None,
    out_specs: OutSpecs,
    return_lse: bool,
    strategy: str = "auto",
) -> MeshPlan:
    """The plan that the specs describe. Without specs the sequence is split over ``axis_name``, or over the mesh's only axis, and
    batch and heads are split as in the query."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    specs, shared = _specs_by_name(in_specs), strategy in SHARED_QUERIES
    of_query = None if shared else specs.get("query")
    batch, sequence, heads = _query_axes(operands, mesh, axis_name, of_query, _said_elsewhere(specs, out_specs))
    plan = MeshPlan(mesh=mesh, batch=batch, sequence=sequence, heads=heads, return_lse=return_lse, shared_queries=shared)
    for name, spec in specs.items():
        _check_spec(plan, operands, name, spec)
    out, lse = PartitionSpec(batch, plan.queries, heads, None), PartitionSpec(batch, heads, plan.queries)
    results = (out, lse) if return_lse else out
    _check_out_specs(out_specs, results)
    return replace(plan, out_specs=results)


def on_mesh(options: Options, operands: Operands, plan: MeshPlan, attention: Callable = local_attention) -> tuple[Callable, tuple]:
    """``(fn, args)``: ``fn(*args)`` is the attention of the global arrays ``args``. ``attention``: that of local shards."""
    check_whole(operands)  # in the shapes that the caller knows
    operands = _in_global_shape(operands)
    present = {name: array for name, array in operands._asdict().items() if array is not None and name != "predicate_arrays"}

    def whole(*arrays: Array) -> Array | tuple[Array, Array]:
        return result(_named(present, arrays))

    def local(*arrays: Array) -> Array | tuple[Array, Array]:
        shards = _named(present, arrays)
        where = plan.sequence, plan.size(plan.heads), _backend(plan.mesh)
        return result(shards._replace(origin=_origin(plan, shards)), *where)

    def result(shards: Operands, *where: object) -> Array | tuple[Array, Array]:
        out, lse = attention(options, shards, *where)
        return (out, lse) if plan.return_lse else out

    in_specs = tuple(operand_spec(plan, operands, name) for name in present)
    for (name, array), spec in zip(present.items(), in_specs, strict=True):
        check_divides(plan, name, array.shape, spec)
    for name, axes in (("query", plan.queries), ("key", plan.sequence)):
        if axes is not None:
            check_whole_length(options.layout, plan.size(axes), present[name].shape[1], f" of the {name}")
    if 0 in (*operands.query.shape, *operands.key.shape):  # XLA cannot split empty arrays
        return whole, tuple(present.values())
    # A result that is the same on all ranks because each has computed it is not one that check_vma knows for the same.
    mapped = jax.shard_map(local, mesh=plan.mesh, in_specs=in_specs, out_specs=plan.out_specs, check_vma=not plan.shared_queries)
    return partial(call_mapped, mapped, plan.mesh, in_specs), tuple(present.values())


def _named(names: Iterable[str], arrays: Sequence[Array]) -> Operands:
    return Operands(**{"key": None, "value": None, "query": None} | dict(zip(names, arrays, strict=True)))  # type: ignore[arg-type]


def _backend(mesh: Mesh | AbstractMesh) -> str | None:
    """The platform of the mesh's devices; None for an abstract mesh."""
    return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else None


def call_mapped(
    mapped: Callable[..., Results], mesh: Mesh | AbstractMesh, in_specs: Sequence[PartitionSpec | None], *arrays: Array | None
) -> Results:
    """``arrays``: None where there is no spec."""
    if AxisType.Explicit in mesh.axis_types:  # then shard_map reshards nothing and expects its operands as the specs say
        pairs = zip(arrays, in_specs, strict=True)
        arrays = tuple(None if spec is None else jax.reshard(array, NamedSharding(mesh, spec)) for array, spec in pairs)
    return mapped(*arrays)


def axis_names(axes: Axes) -> tuple[str, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _specs_by_name(in_specs: Sequence[PartitionSpec | None] | None) -> dict[str, PartitionSpec]:
    if in_specs is None:
        return {}
    if not isinstance(in_specs, (tuple, list)) or isinstance(in_specs, PartitionSpec) or not 3 <= len(in_specs) <= len(_ORDER):
        raise ValueError(f"in_specs must be 3 to {len(_ORDER)} PartitionSpecs, of {', '.join(_ORDER)}; got {in_specs!r}")
    return {name: spec for name, spec in zip(_ORDER, in_specs, strict=False) if spec is not None}


def _said_elsewhere(specs: dict[str, PartitionSpec], out_specs: OutSpecs) -> PartitionSpec | None:
    """How batch and heads are split where the query has no spec: as in key's, value's or the output's, whichever is given."""
    out = out_specs if out_specs is None or isinstance(out_specs, PartitionSpec) else next(iter(out_specs), None)
    return next((spec for spec in (specs.get("key"), specs.get("value"), out) if spec is not None), None)


def _query_axes(
    operands: Operands, mesh: Mesh, axis_name: Axes, query_spec: PartitionSpec | None, said: PartitionSpec | None
) -> tuple[Axes, Axes, Axes]:
    if query_spec is not None:
        batch, sequence, heads, dim = (*query_spec, None, None, None, None)[:4]
        if dim is not None:
            raise ValueError(f"the head dim must not be split; in_specs has query as {query_spec}")
        if axis_name is not None and axis_names(sequence) != axis_names(axis_name):
            raise ValueError(
                f"in_specs splits the query's sequence over {sequence!r}, but axis_name is {axis_name!r}; they must agree"
            )
    else:
        sequence = ring_axes(mesh, axis_name)
        batch, heads = batch_and_head_axes(operands.query, operands.key.shape[2], mesh, axis_names(sequence), said)
    unknown = [axis for axis in (*axis_names(batch), *axis_names(sequence), *axis_names(heads)) if axis not in mesh.axis_names]
    if unknown:
        raise ValueError(f"the mesh has axes {mesh.axis_names}; {', '.join(map(repr, unknown))} is not among them")
    return batch, sequence, heads


def ring_axes(mesh: Mesh, axis_name: Axes) -> Axes:
    if axis_name is None and len(mesh.axis_names) != 1:
        raise ValueError(f"which axis of the mesh is the ring? give axis_name, one of {mesh.axis_names}, or in_specs")
    return mesh.axis_names[0] if axis_name is None else axis_name


def batch_and_head_axes(
    query: Array, kv_heads: int, mesh: Mesh, ring: tuple[str, ...], said: PartitionSpec | None
) -> tuple[Axes, Axes]:
    """The axes that split batch and heads without a spec of the query: those that are said, or those of the array. If the array
    does not show them (XLA decides on the Auto axes of a traced array), the batch is split over the other axes as far as they
    divide it: gathering it would repeat the work along those axes."""
    spec = _visible_spec(query, mesh) if said is None else said
    if spec is None:
        return _dividing(mesh, [axis for axis in mesh.axis_names if axis not in ring], query.shape[0]), None
    batch, _, heads, _ = (*spec, None, None, None, None)[:4]
    batch, heads = ([axis for axis in axis_names(axes) if axis in mesh.axis_names and axis not in ring] for axes in (batch, heads))
    return _dividing(mesh, batch, query.shape[0]), _dividing(mesh, heads, kv_heads)


def _visible_spec(array: Array, mesh: Mesh) -> PartitionSpec | None:
    """How an array is sharded over a mesh with these axes, or None if it does not say."""
    if isinstance(array, jax.core.Tracer):
        sharding = jax.typeof(array).sharding
        return sharding.spec if AxisType.Explicit in mesh.axis_types else None
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _dividing(mesh: Mesh, axes: list[str], length: int) -> Axes:
    """The axes, taken in order, that together split ``length`` evenly; None if there are none."""
    dividing: list[str] = []
    for axis in axes:
        if length % prod(mesh.shape[name] for name in [*dividing, axis]) == 0:
            dividing.append(axis)
    return tuple(dividing) or None


def _check_spec(plan: MeshPlan, operands: Operands, name: str, spec: PartitionSpec) -> None:
    """A spec must split each dimension of its operand as the ring needs it, or leave it whole (it is then split on entry)."""
    array = getattr(operands, name)
    if array is None:
        return
    needed = tuple(operand_spec(plan, operands, name)) if name != "softmax_aux" else (plan.heads, None)
    axes_of_dims = tuple(spec)
    if len(axes_of_dims) > array.ndim:
        raise ValueError(f"in_specs has {name} as {spec}, more dimensions than its shape {tuple(array.shape)}")
    strict = name in ("query", "key", "value")
    axes_of_dims += (None,) * (len(needed) - len(axes_of_dims)) if strict else ()
    wrong = [i for i, axes in enumerate(axes_of_dims) if axis_names(axes) != axis_names(needed[i]) and (strict or axes is not None)]
    if wrong:
        raise ValueError(f"in_specs has {name} as {spec}, but with the query split so it must be {PartitionSpec(*needed)}")


def _check_out_specs(out_specs: Any, needed: PartitionSpec | tuple[PartitionSpec, PartitionSpec]) -> None:
    """The result is sharded as the query is; out_specs may only say the same."""
    several = isinstance(needed, tuple) and not isinstance(needed, PartitionSpec)
    pair = isinstance(out_specs, (tuple, list)) and not isinstance(out_specs, PartitionSpec)
    pairs = zip(out_specs, needed, strict=False) if several and pair else [(out_specs, needed)]
    fits = out_specs is None or (pair == several and (not pair or len(out_specs) == len(needed)))
    if not fits or (out_specs is not None and any(_axes(one) != _axes(other) for one, other in pairs)):
        raise ValueError(f"out_specs must be {needed}, as the query is split; got {out_specs}")


def _axes(spec: Iterable[Any]) -> list[tuple[str, ...]]:
    """The axes of each dimension, without trailing dimensions that are whole."""
    axes = [axis_names(entry) for entry in spec]
    while axes and not axes[-1]:
        axes.pop()
    return axes


def check_divides(plan: MeshPlan, name: str, shape: tuple[int, ...], spec: PartitionSpec) -> None:
    for dimension, (length, axes) in enumerate(zip(shape, spec, strict=False)):
        if length % plan.size(axes):
            raise ValueError(
                f"{name} has shape {shape}, but dimension {dimension} is split over {plan.size(axes)} devices (mesh axes "
                f"{axis_names(axes)}) and must be a multiple of that; pad it, or use a smaller mesh"
            )


def operand_spec(plan: MeshPlan, operands: Operands, name: str) -> PartitionSpec:
    """How an operand is split, following the query; dimensions of length 1 are not split."""
    array = getattr(operands, name)
    along = plan.queries if name in ("query", "q_segment_ids", "q_position_ids") else plan.sequence
    if name in ("query", "key", "value"):
        return PartitionSpec(plan.batch, along, plan.heads, None)
    if name == "softmax_aux":
        return PartitionSpec(plan.heads, None)
    if name == "dropout_seed":
        return PartitionSpec()
    whole = {
        "bias": (plan.batch, plan.heads, plan.sequence, None),
        "mask": (plan.batch, plan.heads, plan.sequence, None),
        "alibi_slopes": (plan.batch, plan.heads),
    }.get(name, (plan.batch, along))
    wanted = whole[len(whole) - array.ndim :]
    return PartitionSpec(*(None if length == 1 else axes for length, axes in zip(array.shape, wanted, strict=True)))


def _in_global_shape(operands: Operands) -> Operands:
    """Sinks as ``[heads, n]``: a sink shared by all heads must stay shared when heads are split."""
    if operands.softmax_aux is None or operands.softmax_aux.ndim != 1 or operands.query.ndim != 4:
        return operands
    return operands._replace(softmax_aux=sinks_per_head(operands.softmax_aux, operands.query.shape[2]))


def _origin(plan: MeshPlan, shards: Operands) -> Array:
    """The global indices of this device's first batch entry and head."""
    lengths = shards.query.shape[0], shards.query.shape[2]
    numbers = [
        lax.axis_index(axes) * length if axis_names(axes) else 0
        for axes, length in zip((plan.batch, plan.heads), lengths, strict=True)
    ]
    return jnp.stack([jnp.asarray(number, jnp.int32) for number in numbers])
