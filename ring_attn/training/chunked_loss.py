"""The loss of hidden states, whose logits are made a few tokens at a time and never exist as a whole."""

from collections.abc import Callable, Iterable
from typing import Protocol, Unpack

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active

from ring_attn.packed.batch import PackedShard
from ring_attn.ring import OneByOne, Ring
from ring_attn.sharding.autograd import Context
from ring_attn.sharding.reduction import summed_in
from ring_attn.sharding.sequence import ShardedBatch
from ring_attn.training.batches import note_loss
from ring_attn.training.loss import check_labels, check_num_items, labels_of, mean_of, where_counted
from ring_attn.training.partial_gradients import added, hooks_off, unknown_leaf
from ring_attn.training.token_losses import token_losses
from torch_bridge.call.error_propagation import propagates_errors
from torch_bridge.mesh.rings import MeshArg, MeshDim, MeshLike

Summed = Callable[[Tensor, Tensor], Tensor]  # hidden states and labels of a chunk -> the sum of their losses
CHUNK = 1024  # tokens: at a vocabulary of 128k their logits take 0.25 GiB in 16 bits, and 0.5 in float32


def _where(
    *arguments: object, ring: Ring | None = None, mesh: MeshLike = None, mesh_dim: MeshDim = None, **options: object
) -> MeshArg | None:
    """As for ``cross_entropy``, whose arguments follow the head."""
    return where_counted(*arguments[1:], ring=ring, mesh=mesh, mesh_dim=mesh_dim, **options)


