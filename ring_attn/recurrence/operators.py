"""Layers with a state by an operator of torch's, as fla's and mamba_ssm's, with the ring's part around it.

A shard is cut into pieces, whose maps travel the ring as those of the library's own operators do
(:class:`jax_core.recurrence.maps.Maps`).
"""

import sys
from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from jax_core.masks.layout import Layout
from jax_core.masks.plan import Plan
from jax_core.masks.plan import named as named_layout
from jax_core.recurrence.layer import check_pieces
from jax_core.recurrence.operators import CHUNK, Recurrence
from jax_core.recurrence.pieces import pieces_of
from ring_attn.recurrence import passes
from ring_attn.recurrence.delta_rule import ByWideCall, of_heads
from ring_attn.recurrence.documents import Documents, cut, documents_of
from ring_attn.recurrence.pieces import Operator, Steps, around_ring
from ring_attn.recurrence.state_space import BySums
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.mesh.rings import MeshArg
from torch_bridge.recurrence.functional import layer_with_state
from torch_bridge.recurrence.operation import accumulation
from torch_bridge.tracing import constant


class DeltaRule(Protocol):
    """As fla's ``chunk_gated_delta_rule`` and ``chunk_kda``: of ``q, k [batch, tokens, heads, key_dim]``, ``v [..., value_dim]``,
    ``g`` and ``beta``, with queries scaled by ``1 / sqrt(key_dim)``, the output, like ``v``, and the final state ``[batch, heads,
    key_dim, value_dim]``; with ``cu_seqlens``, which it is given only where there are documents, states are ``[sequences, ...]``
    of a batch of 1. Where it has ``use_qk_l2norm_in_kernel``, it divides queries and keys by their norms itself. Differentiable in
    all tensors, and from both results; on a ring parameters of its own get gradients in ``backward()``, where an operand
    needs one, and not by ``torch.autograd.grad``."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, /, *, initial_state: Tensor | None, output_final_state: bool
    ) -> tuple[Tensor, Tensor]: ...


class StateSpace(Protocol):
    """As mamba_ssm's ``mamba_chunk_scan_combined``: of :func:`ring_attn.ssd`'s operands and the state that enters the output, like
    ``x``, and the final state ``[batch, heads, head_dim, state_dim]``; with ``seq_idx``, int32 ``[batch, tokens]``, which it is
    given only where there are documents, that of the last one, and what enters does so into document 0. Differentiable in all
    tensors, and from both results; parameters of its own as of a :class:`DeltaRule`."""

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        /,
        *,
        D: Tensor | None,
        initial_states: Tensor | None,
        return_final_states: bool,
    ) -> tuple[Tensor, Tensor]: ...


_OTHER_OPERANDS = ("dt_bias", "dt_softplus", "dt_limit", "z")  # of mamba_ssm's operator: it would not compute ring_attn.ssd


class _Call(NamedTuple):
    """``operands``: cut into pieces. ``layout``: its name. ``pieces``: of a rank. ``made``, ``compared``: what ranks compare, the
    fields of :class:`Maps` and its operands."""

    operator: Operator
    layer: Recurrence
    operands: Mapping[str, Tensor | None]
    initial_state: Tensor | None
    documents: Documents | None
    where: MeshArg
    layout: str
    size: int
    pieces: int
    made: Mapping[str, str]
    compared: tuple[Tensor | None, ...]


def by_operator(
    operator: Operator,
    where: MeshArg,
    layout: Layout,
    layer: Recurrence,
    named: Mapping[str, Tensor | None],
    initial_state: Tensor | None,
    ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """``(y, last)`` of this rank's shards, as :func:`torch_bridge.recurrence.functional.layer_with_state`."""
    sizes, like = layer.sizes(list(named.values()), initial_state, ids), named[layer.like]
    assert like is not None
    backend = backend_of(like.device)
    backend.check(like)
    size = backend.resolve(*where).size
    check_pieces(layout, size)
    pieces, name = _pieces(layout if isinstance(layout, str) else layout.name, size, sizes["t"])  # type: ignore[attr-defined]
    _check(operator, layer, ids)
    documents = None if ids is None else documents_of(ids, like.shape[0], pieces)
    operands = {name: _masked_pieces(x, pieces, documents) for name, x in named.items()}
    dtypes = ", ".join(f"{name} {x.dtype}" for name, x in named.items() if x is not None)
    made = {"of": layer.name, "by": _name(operator)}
    made["settings"] = f"scale {layer.scale}, norm {layer.l2norm}, chunk {layer.chunk}, of {dtypes}"
    compared = tuple(None if x is None else x.detach() for x in (like, named.get("A"), named.get("D")))
    call = _Call(operator, layer, operands, initial_state, documents, where, name, size, pieces, made, compared)
    y, last = (_state_space if layer.name == "ssd" else _delta_rule)(call)
    y = y if documents is None else y.masked_fill(~documents.real[..., None, None], 0)
    return y.reshape(like.shape).to(like.dtype), last


