"""The two custom ops by which torch's tracers, modes and transforms see a call. Outside of these the programs are called directly
(:mod:`torch_bridge.call.autograd`)."""

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from torch_bridge.call import batching
from torch_bridge.call.programs import call_of, check, program_of
from torch_bridge.job.ring import tensors_per_sequence


@torch.library.custom_op("ring_attn::forward", mutates_args=(), schema="(Tensor?[] operands, str call) -> Tensor[]")
def forward_op(operands, call):
    return list(program_of(call, operands).forward(operands))


@forward_op.register_fake
def _(operands, call):
    check(call, operands)
    return [operands[0].new_empty(shape, dtype=dtype) for shape, dtype in call_of(call).operation.results(operands)]


@torch.library.custom_op(
    "ring_attn::backward",
    mutates_args=(),
    schema="(Tensor?[] operands, Tensor[] results, Tensor?[] cotangents, int[] wanted, str call) -> Tensor[]",
)
def backward_op(operands, results, cotangents, wanted, call):
    return program_of(call, operands).backward(operands, results, cotangents, wanted)


@backward_op.register_fake
def _(operands, results, cotangents, wanted, call):
    return [operands[number].new_empty(operands[number].shape) for number in wanted]


@forward_op.register_vmap
def _(info, in_dims, operands, call):
    return batching.forward(forward_op, info.batch_size, in_dims, operands, call)


@backward_op.register_vmap
def _(info, in_dims, *arguments):
    return batching.backward(backward_op, info.batch_size, in_dims, *arguments)


@register_flop_formula(torch.ops.ring_attn.forward)
def _forward_flops(operands, call, **_: Any) -> int:
    return _flops(operands, call)[0]


@register_flop_formula(torch.ops.ring_attn.backward)
def _backward_flops(operands, *arguments: Any, **_: Any) -> int:
    return _flops(operands, arguments[-1])[1]


def _flops(shapes: Any, key: str) -> tuple[int, int]:
    call = call_of(key)
    return call.operation.flops(shapes, tensors_per_sequence(call.ring))
