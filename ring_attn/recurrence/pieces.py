"""A delta rule's pieces by an operator of torch's, whose backward is the operator's own from the states that enter them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_bridge.call.busy import busy
from torch_bridge.call.refusal import Refused
from torch_bridge.recurrence.operation import accumulation
from torch_bridge.tracing import untraced

# Of q, k, v, g, beta and the states that enter: y, and the states that leave.
Computed = Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]]


@untraced
def maps_of_pieces(computed: Computed, *operands: Tensor) -> tuple[Tensor, ...]:
    """``(local, e, entered, reads, m)`` of each piece: ``local [pieces, tokens, heads, value_dim]``, the output where no state
    enters; ``reads [..., key_dim]``, of the state that does; and its map, ``m [pieces, heads, key_dim, key_dim]`` and ``e [...,
    key_dim, value_dim]``.

    ``reads`` and ``m`` have no gradients. The backward is the operator's from ``S_in``, for the cotangents of the output, which is
    that of ``local``, and of ``S_out``, which is that of ``e``. ``S_in`` comes as the one of ``entered``, from :func:`joined`."""
    return _Maps.apply(computed, *operands)


@untraced
def joined(local: Tensor, reads: Tensor, entering: Tensor, entered: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The output, of pieces and the states that enter them, and ``last`` as it is: a loss of either goes back through here."""
    results: tuple[Tensor, Tensor] = _Joined.apply(local, reads, entering, entered, last)
    return results


class _Maps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, computed: Computed, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        (pieces, _, heads, value_dim), key_dim = v.shape, k.shape[-1]
        unit = torch.eye(key_dim, dtype=accumulation(v.dtype), device=v.device).expand(pieces, heads, key_dim, key_dim)
        y, left = computed([q, k, F.pad(v, (0, key_dim)), g, beta], F.pad(unit, (value_dim, 0)))
        (local, reads), (e, m) = (x.split([value_dim, key_dim], -1) for x in (y, left))
        kind = v.device.type
        ctx.computed, ctx.autocast = computed, (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        ctx.save_for_backward(q, k, v, g, beta)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(reads, m)
        return local, e, e.new_zeros(()).expand_as(e), reads, m

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dleft: Tensor | None, entering: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        saved, again = ctx.saved_tensors, torch.is_grad_enabled()
        leaves = [x.detach().requires_grad_(want) for x, want in zip(saved, ctx.needs_input_grad[1:], strict=True)]
        with busy(), torch.enable_grad(), torch.autocast(*ctx.autocast):  # it may tune itself for minutes
            results = ctx.computed(leaves, entering.detach())
            pairs = [(x, d) for x, d in zip(results, (dy, dleft), strict=True) if d is not None and x.requires_grad]
            # As a checkpoint: of torch.autograd.grad nothing else is to get a gradient.
            inputs = None if torch.autograd._is_checkpoint_valid() else [x for x in leaves if x.requires_grad]
            if pairs:
                torch.autograd.backward([x for x, _ in pairs], [d for _, d in pairs], inputs=inputs)
        gradients = [x.grad for x in leaves]
        if again:  # create_graph=True
            return None, *Refused.apply("a delta rule by an operator", len(gradients), *gradients, *saved, dy, dleft)
        return None, *gradients


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, reads: Tensor, entering: Tensor, entered: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
        if any(ctx.needs_input_grad):
            reads = reads.contiguous()  # what is saved is not to keep the whole wide output
        ctx.save_for_backward(reads, entering)
        ctx.set_materialize_grads(False)
        y = local.clone(memory_format=torch.contiguous_format)
        with torch.autocast(reads.device.type, enabled=False):
            for part, read, state in zip(y, reads, entering.to(reads.dtype), strict=True):  # together, they would be copied
                part.transpose(0, 1).baddbmm_(read.transpose(0, 1), state)
        return y, last.view_as(last)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlast: Tensor | None) -> tuple[Tensor | None, ...]:
        reads, entering = ctx.saved_tensors
        direct = None if dy is None else over_tokens(reads, dy.to(reads.dtype)).to(entering.dtype)
        return dy, None, direct, entering, dlast


def over_tokens(a: Tensor, b: Tensor) -> Tensor:
    """Of ``a [pieces, tokens, heads, m]`` and ``b [..., n]`` the outer products, summed over tokens, ``[pieces, heads, m, n]``, in
    float32 (float64 of float64)."""
    return _OverTokens.apply(a, b)


class _OverTokens(torch.autograd.Function):
    """torch's product of 16 bits as float32 has no derivative of its own."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        # One piece after the other: together, they would be copied.
        return torch.stack([_product(x.permute(1, 2, 0), y.transpose(0, 1)) for x, y in zip(a, b, strict=True)])

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        d = d.to(a.dtype)
        triples = list(zip(a.transpose(1, 2), b.transpose(1, 2), d, strict=True))
        da = torch.stack([torch.bmm(y, each.mT).transpose(0, 1) for _, y, each in triples])
        db = torch.stack([torch.bmm(x, each).transpose(0, 1) for x, _, each in triples])
        return da, db


def _product(a: Tensor, b: Tensor) -> Tensor:
    wide = accumulation(a.dtype)
    if a.dtype == wide:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=wide) if a.is_cuda else torch.bmm(a.to(wide), b.to(wide))
