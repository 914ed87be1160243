"""Programs over shared memory: the forward and backward of one request on one ring, compiled once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec

from jax_core.request.options import Placement
from torch_bridge.backends.dlpack import keeping_device, precision_scope
from torch_bridge.backends.launch import Compiled, Join, Launcher, launcher
from torch_bridge.backends.operation import Form, Local, Request, Results
from torch_bridge.job.mesh import Ring, jax_mesh, jax_platform, joiner, sharding
from torch_bridge.job.ring import Tensors
from torch_bridge.job.runtime import start
from torch_bridge.job.sanity_checks import shapes_only
from torch_bridge.job.watchdog import compare, watch
from torch_bridge.job.xla_options import options_of_ring

_MUST_AGREE = (
    "ring_attention must be called with shards of the same shapes and dtypes and with the same options on every rank of the ring; "
    "pad the sequence so that it divides (ring_attn.pad)"
)


@dataclass(eq=False)
class Program:
    """One request, ready to run on this process's shards, which are given in the order of the request's forms."""

    request: Request
    call: str  # a description of the request that is equal on all ranks
    ring: Ring
    dtype: torch.dtype  # of the first result
    launcher: Launcher
    join: Join
    compiled_forward: Compiled
    compiled_backward: Callable[[tuple[int, ...]], Compiled]  # for each set of wanted gradients
    operators: None = None
    checked: bool = False  # whether the ranks have compared what they hold

    def forward(self, operands: Tensors) -> Results:
        if not self.checked and not shapes_only():
            if self.ring.size > 1:
                self.request.operation.check_ranks(self.request, self.ring, operands)
            self.checked = True
        return tuple(self._run("forward", self.compiled_forward, operands))

    def backward(self, operands: Tensors, results: Tensors, cotangents: Tensors, wanted: Sequence[int]) -> list[torch.Tensor]:
        return self._run("backward", self.compiled_backward(tuple(wanted)), (*operands, *results, *cotangents))

    def _run(self, step: str, compiled: Compiled, tensors: Tensors) -> list[torch.Tensor]:
        with keeping_device(self.request.device), precision_scope(self.dtype), watch(self.ring, step, self.call) as call:
            outcome = self.launcher(self.join, compiled, tensors)
            call.event = outcome.event
        return outcome.results


def program(request: Request) -> Program:
    """Checks the request (ValueError, NotImplementedError) and makes its program. Starts JAX: with a ring of several processes the
    first call is a collective of all processes."""
    device, ring = request.device, request.ring
    assert isinstance(ring, Ring)
    local, results = _checked(request, ring), request.results
    way, platform = launcher(device), jax_platform(device)
    on_ring = partial(_on_ring, ring, platform, way.in_place)
    forward = on_ring(local.forward, len(request.forms), results)

    def backward(wanted: tuple[int, ...]) -> Compiled:
        gradients = tuple(form for number in wanted if (form := request.forms[number]) is not None)
        return on_ring(partial(local.backward, wanted), len(request.forms) + 2 * len(results), gradients)

    return Program(
        request=request,
        call=str(request),
        ring=ring,
        dtype=results[0].dtype,
        launcher=way,
        join=joiner(ring, platform),
        compiled_forward=forward,
        compiled_backward=cache(backward),
    )


def _checked(request: Request, ring: Ring) -> Local:
    """Checks the request on this rank, then compares it with those of the other ranks."""
    local = local_of(request, ring)
    compare(ring, str(request), _MUST_AGREE)
    return local


def local_of(request: Request, ring: Ring) -> Local:
    """Checks the request on this rank, and decides what computes it. Starts JAX."""
    device = request.device
    with keeping_device(device), precision_scope(request.results[0].dtype):
        start(ring=ring, device=device)
        local = request.operation.local(request, _placement(ring, jax_platform(device)))
        launcher(device)  # so that an error on this rank is raised before a comparison
    return local


def _alone(ring: Ring) -> bool:
    """Whether the ring has no axes in JAX. Several stay even with one rank: a strategy that goes by two of them runs there too."""
    return ring.size == 1 and len(ring.axes) == 1


def _placement(ring: Ring, platform: str) -> Placement:
    axis = None if _alone(ring) else ring.axis_name
    return Placement(axis_name=axis, size=ring.size, sizes=ring.sizes, backend=platform)


def _on_ring(
    ring: Ring, platform: str, in_place: bool, function: Callable[..., object], operands: int, results: tuple[Form, ...]
) -> Compiled:
    """``function`` of local shards, jitted over the ring. Every operand and result is treated as a block of rows of a global array,
    whatever its dimensions mean, so none needs its own sharding."""
    settings: dict[str, Any] = {}
    if in_place:
        # Arguments that nothing reads: they are donated, and each becomes the memory of the result with its form.
        memory = tuple(range(operands, operands + len(results)))
        settings, function = dict(donate_argnums=memory, keep_unused=True), partial(_first, operands, function)
    if _alone(ring):
        return Compiled(jax.jit(function, **settings), results)
    if platform == "gpu":
        settings["compiler_options"] = options_of_ring(len(ring.sizes))
    rows = PartitionSpec(ring.axis_name)
    mapped = jax.shard_map(function, mesh=jax_mesh(ring, platform), in_specs=rows, out_specs=rows, check_vma=False)
    return Compiled(jax.jit(mapped, out_shardings=sharding(ring, platform), **settings), results)


def _first(count: int, function: Callable[..., object], *arrays: jax.Array | None) -> object:
    return function(*arrays[:count])
