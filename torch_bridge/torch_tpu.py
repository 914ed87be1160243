"""TorchTPU's road (docs/torch_tpu.md): the ring as torch operators that ``torch.tpu.pallas.jax_op`` makes of JAX functions.

torch-tpu holds the TPU and compiles what JAX has traced; JAX itself runs nothing there. An operator is one program of the whole
world, in which equal rings that tile it run side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
import torch.distributed as dist
from jax.sharding import Mesh, PartitionSpec

from jax_core.masks.functions import from_mask_mod
from jax_core.request.options import Options, Placement
from jax_core.request.spec import both_sides, make_spec
from jax_core.strategies.contract import Operands, RingSpec
from torch_bridge.crossing import Form
from torch_bridge.dlpack import narrow_ids
from torch_bridge.mesh import AXIS, Ring, resolve

FORWARD, BACKWARD = "tpu_forward", "tpu_backward"  # operators in the namespace ring_attn; each one's number follows
Grid = tuple[int, int, int]


def attend(
    where: tuple[Any, str | int | None], tensors: dict[str, torch.Tensor | None], dropout_seed: int | None, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of this rank's shards on a TPU; arguments and results as :func:`torch_bridge.autograd.attend`.

    With a ring of several processes all processes of the world make the call, with equal shapes, dtypes and options, which are
    not compared. Raises NotImplementedError for float64 and for rings that do not tile the world, ImportError without torch-tpu,
    RuntimeError where JAX would take the TPU, and what :func:`jax_core.request.options.make_spec` raises.
    """
    given = _given(tensors, dropout_seed)
    return _attend(where, given, [], options) if options["mask_mod"] is None else _with_mask_mod(where, given, options)


