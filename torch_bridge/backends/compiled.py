"""Programs over shared memory: the forward and backward of one request on one ring, compiled once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec, SingleDeviceSharding

from jax_core.options import Placement
from torch_bridge.backends.capture import CAPTURED, is_captured, shapes_only
from torch_bridge.backends.dlpack import keeping_device, precision_scope
from torch_bridge.backends.executable import Compilation, Executable
from torch_bridge.backends.launch import Compiled, Join, Launcher, jax_device, launcher
from torch_bridge.backends.operation import Request, Results, ShardProgram, TensorSpec
from torch_bridge.failures.watchdog import compare, watch
from torch_bridge.mesh.jax_mesh import jax_mesh, jax_platform, joiner, sharding
from torch_bridge.mesh.protocol import Tensors
from torch_bridge.mesh.rings import ProcessRing
from torch_bridge.start.runtime import start
from torch_bridge.start.xla_options import options_of_ring

_MUST_AGREE = (
    "{} must be called with shards of the same shapes and dtypes and with the same options on every rank of the ring; "
    "pad the sequence so that it divides (ring_attn.pad)"
)


@dataclass(eq=False)
class CompiledProgram:
    """One request, ready to run on this process's shards, which are given in the order of the request's specs."""

    request: Request
    call: str  # a description of the request that is equal on all ranks
    local: ShardProgram
    ring: ProcessRing
    dtype: torch.dtype  # of the first result
    launcher: Launcher
    join: Join
    compiled_forward: Compiled
    compiled_backward: Callable[[tuple[int, ...], tuple[bool, ...]], Compiled]  # for each wanted gradients and given cotangents
    executables: list[Executable]  # in the order of their first calls
    operators: None = None
    checked: bool = False  # whether the ranks have compared what they hold

    def check(self, operands: Tensors) -> None:
        """Compares what the ranks hold, the first time."""
        if not self.checked and not shapes_only():
            if is_captured(self.request.device):
                raise RuntimeError(CAPTURED)
            if self.ring.size > 1:
                self.request.operation.check_ranks(self.request, self.ring, operands)
            self.checked = True
            self._expect_backward(operands)

    def forward(self, operands: Tensors) -> Results:
        self.check(operands)
        return tuple(self._run("forward", self.compiled_forward, operands))

    def backward(self, operands: Tensors, results: Tensors, cotangents: Tensors, wanted: Sequence[int]) -> list[torch.Tensor]:
        compiled = self.compiled_backward(tuple(wanted), tuple(x is not None for x in cotangents))
        return self._run("backward", compiled, (*operands, *results, *cotangents))

    def _expect_backward(self, operands: Tensors) -> None:
        """Have a backward compiled while the first forward is, and runs: of those operands that need gradients now. Where it is not
        known which results will have a cotangent, it is compiled when it is called."""
        needed = {number for number, x in enumerate(operands) if x is not None and x.requires_grad}
        if needed and self.request.operation.has_one_cotangent:
            wanted = tuple(sorted(needed.union(self.request.operation.differentiated)))
            self.executables[0].meanwhile = partial(self._compile_backward, wanted)

    def _compile_backward(self, wanted: tuple[int, ...]) -> None:
        request, absent = self.request, (None,) * (len(self.request.results) - 1)
        compiled = self.compiled_backward(wanted, (True, *(False for _ in absent)))
        memory = compiled.results if self.launcher.in_place else ()
        specs = *request.specs, *request.results, request.results[0], *absent, *memory
        arrays = [spec and _abstract(spec, self.ring, request.device) for spec in specs]
        assert isinstance(compiled.function, Executable)
        compiled.function.compile_ahead(arrays, partial(_scope, request.device, self.dtype))

    @property
    def taken(self) -> str:
        """What computes it, in words: the strategy and the kernel."""
        return str(self.local)

    @property
    def compilations(self) -> list[Compilation]:
        return [each for executable in self.executables for each in executable.compilations]

    def _run(self, step: str, compiled: Compiled, tensors: Tensors) -> list[torch.Tensor]:
        if is_captured(self.request.device):
            raise RuntimeError(CAPTURED)
        device = self.request.device
        watched = watch(self.ring, step, self.call, limited=device.type == "cuda")
        with keeping_device(device), precision_scope(self.dtype), watched as call:
            outcome = self.launcher(self.join, compiled, tensors)
            call.event = outcome.event
        return outcome.results


def program(request: Request) -> CompiledProgram:
    """Checks the request (ValueError, NotImplementedError) and makes its program. Starts JAX: with a ring of several processes the
    first call is a collective of all processes."""
    device, ring = request.device, request.ring
    assert isinstance(ring, ProcessRing)
    local, results = _checked(request, ring), request.results
    device_launcher, platform, call = launcher(device), jax_platform(device), str(request)
    executables: list[Executable] = []

    def compiled(what: str, function: Callable[..., object], operands: int, results: tuple[TensorSpec, ...]) -> Compiled:
        on_ring = _on_ring(ring, platform, device_launcher.in_place, function, operands, results)
        executables.append(Executable(on_ring, what, f"{call} by {local}", loud=ring.ranks[ring.rank] == 0))
        return Compiled(executables[-1], results)

    @cache
    def backward(wanted: tuple[int, ...], given: tuple[bool, ...]) -> Compiled:
        gradients = tuple(spec for number in wanted if (spec := request.specs[number]) is not None)
        return compiled("backward", partial(local.backward, wanted), len(request.specs) + len(results) + len(given), gradients)

    return CompiledProgram(
        request=request,
        call=call,
        local=local,
        ring=ring,
        dtype=results[0].dtype,
        launcher=device_launcher,
        join=joiner(ring, platform),
        compiled_forward=compiled("forward", local.forward, len(request.specs), results),
        compiled_backward=backward,
        executables=executables,
    )


def _checked(request: Request, ring: ProcessRing) -> ShardProgram:
    """Checks the request on this rank, then compares it with those of the other ranks."""
    local = local_of(request, ring)
    compare(ring, str(request), _MUST_AGREE.format(request.operation.name))
    return local


def local_of(request: Request, ring: ProcessRing) -> ShardProgram:
    """Checks the request on this rank, and decides what computes it. Starts JAX."""
    device = request.device
    with keeping_device(device), precision_scope(request.results[0].dtype):
        start(ring=ring, device=device)
        local = request.operation.local(request, _placement(ring, jax_platform(device)))
        launcher(device)  # so that an error on this rank is raised before a comparison
    return local


@contextmanager
def _scope(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    with keeping_device(device), precision_scope(dtype):
        yield


def _abstract(spec: TensorSpec, ring: ProcessRing, device: torch.device) -> jax.ShapeDtypeStruct:
    """What a launcher makes of this rank's tensor of this spec."""
    dtype = jax.numpy.dtype(str(spec.dtype).removeprefix("torch."))
    if ring.size == 1:
        return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=SingleDeviceSharding(jax_device(device)))
    whole = ring.size * spec.shape[0], *spec.shape[1:]
    return jax.ShapeDtypeStruct(whole, dtype, sharding=sharding(ring, jax_platform(device)))