@propagates_errors(_where)
def chunked_cross_entropy(
    head: nn.Module,
    hidden: Tensor,
    batch: ShardedBatch | PackedShard | Tensor,
    *,
    chunk_size: int = CHUNK,
    ring: Ring | None = None,
    mesh: MeshLike = None,
    mesh_dim: MeshDim = None,
    num_items: int | Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """``cross_entropy(head(hidden), batch, ...)`` without the logits: ``head`` is called with ``chunk_size`` tokens at a time.

    The gradients of the hidden states and of the head are made in the forward, with each chunk's logits, so nothing is computed
    again in the backward. Those of the head are summed over the chunks in float32. Held until the backward: the gradient of the
    hidden states, of their size, and one of the head's parameters in float32. Equal to the plain loss but for the order of sums,
    and one rounding more of a 16-bit gradient of the hidden states, which is multiplied by the loss's own in the backward.

    Args:
        head: a module from hidden states ``[tokens, hidden]`` to logits ``[tokens, vocabulary]``: an ``nn.Linear``, or a module of
            yours that caps or scales them. Each token's logits must depend on its hidden state alone.
        hidden: ``[batch, seq of this shard, hidden]`` (or any dims before the last), for this rank's tokens.
        batch, ring, mesh, mesh_dim, num_items, ignore_index, label_smoothing: as for :func:`ring_attn.cross_entropy`.

    Returns:
        This rank's share of the mean loss, a scalar, float32 or, for float64 logits, float64.

    In float16 a chunk's gradients are made before a ``GradScaler``'s scale is known, which mends none that overflows: make chunks
    smaller then. A compiled program holds the logits of all chunks; ``torch.compiler.disable`` leaves this call out of it.

    Raises ValueError as ``cross_entropy`` does, for a head that uses a tensor with a gradient that is none of its parameters,
    and where these are in shards (FSDP2, outside of the forward of what it wraps); NotImplementedError where gradients are to be
    differentiated again.
    """
    if not isinstance(head, nn.Module):
        raise ValueError(f"head must be an nn.Module, whose parameters get gradients; got {type(head).__name__}")
    return chunked_loss(
        head,
        tuple(head.parameters()),
        hidden,
        batch,
        chunk_size,
        ring=ring,
        mesh=mesh,
        mesh_dim=mesh_dim,
        num_items=num_items,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )


def chunked_loss(
    head: Callable[[Tensor], Tensor],
    parameters: Iterable[Tensor],
    hidden: Tensor,
    batch: ShardedBatch | PackedShard | Tensor,
    chunk_size: int,
    *,
    num_items: int | Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    **ring: Unpack[OneByOne],
) -> Tensor:
    """The same of any function of hidden states, of which ``parameters`` are those that get gradients. ``ring``: as for
    :func:`ring_attn.training.loss.mean_of`."""
    labels, count = labels_of(batch)
    _check(hidden, labels, parameters := tuple(parameters), chunk_size)
    check_num_items(num_items)
    if not torch.compiler.is_compiling():
        note_loss(labels, hidden.requires_grad and torch.is_grad_enabled())

    def summed(rows: Tensor, of_rows: Tensor) -> Tensor:
        return token_losses(head(rows), of_rows.long(), ignore_index, label_smoothing).sum()

    flat, of_flat = hidden.flatten(0, -2), labels.flatten()
    # A compiler and function transforms have to see the operators.
    seen = torch.compiler.is_compiling() or _are_functorch_transforms_active() or not torch.is_grad_enabled()
    if seen:
        pairs = zip(flat.split(chunk_size), of_flat.split(chunk_size), strict=True)
        total = torch.stack([summed(*pair) for pair in pairs]).sum()
    else:
        total = _InChunks.apply(summed, flat, of_flat, chunk_size, *parameters)
    return mean_of(total, labels, count if num_items is None else num_items, None, ignore_index, **ring)


class _Chunks(Context, Protocol):
    needed: list[int]  # arguments that get gradients
    dtypes: list[torch.dtype]


class _InChunks(torch.autograd.Function):
    """The sum of the losses; its gradients are made in the forward, for a cotangent of 1."""

    @staticmethod
    def forward(ctx: _Chunks, summed: Summed, hidden: Tensor, labels: Tensor, size: int, *given: Tensor) -> Tensor:
        ctx.needed = needed = [index for index in (1, *range(4, 4 + len(given))) if ctx.needs_input_grad[index]]
        parameters = [given[index - 4] for index in needed if index > 1]
        of_hidden = torch.zeros_like(hidden) if 1 in needed else None
        sums: list[Tensor | None] = [None] * len(parameters)  # of one that no chunk used it stays None, as without chunks
        losses = []
        for start in range(0, len(hidden), size):
            rows = slice(start, start + size)
            with torch.enable_grad():
                part = hidden[rows].detach().requires_grad_(of_hidden is not None)
                loss = summed(part, labels[rows])
            losses.append(loss.detach())
            inputs = [part, *parameters] if of_hidden is not None else parameters
            if start == 0:
                _check_leaves(loss, inputs)
            with hooks_off(parameters):
                gradients = list(torch.autograd.grad(loss, inputs, allow_unused=True)) if inputs else []
            if of_hidden is not None and (first := gradients.pop(0)) is not None:
                of_hidden[rows] = first
            for index, gradient in enumerate(gradients):
                sums[index] = added(sums[index], gradient)
        ctx.save_for_backward(of_hidden, *sums)
        ctx.dtypes = [hidden.dtype] * (1 in needed) + [parameter.dtype for parameter in parameters]
        return torch.stack(losses).sum() if losses else hidden.new_zeros((), dtype=summed_in(hidden.dtype))

    @staticmethod
    def backward(ctx: _Chunks, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "the gradients of chunked_cross_entropy are not differentiable again (create_graph=True); take "
                "cross_entropy(head(hidden), batch), which makes the logits"
            )
        of_hidden, *sums = ctx.saved_tensors
        gradients = [of_hidden] * (1 in ctx.needed) + sums
        scaled = {index: _scaled(x, cotangent, dtype) for index, x, dtype in zip(ctx.needed, gradients, ctx.dtypes, strict=True)}
        return tuple(scaled.get(index) for index in range(len(ctx.needs_input_grad)))


def _scaled(x: Tensor | None, cotangent: Tensor, dtype: torch.dtype) -> Tensor | None:
    """``x * cotangent``, rounded once, to ``dtype``, with no other tensor made."""
    if x is None or x.ndim == 0:
        return None if x is None else (x * cotangent).to(dtype)
    # With no dimensions of its own the cotangent would take a 16-bit x's dtype first, on GPUs: 1/100,000 is not in float16.
    return torch.mul(x, cotangent.reshape(1), out=torch.empty_like(x, dtype=dtype))


def _check_leaves(loss: Tensor, inputs: list[Tensor]) -> None:
    if (leaf := unknown_leaf([loss], inputs)) is not None:
        raise ValueError(
            f"the head makes its logits of a tensor {list(leaf.shape)} that needs a gradient and is none of its parameters, so "
            "it would get none: make it a parameter of the head, or detach it. FSDP1 hides parameters in its forward; FSDP2 "
            "does not"
        )


def check_chunk_size(size: object, name: str = "chunk_size") -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} must be a positive int, the tokens whose logits exist at a time; got {size!r}")


def _check(hidden: Tensor, labels: Tensor, parameters: tuple[Tensor, ...], chunk_size: int) -> None:
    if not isinstance(hidden, Tensor) or hidden.ndim < 2 or hidden.shape[:-1] != labels.shape:
        got = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
        raise ValueError(f"hidden must be [*labels, hidden size] with labels {list(labels.shape)}, got {got}; both are this rank's")
    check_labels(labels)
    check_chunk_size(chunk_size)
    if any(hasattr(parameter, "full_tensor") for parameter in parameters) and not hasattr(hidden, "full_tensor"):
        raise ValueError(
            "the head's parameters are in shards (DTensor) and the hidden states are not: FSDP2 gathers parameters in the forward "
            "of what it wraps. Make the loss inside of it: fully_shard a module whose forward calls base model and loss, and not "
            "the head by itself"
        )