def _masked_pieces(x: Tensor | None, count: int, documents: Documents | None) -> Tensor | None:
    """Cut into pieces, and 0 on padding, whatever was there."""
    if x is None or x.ndim < 3:
        return x
    x = cut(x, count)
    return x if documents is None else torch.where(documents.real.view(*x.shape[:2], *(1,) * (x.ndim - 2)), x, 0)


def _delta_rule(call: _Call) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = call.operands.values()
    assert q is not None and k is not None and v is not None and beta is not None
    layer, operator = call.layer, call.operator
    g = beta.new_zeros(beta.shape, dtype=accumulation(beta.dtype)) if g is None else g
    by_kernels = call.size > 1 and v.is_cuda and v.dtype != torch.float64
    steps = steps_of_fla(operator, k, layer.l2norm, call.documents) if by_kernels else None
    if steps is None:
        by_itself = layer.l2norm and _takes(operator, "use_qk_l2norm_in_kernel")
        operator = partial(operator, use_qk_l2norm_in_kernel=True) if by_itself else operator
        q, k = (of_heads(x, v.shape[2], layer.l2norm and not by_itself) for x in (q, k))
        steps = ByWideCall(operator, call.documents)
    if isinstance(steps, ByWideCall) and call.size == 1:
        first = None if call.initial_state is None else call.initial_state.to(accumulation(v.dtype))
        y, last = steps.computed(q, k, v, g, beta, state=first)
    else:
        exchange = partial(_exchanged, call, initial_state=call.initial_state)
        y, last = around_ring("a delta rule by an operator", steps, exchange, (q, k, v, g, beta))
    return y if layer.scale is None else y * (layer.scale * k.shape[-1] ** 0.5), last


def steps_of_fla(operator: Operator, k: Tensor, l2norm: bool, documents: Documents | None) -> Steps | None:
    """Where it is one of fla's own, in the release whose kernels are known."""
    if not getattr(sys.modules.get("fla"), "__version__", "").startswith("0.6."):
        return None
    from ring_attn.recurrence.fla_kernels import STEPS

    made = next((steps for name, steps in STEPS if name is operator), None)  # others may have no hash
    return None if made is None or not passes.fits(k) else made(l2norm, documents)


def _state_space(call: _Call) -> tuple[Tensor, Tensor]:
    operands, state = tuple(call.operands.values()), call.initial_state
    steps = BySums(call.operator, call.layer.chunk, call.documents)
    if call.size == 1:
        return steps.computed(*operands, state=state)
    exchange = partial(_exchanged, call, initial_state=None if state is None else state.mT)
    y, last = around_ring("a state space model by an operator", steps, exchange, operands)
    return y, last.mT.contiguous()