def _alone(ring: ProcessRing) -> bool:
    """Whether the ring has no axes in JAX. Several stay even with one rank: a strategy that goes by two of them runs there too."""
    return ring.size == 1 and len(ring.axes) == 1


def _placement(ring: ProcessRing, platform: str) -> Placement:
    axis = None if _alone(ring) else ring.axis_name
    return Placement(axis_name=axis, size=ring.size, sizes=ring.sizes, backend=platform)


def _on_ring(
    ring: ProcessRing,
    platform: str,
    in_place: bool,
    function: Callable[..., object],
    operands: int,
    results: tuple[TensorSpec, ...],
) -> "jax.stages.Wrapped":
    """``function`` of local shards, jitted over the ring. Every operand and result is treated as a block of rows of a global array,
    whatever its dimensions mean, so none needs its own sharding."""
    settings: dict[str, Any] = {}
    if in_place:
        # Arguments that nothing reads: they are donated, and each becomes the memory of the result with its spec.
        memory = tuple(range(operands, operands + len(results)))
        settings, function = dict(donate_argnums=memory, keep_unused=True), partial(_first, operands, function)
    if platform == "gpu":
        settings["compiler_options"] = options_of_ring(len(ring.sizes))
    if _alone(ring):
        return jax.jit(function, **settings)
    rows = PartitionSpec(ring.axis_name)
    mapped = jax.shard_map(function, mesh=jax_mesh(ring, platform), in_specs=rows, out_specs=rows, check_vma=False)
    return jax.jit(mapped, out_shardings=sharding(ring, platform), **settings)


def _first(count: int, function: Callable[..., object], *arrays: jax.Array | None) -> object:
    return function(*arrays[:count])
