"""What a backend is asked for: an operation on tensors of certain specs, shared by the ranks of a ring.

:class:`Operation` is all that a call's way and the backends know of what is computed; ``torch_bridge.attention`` is one. Importing
this module loads no JAX.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import torch

from torch_bridge.mesh.protocol import AnyRing, Tensors

if TYPE_CHECKING:
    import jax
    from jax.sharding import AbstractMesh

    from jax_core.options import Placement
    from torch_bridge.mesh.rings import ProcessRing

# What the specs of a request are made of: shape and dtype of each operand, None for an absent one.
TensorSpecs: TypeAlias = tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor: all that checking and compiling need to know."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorLike(Protocol):
    """A tensor or its spec. Lengths may be symbols."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...


Shapes: TypeAlias = Sequence[Sequence[int] | None]  # of a call's operands


def specs_of(tensors: Tensors) -> TensorSpecs:
    return tuple(None if x is None else (tuple(x.shape), x.dtype) for x in tensors)


Results: TypeAlias = tuple[torch.Tensor, ...]


class Program(Protocol):
    """A request, ready to run. ``operands`` are given in the order of its specs, None for an absent one.

    ``operators``: the number of its own custom ops, for ``Backend.OPERATORS``; None if the library's two custom ops call it.
    """

    @property
    def operators(self) -> int | None: ...

    def forward(self, operands: Tensors) -> Results:
        """With the specs of ``Request.results``."""

    def backward(self, operands: Tensors, results: Tensors, cotangents: Tensors, wanted: Sequence[int]) -> list[torch.Tensor]:
        """The gradients of the operands whose indices are in ``wanted``, in that order. Only the first result always has a
        cotangent."""


class ShardProgram(Protocol):
    """A checked request as functions of one rank's JAX arrays, in the order of the request's specs; inside ``shard_map`` where the
    ring has several devices. Its ``str`` says what computes it."""

    def forward(self, *operands: "jax.Array | None") -> "Sequence[jax.Array]": ...

    def backward(self, wanted: Sequence[int], *arrays: "jax.Array | None") -> "Sequence[jax.Array | None]":
        """The gradients of the operands at the indices ``wanted``. ``arrays``: the operands, the results and their cotangents, of
        which all but the first may be None."""

    def explanation(self) -> object:
        """What computes it and why, to print."""


class GlobalProgram(NamedTuple):
    """A checked request as functions of whole arrays, which the compiler splits. ``backward(wanted, given)``: a function of the
    results, of the cotangents of those that are ``given`` one, and of the operands that are there."""

    forward: Callable[..., object]
    backward: Callable[[tuple[int, ...], tuple[bool, ...]], Callable[..., object]]


class Operation:
    """Something that programs compute, without its tensors. Hashable; equal operations share programs. Its ``str`` describes it and
    is equal in all processes.

    ``name``: the function that users call, for messages. ``operands``: the names of its operands in their order; arrays that
    functions close over may follow, without names. ``differentiated``: the operands, by index, whose gradients are computed whether
    or not a rank needs them, since what is sent must not depend on that.
    """

    name: str
    operands: tuple[str, ...]
    differentiated: tuple[int, ...]

    @property
    def has_one_cotangent(self) -> bool:
        """Whether none but the first result can have a cotangent."""
        return False

    @property
    def is_process_local(self) -> bool:
        """Whether it holds functions, which may differ under one name in another process."""
        return False

    @property
    def captures_arrays(self) -> bool:
        """Whether it holds arrays that should go with its last program."""
        return False

    def check(self, operands: Sequence[TensorLike | None], ring: AnyRing) -> None:
        """Raises ValueError unless shapes and dtypes fit together."""

    def results(self, specs: Sequence[TensorLike | None]) -> tuple[TensorSpec, ...]:
        """The specs of the results."""
        raise NotImplementedError

    def local(self, request: "Request", place: "Placement") -> ShardProgram:
        """Checks the request (ValueError, NotImplementedError)."""
        raise NotImplementedError

    def whole(self, request: "Request", mesh: "AbstractMesh | None", dim: int, platform: str) -> GlobalProgram:
        """Checks the request (ValueError, NotImplementedError) for a sequence sharded over dimension ``dim`` of ``mesh``."""
        raise NotImplementedError(f"{self.name} has no form for torch-xla's graphs; use torch's own device")

    def in_torch(self, request: "Request", program: "Program") -> "Program | None":
        """The program of a request that takes nothing but torch: nothing is to be computed, or torch launches the kernels.
        ``program``: that of the backend, which has checked it. None for any other."""
        return None

    def check_ranks(self, request: "Request", ring: "ProcessRing", operands: Tensors) -> None:
        """Compares what the ranks hold, when a program runs for the first time. A ring call."""

    def fixed(self, specs: tuple[TensorSpec | None, ...]) -> Hashable:
        """What of the specs is the same in calls that differ in lengths and batch sizes."""
        return specs

    def flops(self, shapes: Shapes, tensors_per_sequence: int) -> tuple[int, int]:
        """Of this process's share of a forward and of a backward, as torch counts those of its own operators."""
        return 0, 0


@dataclass(frozen=True)
class Request:
    """An operation on this process's tensors. Equal requests share one program. ``specs``: those of the operands in their order,
    None for an absent one."""

    ring: AnyRing
    operation: Operation
    specs: tuple[TensorSpec | None, ...]
    device: torch.device

    @cached_property
    def results(self) -> tuple[TensorSpec, ...]:
        return self.operation.results(self.specs)

    def __str__(self) -> str:
        """A description that is equal on all ranks if the requests are."""
        named = zip(self.operation.operands, self.specs, strict=False)
        operands = [f"{name} {list(spec.shape)} {spec.dtype}" for name, spec in named if spec]
        # Rings of the same ranks may differ in shape, and so in what they send; of one dimension they have none.
        shape = f" on {self.ring}" if len(getattr(self.ring, "sizes", ())) > 1 else ""
        return f"{', '.join(operands)} with {self.operation}{shape}"