def _exchanged(call: _Call, m: Tensor, e: Tensor, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states that enter this rank's pieces, like ``e``, and the one that leaves the sequence. ``m [pieces, heads (, key_dim,
    key_dim)]``, ``e [pieces, heads, key_dim, value_dim]``."""
    documents, maps, ends = call.documents, [m, e], None
    if documents is not None:
        # Two maps for each piece: the first does nothing, and is where a document of another piece ends.
        one = torch.eye(m.shape[-1], dtype=m.dtype, device=m.device) if m.ndim > 2 else m.new_ones(())
        maps = [torch.stack(pair, 1).flatten(0, 1) for pair in ((one.expand_as(m), m), (torch.zeros_like(e), e))]
        ends = documents.ends.flatten(0, 1)
    places = call.pieces if documents is None else 2 * call.pieces
    maps, ends = [_uncut(x, places) for x in maps], None if ends is None else _uncut(ends, places)
    settings = dict(layout=_of_maps(call.layout, places // call.pieces), final_state=call.layer.final_state)
    with torch.autocast(e.device.type, enabled=False):
        entering, last = layer_with_state(call.where, (*maps, *call.compared, initial_state), ends, **call.made, **settings)
    return cut(entering, call.pieces)[:, -1], last


_OF_PLANS: "WeakKeyDictionary[Plan, dict[int, Plan]]" = WeakKeyDictionary()  # by the places of a piece


@constant
def _pieces(layout: str, size: int, tokens: int) -> tuple[int, str]:
    """How many of a shard, and the layout's name on this ring. ValueError where it does not divide the tokens."""
    pieces = pieces_of(None, size, named_layout(layout), tokens)
    return pieces.table.shape[1], pieces.layout.name if isinstance(pieces.layout, Plan) else str(pieces.layout)


@constant
def _of_maps(layout: str, places: int) -> str:
    """The name of the layout of so many places a piece."""
    plan = named_layout(layout)
    return _OF_PLANS.setdefault(plan, {}).setdefault(places, Plan(places, plan.table)).name if isinstance(plan, Plan) else layout


def _check(operator: Operator, layer: Recurrence, ids: Tensor | None) -> None:
    if layer.strategy == "ulysses":
        raise NotImplementedError('an operator of torch\'s goes by strategy="prefix"; leave operator out for "ulysses"')
    if layer.name != "ssd" and layer.chunk != CHUNK:
        raise ValueError(
            f"chunk_size is not given to an operator of torch's, which has its own; leave one of them out, got {layer.chunk}"
        )
    if layer.name == "ssd":
        _check_state_space(operator)
    needed = "seq_idx" if layer.name == "ssd" else "cu_seqlens"
    if ids is not None and not _takes(operator, needed):
        raise NotImplementedError(
            f"documents and padding need an operator that has {needed}, which {getattr(operator, '__name__', operator)} has not; "
            "leave operator out, or segment_ids and cu_seqlens"
        )


def _check_state_space(operator: Operator) -> None:
    if not _takes(operator, "initial_states"):
        raise NotImplementedError(
            f"a state space model needs an operator that has initial_states, as mamba_ssm's, which "
            f"{getattr(operator, '__name__', operator)} has not; leave operator out"
        )
    held = operator.keywords if isinstance(operator, partial) else {}
    changed = [name for name in _OTHER_OPERANDS if held.get(name) is not None and held[name] is not False]
    if changed:
        raise ValueError(
            f"operator has {changed[0]} of its own, and must compute the layer of the operands that it is given, as the ring does: "
            "apply it to them before, or after"
        )


def _name(operator: Operator) -> str:
    named = operator if hasattr(operator, "__qualname__") else type(operator)
    return f"{named.__module__}.{named.__qualname__}"


def _takes(operator: Operator, name: str) -> bool:
    try:
        return name in signature(operator).parameters
    except ValueError:  # of what is not written in Python
        return False


def _uncut(x: Tensor, places: int) -> Tensor:
    """``[batch * places, ...]`` as ``[batch, places, ...]``."""
    return x.unflatten(0, (-1, places))
