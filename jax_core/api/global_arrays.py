"""A strategy's forward and backward on global arrays on a mesh, for an autograd other than JAX's.

:mod:`jax_core.api.mesh` combines the two into one differentiable JAX function; here they stay separate.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jax_core.api.mesh import MeshPlan, axis_names, check_divides, operand_spec
from jax_core.operands import Operands
from jax_core.options import Options, Placement
from jax_core.request.checks import check_operands
from jax_core.request.dispatch import SHARED_QUERIES
from jax_core.request.spec import make_spec
from jax_core.strategies.contract import RingSpec

WHOLE = PartitionSpec()
_ArrayLike = jax.Array | jax.ShapeDtypeStruct


def plan_sequence(mesh: Mesh | AbstractMesh, sequence: str, batch: int) -> MeshPlan:
    """Splits the sequence over one axis of the mesh, and ``batch`` over all the others if they divide it."""
    others = tuple(axis for axis in mesh.axis_names if axis != sequence) or None
    plan = MeshPlan(mesh=mesh, batch=others, sequence=sequence, heads=None, return_lse=True)
    return plan if batch % plan.size(others) == 0 else replace(plan, batch=None)


class _Place(NamedTuple):
    """A device's index along the ring and along the batch axes, int32 ``[1]`` each. They are operands because not every partitioner
    can compute them (torch-xla's refuses XLA's PartitionId where it cannot see that it is meant for one device)."""

    ring: jax.Array
    batch: jax.Array


@dataclass(frozen=True, eq=False)
class GlobalAttention:
    """One attention. ``arrays`` are the operands given to :func:`attention_on_mesh` that are not None, in the order of
    :class:`jax_core.strategies.contract.Operands`, then the arrays of ``options.predicates``."""

    plan: MeshPlan | None
    spec: RingSpec
    specs: dict[str, PartitionSpec]  # of the operands that are not None
    masks: tuple[tuple[np.ndarray, ...], ...]  # of a mask_builder
    lifted: bool  # whether arrays of predicates follow the operands in ``arrays``

    def forward(self, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``out [batch, q_length, heads, value_dim]`` and ``lse [batch, heads, q_length]``, as the strategies' contract says."""
        return self._mapped(self._forward, self._array_specs(arrays), self._result_specs())(*arrays)

    def backward(
        self,
        wanted: tuple[str, ...],
        out: jax.Array,
        lse: jax.Array,
        dout: jax.Array,
        dlse: jax.Array | None,
        *arrays: jax.Array,
    ) -> tuple[jax.Array, ...]:
        """The gradients, summed over all devices, of the operands named in ``wanted``; ``dlse`` may be None."""
        out_spec, lse_spec = self._result_specs()
        in_specs = out_spec, lse_spec, out_spec, lse_spec, *self._array_specs(arrays)
        function = self._mapped(partial(self._backward, wanted), in_specs, tuple(self.specs[name] for name in wanted))
        return function(out, lse, dout, dlse, *arrays)

    def _forward(self, place: _Place | None, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.spec.strategy.forward(self.spec, self._shards(place, arrays))

    def _backward(
        self,
        wanted: tuple[str, ...],
        place: _Place | None,
        out: jax.Array,
        lse: jax.Array,
        dout: jax.Array,
        dlse: jax.Array | None,
        *arrays: jax.Array,
    ) -> tuple[jax.Array, ...]:
        gradients = self.spec.strategy.backward(self.spec, self._shards(place, arrays), out, lse, dout, dlse)
        return tuple(self._summed(getattr(gradients, name), self.specs[name]) for name in wanted)

    def _summed(self, part: jax.Array, spec: PartitionSpec) -> jax.Array:
        """The gradient of an operand that devices share is the sum of their parts."""
        if self.plan is None:
            return part
        split = {axis for axes in spec for axis in axis_names(axes)}
        shared = [axis for axis in (*axis_names(self.plan.batch), *axis_names(self.plan.sequence)) if axis not in split]
        return lax.psum(part, tuple(shared)) if shared else part

    def _shards(self, place: _Place | None, arrays: tuple[jax.Array, ...]) -> Operands:
        named: dict[str, Any] = {"key": None, "value": None, "query": None} | dict(zip(self.specs, arrays, strict=False))
        further = (tuple(arrays[len(self.specs) :]),) if self.lifted else ()
        shards = Operands(**named, predicate_arrays=further + self.masks)
        if place is None:
            return shards
        first = place.batch[0] * shards.query.shape[0]
        return shards._replace(rank=place.ring, origin=jnp.stack([first, jnp.zeros_like(first)]))

    def _array_specs(self, arrays: tuple[jax.Array, ...]) -> tuple[PartitionSpec, ...]:
        return *self.specs.values(), *(WHOLE for _ in arrays[len(self.specs) :])

    def _result_specs(self) -> tuple[PartitionSpec, PartitionSpec]:
        if self.plan is None:
            return WHOLE, WHOLE
        return PartitionSpec(self.plan.batch, self.plan.sequence), PartitionSpec(self.plan.batch, None, self.plan.sequence)

    def _mapped(self, function: Callable, in_specs: tuple[PartitionSpec, ...], out_specs: tuple[PartitionSpec, ...]) -> Callable:
        if self.plan is None:
            return partial(function, None)
        axes = self.plan.sequence, self.plan.batch
        places = _Place(*(jnp.arange(self.plan.size(names), dtype=jnp.int32) for names in axes))
        specs = _Place(*map(PartitionSpec, axes)), *in_specs  # type: ignore[arg-type]  # one spec for each array
        return partial(jax.shard_map(function, mesh=self.plan.mesh, in_specs=specs, out_specs=out_specs, check_vma=False), places)


def attention_on_mesh(options: Options, operands: Operands, plan: MeshPlan | None, backend: str) -> GlobalAttention:
    """Checks a request (ValueError, NotImplementedError) and returns its attention.

    ``operands``: global, in the layout's order; only their shapes and dtypes are read, so ``jax.ShapeDtypeStruct`` is enough.
    ``plan``: None without a ring. ``backend``: the hardware that it will run on.
    """
    if plan is not None and options.strategy in SHARED_QUERIES:
        raise NotImplementedError(
            f'strategy="{options.strategy}" is for tensors on a CPU or a GPU, and for JAX; on this device every tensor is split'
        )
    check_operands(operands, options.layout, 1)
    present = {name: array for name, array in operands._asdict().items() if array is not None and name != "predicate_arrays"}
    specs = {name: _spec(plan, operands, name) for name in present}
    local: dict[str, Any] = {name: _shard_like(plan, name, array, specs[name]) for name, array in present.items()}
    axis, size = (None, 1) if plan is None else (plan.sequence, plan.size(plan.sequence))
    spec, completed = make_spec(
        options, Operands(**local), Placement(axis_name=axis if size > 1 else None, size=size, backend=backend)
    )
    masks = tuple(tuple(np.asarray(array) for array in arrays) for arrays in completed.predicate_arrays)
    return GlobalAttention(plan, spec, specs, masks, bool(options.predicates))


def _spec(plan: MeshPlan | None, operands: Operands, name: str) -> PartitionSpec:
    return WHOLE if plan is None or name == "softmax_aux" else operand_spec(plan, operands, name)


def _shard_like(plan: MeshPlan | None, name: str, array: _ArrayLike, spec: PartitionSpec) -> _ArrayLike:
    if plan is None:
        return array
    check_divides(plan, name, array.shape, spec)
    lengths = tuple(length // plan.size(axes) for length, axes in zip_longest(array.shape, spec))
    return jax.ShapeDtypeStruct(lengths, array.dtype)
