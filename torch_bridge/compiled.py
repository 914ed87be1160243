"""The compiled pair (forward, backward) of one attention on one ring: made once per static setting and signature."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import PartitionSpec

from jax_core.request.options import Options, Placement
from jax_core.request.spec import make_spec
from jax_core.strategies.contract import Operands, RingSpec
from torch_bridge.calls import compare, watch
from torch_bridge.crossing import Compiled, Crossing, Form, Join, Tensors, crossing
from torch_bridge.dlpack import keeping_device, precision_scope
from torch_bridge.mesh import AXIS, Ring, jax_mesh, jax_platform, joiner, sharding
from torch_bridge.runtime import start

ARRAYS = Operands._fields[: Operands._fields.index("origin")]  # what torch hands over, in this order

_MUST_AGREE = (
    "ring_attention must be called with shards of the same shapes and dtypes and with the same options on every rank of the ring; "
    "pad the sequence so that it divides (ring_attn.pad)"
)
# XLA on GPU makes one collective of the arrays that leave together up to 30 MiB; of more, only one would run beside the kernel.
ONE_ROTATION = {"xla_gpu_collective_permute_combine_threshold_bytes": str(2**40)}

Signature = tuple[Form | None, ...]  # one for each of ARRAYS, then one for each array of a mask function


@dataclass(frozen=True, eq=False)
class Program:
    """One attention, ready to run on this process's shards, which come in the order of ``ARRAYS``."""

    ring: Ring
    device: torch.device
    call: str  # in words that are equal on all ranks
    crossing: Crossing
    join: Join
    compiled_forward: Compiled
    compiled_backward: Callable[[tuple[int, ...]], Compiled]  # for each choice of wanted gradients

    @property
    def out(self) -> Form:
        return self.compiled_forward.results[0]

    @property
    def lse(self) -> Form:
        return self.compiled_forward.results[1]

    def forward(self, operands: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self._run("forward", self.compiled_forward, operands)
        return out, lse

    def backward(self, operands: Tensors, out, lse, dout, dlse: torch.Tensor | None, wanted: Sequence[int]) -> list[torch.Tensor]:
        """The gradients of the operands numbered in ``wanted``, in its order."""
        # Those of query, key and value always: what travels must not depend on which of them a rank wants.
        made = tuple(sorted({0, 1, 2, *wanted}))
        gradients = self._run("backward", self.compiled_backward(made), (*operands, out, lse, dout, dlse))
        return [gradients[made.index(number)] for number in wanted]

    def _run(self, step: str, compiled: Compiled, tensors: Tensors) -> list[torch.Tensor]:
        with keeping_device(self.device), precision_scope(self.out.dtype), watch(self.ring, step, self.call) as call:
            outcome = self.crossing(self.join, compiled, tensors)
            call.event = outcome.event
        return outcome.results


@cache
def program(options: Options, signature: Signature, ring: Ring, device: torch.device) -> Program:
    """Checks the request (ValueError, NotImplementedError) and makes its program. JAX runs after it: with a ring of several
    processes the first call is a collective one of all processes."""
    out, lse = _results(signature)
    with keeping_device(device), precision_scope(out.dtype):
        start(ring=ring, device=device)
        spec, operands = make_spec(
            options, _operands(signature), Placement(AXIS if ring.size > 1 else None, ring.size, backend=jax_platform(device))
        )
        way = crossing(device)
    # Constants of the compiled program; as NumPy arrays they belong to no device.
    masks = tuple(tuple(np.asarray(array) for array in arrays) for arrays in operands.predicate_arrays)
    call = _described(options, signature)
    compare(ring, call, _MUST_AGREE)
    on_ring = partial(_on_ring, ring, jax_platform(device), way.in_place)
    forward = on_ring(partial(_forward, spec, masks), len(signature), (out, lse))

    def backward(wanted: tuple[int, ...]) -> Compiled:
        gradients = tuple(form for number in wanted if (form := signature[number]) is not None)
        return on_ring(partial(_backward, spec, masks, wanted), len(signature) + 4, gradients)

    return Program(ring, device, call, way, joiner(ring, jax_platform(device)), forward, cache(backward))


def _results(signature: Signature) -> tuple[Form, Form]:
    query, value = signature[0], signature[2]
    assert query is not None and value is not None
    batch, length, heads, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return Form((batch, length, heads, value.shape[-1]), query.dtype), Form((batch, heads, length), lse_dtype)


def _on_ring(ring: Ring, platform: str, in_place: bool, function: Callable, operands: int, results: tuple[Form, ...]) -> Compiled:
    """``function`` of local shards, jitted over the ring. Every operand and result is a block of rows of a global array, whatever
    its dimensions mean, so that none needs a sharding of its own."""
    settings: dict[str, Any] = {}
    if in_place:
        # Arguments that nothing reads: donated, each is the memory of the result of its form.
        memory = tuple(range(operands, operands + len(results)))
        settings, function = dict(donate_argnums=memory, keep_unused=True), partial(_first, operands, function)
    if ring.size == 1:
        return Compiled(jax.jit(function, **settings), results)
    if platform == "gpu":
        settings["compiler_options"] = ONE_ROTATION
    rows = PartitionSpec(AXIS)
    mapped = jax.shard_map(function, mesh=jax_mesh(ring, platform), in_specs=rows, out_specs=rows, check_vma=False)
    return Compiled(jax.jit(mapped, out_shardings=sharding(ring, platform), **settings), results)


def _first(count: int, function: Callable, *arrays):
    return function(*arrays[:count])


def _operands(arrays: Sequence[Any], lifted: bool = False, masks=()) -> Operands:
    """``lifted``: the arrays after ``ARRAYS`` are those of a mask function, which may be none."""
    named: dict[str, Any] = dict(zip(ARRAYS, arrays, strict=False))
    return Operands(**named, predicate_arrays=((tuple(arrays[len(ARRAYS) :]),) if lifted else ()) + masks)


def _described(options: Options, signature: Signature) -> str:
    """The request in words that are equal on all ranks when the requests are."""
    settings = {name: value for name, value in vars(options).items() if value != getattr(Options, name)}
    settings |= {name: getattr(value, "__qualname__", "given") for name, value in settings.items() if callable(value)}
    settings |= {"predicates": [str(predicate.token) for predicate in options.predicates]} if options.predicates else {}
    operands = [f"{name} {list(form.shape)} {form.dtype}" for name, form in zip(ARRAYS, signature, strict=False) if form]
    return f"{', '.join(operands)} with {settings}"


def _forward(spec: RingSpec, masks, *operands):
    return spec.strategy.forward(spec, _operands(operands, len(masks) < len(spec.scores.predicates), masks))


def _backward(spec: RingSpec, masks, wanted: tuple[int, ...], *arrays):
    *operands, out, lse, dout, dlse = arrays
    gradients = spec.strategy.backward(
        spec, _operands(operands, len(masks) < len(spec.scores.predicates), masks), out, lse, dout, dlse
    )
    return [gradients[number] for number in wanted]