@torch.compiler.disable
def _with_mask_mod(where, given: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask function as it is now: traced, and the arrays that it closes over as further operands, of a dimension at least."""
    _keep_jax_on_cpu()
    predicate, consts = from_mask_mod(options["mask_mod"])
    further = [torch.from_numpy(np.array(const, ndmin=1)).to(given["query"].device) for const in consts]
    return _attend(where, given, further, {**options, "mask_mod": None, "predicates": (predicate,)})


def _attend(
    where, given: dict[str, torch.Tensor], further: list[torch.Tensor], options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = [*given.values(), *further]
    forms = tuple(Form(tuple(x.shape), x.dtype) for x in arrays)
    run = getattr(torch.ops.ring_attn, f"{FORWARD}_{_number(where, options, tuple(given), forms)}")
    out, lse = run([x.contiguous() for x in arrays])
    return out, lse


@torch.compiler.assume_constant_result
def _number(where: tuple[Any, str | int | None], options: dict[str, Any], names: tuple[str, ...], forms: tuple[Form, ...]) -> int:
    """The number of the operators; under ``torch.compile`` found once, while tracing."""
    _keep_jax_on_cpu()
    return operators(tile_world(resolve(*where)), tuple(options.items()), names, forms).number


def _keep_jax_on_cpu() -> None:
    """A TPU has one owner, torch-tpu; what JAX has to compute while it traces is for the CPU."""
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]  # made at run time
    if not platforms:
        jax.config.update("jax_platforms", "cpu")
    elif platforms.split(",")[0] != "cpu":
        raise RuntimeError(
            f"JAX must keep to the CPU beside torch-tpu, which holds the TPU; got platforms {platforms!r}; set JAX_PLATFORMS=cpu"
        )


def _given(tensors: dict[str, torch.Tensor | None], dropout_seed: int | None) -> dict[str, torch.Tensor]:
    """The operands that there are, by name and in the order of :class:`Operands`, in dtypes that JAX has."""
    query = tensors["query"]
    assert query is not None
    if query.dtype == torch.float64:
        raise NotImplementedError("q, k and v must be bfloat16, float16 or float32 on a TPU, got float64; cast them")
    ids = {name: narrow_ids(x, name) for name, x in tensors.items() if name.endswith("_ids") and x is not None}
    seed = None if dropout_seed is None else _seed_words(dropout_seed).to(query.device)
    named: dict[str, Any] = {**tensors, **ids, "dropout_seed": seed}
    return {name: x for name, x in both_sides(Operands(**named))._asdict().items() if isinstance(x, torch.Tensor)}


def _seed_words(seed: int) -> torch.Tensor:
    """64 bits as two int32 words, low first; JAX reads them as unsigned."""
    return torch.full((1,), (seed + 2**63) % 2**64 - 2**63, dtype=torch.int64).view(torch.int32)


def tile_world(ring: Ring) -> Grid | None:
    """The world as a grid ``(before, ring, after)`` of rings like this one, in the order of its ranks; None for a ring of one.

    Raises NotImplementedError where there is no such grid.
    """
    if ring.size == 1:
        return None
    world, first, step = dist.get_world_size(), ring.ranks[0], ring.ranks[1] - ring.ranks[0]
    even = ring.ranks == tuple(first + step * place for place in range(ring.size))
    if step < 1 or not even or world % (ring.size * step) or first % (ring.size * step) >= step:
        raise NotImplementedError(
            f"torch-tpu runs one program on all {world} processes, which equal rings of ascending, evenly spaced ranks must tile; "
            f"got a {ring}; take a dimension of a DeviceMesh of all ranks, or the default process group"
        )
    return world // (ring.size * step), ring.size, step


class Operators(NamedTuple):
    """One attention in torch, by the number in its names: ``forward (Tensor[] operands) -> (Tensor out, Tensor lse)``, whose
    autograd calls ``backward (Tensor[] arrays, int[] wanted) -> Tensor[]`` with the operands, out, lse and their cotangents."""

    forward: Any
    backward: Any
    number: int


@cache
def operators(
    grid: Grid | None, options: tuple[tuple[str, Any], ...], names: tuple[str, ...], forms: tuple[Form, ...]
) -> Operators:
    """Checks the request (ValueError, NotImplementedError) and makes its operators.

    ``names``: the first operands' among :class:`Operands`; those of a mask function follow. ``forms``: of all.
    """
    attention = specify(grid, Options(**dict(options)), names, forms)
    pallas = _pallas()
    world = None if grid is None else pallas.get_pallas_mesh(AXIS)
    number = operators.cache_info().misses  # the same on all ranks, which make their programs in one order
    rows = None if world is None else PartitionSpec(AXIS)

    def register(name: str, function: Callable) -> Any:
        specs = {} if rows is None else dict(mesh=world, input_partition_specs=(rows, None), output_partition_specs=(AXIS,))
        return pallas.jax_op(f"ring_attn::{name}_{number}", function, **specs)

    forward, backward = map(register, (FORWARD, BACKWARD), over_world(attention, world, grid))
    forward.register_autograd(partial(_gradients, backward, attention.spec.lse_gradient), setup_context=_save)
    return Operators(forward, backward, number)


def _pallas() -> ModuleType:
    try:
        from torch.tpu import pallas  # type: ignore[import-not-found]  # torch-tpu installs it
    except ImportError as error:
        raise ImportError(
            'tensors on "tpu" need torch-tpu >= 0.2, for its torch.tpu.pallas, and JAX beside it; pip install "torch-tpu>=0.2"'
        ) from error
    return pallas


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention of local shards in JAX, on lists of arrays that begin with the operands in ``names``."""

    spec: RingSpec
    names: tuple[str, ...]
    masks: tuple[tuple[np.ndarray, ...], ...]  # of a mask builder: constants of the program

    def forward(self, operands: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return self.spec.strategy.forward(self.spec, self._operands(operands))

    def backward(self, arrays: Sequence[jax.Array], wanted: Sequence[int]) -> list[jax.Array]:
        count = len(arrays) - (4 if self.spec.lse_gradient else 3)
        gradients = self.spec.strategy.backward(self.spec, self._operands(arrays[:count]), *arrays[count:])
        return [getattr(gradients, self.names[number]) for number in wanted]

    def _operands(self, arrays: Sequence[jax.Array]) -> Operands:
        named: dict[str, Any] = dict(zip(self.names, arrays, strict=False))
        lifted = len(self.masks) < len(self.spec.scores.predicates)  # a mask function was, whose arrays may be none
        return Operands(**named, predicate_arrays=((tuple(arrays[len(self.names) :]),) if lifted else ()) + self.masks)


def specify(grid: Grid | None, options: Options, names: tuple[str, ...], forms: tuple[Form, ...]) -> Attention:
    named: dict[str, Any] = dict(zip(names, forms, strict=False))
    place = Placement(AXIS, grid[1], backend="tpu") if grid else Placement(backend="tpu")
    spec, completed = make_spec(options, Operands(**named), place)
    return Attention(spec, names, tuple(tuple(np.asarray(array) for array in arrays) for arrays in completed.predicate_arrays))


def over_world(attention: Attention, world: Mesh | None, grid: Grid | None) -> tuple[Callable, Callable]:
    """Its forward and backward on arrays whose blocks of rows are the shards of the world's processes, as in
    :mod:`torch_bridge.compiled`: no operand needs a sharding of its own. ``jax_op`` reads their signatures."""
    rings = _rings(world, grid)

    def forward(operands: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _on_rows(rings, attention.forward)(operands)

    def backward(arrays: Sequence[jax.Array], wanted: Sequence[int]) -> Sequence[jax.Array]:
        return _on_rows(rings, partial(attention.backward, wanted=wanted))(arrays)

    return forward, backward


def _rings(world: Mesh | None, grid: Grid | None) -> Mesh | None:
    """The world's mesh with an axis for its rings; itself, where they are one."""
    if world is None or grid is None or grid[1] == world.size:
        return world
    return Mesh(world.devices.reshape(grid), ("before", AXIS, "after"))


def _on_rows(rings: Mesh | None, function: Callable) -> Callable:
    if rings is None:
        return function
    rows = PartitionSpec(rings.axis_names)
    return jax.shard_map(function, mesh=rings, in_specs=rows, out_specs=rows, check_vma=False)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[0], *output)


def _gradients(backward_op, lse_gradient: bool, ctx, dout: torch.Tensor, dlse: torch.Tensor) -> list[torch.Tensor | None]:
    needed = ctx.needs_input_grad[0]
    # Those of query, key and value always: what travels must not depend on which of them a rank wants.
    wanted = [number for number, need in enumerate(needed) if need or number < 3]
    cotangents = [dout, dlse] if lse_gradient else [dout]
    found = iter(backward_op([*ctx.saved_tensors, *(x.contiguous() for x in cotangents)], wanted))
    gradients = {number: next(found) for number in wanted}
    return [gradients[number] if need else None for number, need in enumerate(needed)]
