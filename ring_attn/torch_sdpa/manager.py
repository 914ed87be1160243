"""``context_parallel_sdpa``: while it is active, torch's ``scaled_dot_product_attention`` is the ring's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from jax_core.masks.layout import Layout
from ring_attn.ring import Ring, as_ring
from ring_attn.torch_sdpa.function import sdpa
from torch_bridge.call.sanity_checks import warn_once
from torch_bridge.mesh.rings import MeshDim, MeshLike
from torch_bridge.tracing import constant

P = ParamSpec("P")
T = TypeVar("T")
Cross = Literal["sharded", "whole"] | None
_COUNTED = (
    "under context_parallel_sdpa something was made of the positions 0 to {0} (torch.arange, or the first rows of a table), as "
    "many as this rank's shard has: if these are the tokens' positions, every rank counts its own from 0. Give the model "
    "those of the whole sequence, ring.positions(length)"
)
# Attention by other names, which would attend to the local shard only.
_OTHERS = ("multi_head_attention", "scaled_dot_product", "flex_attention", "varlen_attn", "transformer_encoder_layer_fwd")


@contextmanager
def context_parallel_sdpa(
    *,
    ring: Ring | None = None,
    mesh: MeshLike = None,
    mesh_dim: MeshDim = None,
    layout: Layout = "contiguous",
    cross: Cross = None,
) -> Iterator[None]:
    """While it is active, ``torch.nn.functional.scaled_dot_product_attention`` is :func:`ring_attn.sdpa` on this ring, by whatever
    name it was imported, so that a model which calls it attends to the whole sequence, unchanged::

        with context_parallel_sdpa(mesh=mesh):
            out = model(ring_attn.shard(x, mesh))

    Only attention is routed. What else depends on positions (rotary or learned embeddings) needs those of the whole sequence
    (``ring_attn.positions``; a model that counts its own is warned of), and a mask the columns of the whole sequence, as
    :func:`ring_attn.sdpa` says.

    - The backward needs no manager. Activation checkpointing, which runs its function again there, enters it again: for this
      ``torch.utils.checkpoint`` is wrapped once, when a manager is first used; without a manager the wrapper does nothing.
    - It holds for the thread that enters it. Managers nest, and the innermost one is used; ``mesh="local"`` routes to attention
      within this process. It is also a decorator.
    - ``torch.compile``: enter it around the call of the compiled model.

    ``ring``, or ``mesh``, ``mesh_dim``, ``layout``: as for :func:`ring_attn.ring_attention`. ``cross`` says what keys are that
    differ in length from the queries: "sharded" over the ring as the queries are, or held "whole" by every rank (encoded text),
    so that each rank attends to its own copy, and the gradients of what made them are each rank's part. None refuses such calls.
    Keys of the queries' length are taken for sharded; whole ones give the same result without a mask, at the price of sending
    them and with a warning that all ranks hold the same.

    Raises, while active: what :func:`ring_attn.sdpa` raises; ValueError for keys of another length and ``cross=None``;
    NotImplementedError for ``is_causal`` with whole keys, and for attention by another function (``nn.MultiheadAttention``, which
    :func:`ring_attn.replace_attention` is for, and ``flex_attention``).
    """
    if cross not in (None, "sharded", "whole"):
        raise ValueError(f'cross must be "sharded", "whole" or None, got {cross!r}')
    place = as_ring(ring, mesh, mesh_dim, layout)
    _carry_into_recomputations()
    with _Route(place, cross):
        yield


class _Route(TorchFunctionMode):
    def __init__(self, ring: Ring, cross: Cross) -> None:
        super().__init__()
        self.ring, self.cross = ring, cross
        self._counted: set[int] = set()  # how many positions from 0 something was made of

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if not torch.compiler.is_compiling():
            self._counted.update(_counts(func, args))
        name = getattr(func, "__name__", "")
        if _attends_locally(name):
            raise NotImplementedError(
                f"context_parallel_sdpa routes scaled_dot_product_attention only: {name} would attend to this rank's shard alone; "
                "swap nn.MultiheadAttention with ring_attn.replace_attention, and call ring_attn.ring_attention for the rest"
            )
        return func(*args, **kwargs)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.ring.size > 1 and query.shape[-2] in self._counted:
            self._counted.clear()
            warn_once(_COUNTED.format(query.shape[-2]))
        if query.shape[-2] == key.shape[-2] or self.cross == "sharded" or self.ring.size == 1:
            return sdpa(query, key, value, *args, **kwargs, ring=self.ring)
        if self.cross is None:
            raise ValueError(
                f"{query.shape[-2]} queries of this rank meet {key.shape[-2]} keys, which may be a shard or all of them; "
                'give context_parallel_sdpa cross="sharded", or cross="whole" if every rank holds all of these keys'
            )
        if kwargs.get("is_causal") or (len(args) > 2 and args[2]):
            raise NotImplementedError(
                "is_causal with keys held whole: a shard's queries are not at the first positions; give a mask"
            )
        return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


def _counts(func: object, args: tuple[Any, ...]) -> Iterator[int]:
    """How many positions from 0 a call makes: numbers, or the first rows of a table, which no gradient made."""
    if func is torch.arange and all(isinstance(x, int) for x in args):
        if len(args) == 1 or (len(args) == 2 and args[0] == 0):  # ring_attn's own have a start and a stride
            yield args[-1]
    elif func is Tensor.__getitem__ and args[0].grad_fn is None:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        for dim, part in enumerate(index[: args[0].ndim - 1]):
            first = isinstance(part, slice) and isinstance(part.stop, int) and part.start in (0, None) and part.step is None
            if first and 0 < part.stop < args[0].shape[dim]:
                yield part.stop


@constant  # Dynamo looks into no strings
def _attends_locally(name: str) -> bool:
    return any(other in name for other in _OTHERS)


@cache
def _carry_into_recomputations() -> None:
    """Activation checkpointing calls its function again in the backward, where the manager may be gone: attention would be local,
    and with ``use_reentrant=True`` nothing would notice. It has no hook for all checkpoints, so its two entrances are wrapped."""
    generator, reentrant = checkpointing._checkpoint_without_reentrant_generator, checkpointing.CheckpointFunction.apply

    @wraps(generator)
    def without_reentrant(function: Callable[..., object], *args: Any, **kwargs: Any) -> object:
        return generator(_routed(function), *args, **kwargs)

    def apply(function: Callable[..., object], *args: object) -> object:
        return reentrant(_routed(function), *args)

    setattr(checkpointing, "_checkpoint_without_reentrant_generator", without_reentrant)  # noqa: B010  (as mypy would have it)
    setattr(checkpointing.CheckpointFunction, "apply", staticmethod(apply))  # noqa: B010


def _routed(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` under the manager that is active now, if there is one, whenever it is called."""
    routes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, _Route)]
    if not routes:
        return function

    @wraps(function)
    def under(*args: P.args, **kwargs: P.kwargs) -> T:
        with routes[-1]:
            return function(*args, **kwargs)

    return under
