"""The two custom ops by which torch's tracers, modes and transforms see an attention. Outside of these the programs are called
directly (:mod:`torch_bridge.call.autograd`)."""

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from torch_bridge.attention.request import results
from torch_bridge.call import batching
from torch_bridge.call.programs import call_of, check, program_of
from torch_bridge.job.ring import tensors_per_sequence


@torch.library.custom_op("ring_attn::forward", mutates_args=(), schema="(Tensor?[] operands, str call) -> (Tensor, Tensor)")
def forward_op(operands, call):
    return program_of(call, operands).forward(operands)


@forward_op.register_fake
def _(operands, call):
    check(call, operands)
    query, _, value, *_ = operands
    out, lse = results(query, value)
    return query.new_empty(out.shape), query.new_empty(lse.shape, dtype=lse.dtype)


@torch.library.custom_op(
    "ring_attn::backward",
    mutates_args=(),
    schema="(Tensor?[] operands, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, int[] wanted, str call) -> Tensor[]",
)
def backward_op(operands, out, lse, dout, dlse, wanted, call):
    return program_of(call, operands).backward(operands, out, lse, dout, dlse, wanted)


@backward_op.register_fake
def _(operands, out, lse, dout, dlse, wanted, call):
    return [operands[number].new_empty(operands[number].shape) for number in wanted]


@forward_op.register_vmap
def _(info, in_dims, operands, call):
    return batching.forward(forward_op, info.batch_size, in_dims, operands, call)


@backward_op.register_vmap
def _(info, in_dims, *arguments):
    return batching.backward(backward_op, info.batch_size, in_dims, *arguments)


@register_flop_formula(torch.ops.ring_attn.forward)
def _forward_flops(operands, call, **_: Any) -> int:
    """Two products, counted as torch counts those of its own attention: all queries with all keys, whatever the masks."""
    pairs, dim, value_dim = _pairs(operands, call)
    return 2 * pairs * (dim + value_dim)


@register_flop_formula(torch.ops.ring_attn.backward)
def _backward_flops(operands, *arguments: Any, **_: Any) -> int:
    """Five products: the scores again, dP and dV, and dQ and dK."""
    pairs, dim, value_dim = _pairs(operands, arguments[-1])
    return 2 * pairs * (3 * dim + 2 * value_dim)


def _pairs(shapes: Any, words: str) -> tuple[int, int, int]:
    """How many scores this process's queries have with the keys of the whole ring; the dims of queries and values."""
    (batch, queries, heads, dim), (_, keys, *_), (*_, value_dim) = shapes[:3]
    return batch * heads * queries * keys * tensors_per_sequence(call_of(words).ring), dim, value_dim
