"""What torch gives to both passes of an ``autograd.Function``. A function adds what its forward leaves for its backward."""

from typing import Protocol

from torch import Tensor

from jax_core.masks.layout import Layout
from torch_bridge.mesh.rings import ProcessRing


class Context(Protocol):
    """``torch.autograd.function.FunctionCtx``, as far as it is used: torch's own class names neither what it has saved nor what
    is needed."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


class OfWhole(Context, Protocol):
    """Of ``unshard``: the arguments of its adjoint."""

    sum: tuple[int, Layout, ProcessRing, str, int]


class OfShard(Context, Protocol):
    """The other way."""

    unshard: tuple[int, Layout, ProcessRing, str]
