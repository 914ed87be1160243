"""The two custom ops by which torch's tracers, modes and transforms see a call. Outside of these the programs are called directly
(:mod:`torch_bridge.call.autograd`)."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torch_bridge.call import flops
from torch_bridge.call.batching import of_each_entry
from torch_bridge.call.checkpointed_calls import results_of
from torch_bridge.call.programs import call_of, check, program_of
from torch_bridge.call.refusal import refuse_in_compiled
from torch_bridge.mesh.protocol import Tensors


@torch.library.custom_op(
    "ring_attn::forward", mutates_args=(), schema="(Tensor?[] operands, str call) -> Tensor[]", tags=(torch.Tag.cudagraph_unsafe,)
)
def forward_op(operands: Tensors, call: str) -> list[Tensor]:
    refuse_in_compiled(call)
    # A compiled graph writes into what an operator has returned, once it has no further use for it.
    return list(results_of(call, operands, partial(program_of(call, operands).forward, operands), copied=True))


@forward_op.register_fake
def _(operands: Sequence[Tensor], call: str) -> list[Tensor]:
    check(call, operands)
    return [operands[0].new_empty(shape, dtype=dtype) for shape, dtype in call_of(call).operation.results(operands)]


@torch.library.custom_op(
    "ring_attn::backward",
    mutates_args=(),
    schema="(Tensor?[] operands, Tensor[] results, Tensor?[] cotangents, int[] wanted, str call) -> Tensor[]",
    tags=(torch.Tag.cudagraph_unsafe,),
)
def backward_op(operands: Tensors, results: Tensors, cotangents: Tensors, wanted: list[int], call: str) -> list[Tensor]:
    return program_of(call, operands).backward(operands, results, cotangents, wanted)


@backward_op.register_fake
def _(operands: Sequence[Tensor], results: Tensors, cotangents: Tensors, wanted: list[int], call: str) -> list[Tensor]:
    return [operands[number].new_empty(operands[number].shape) for number in wanted]


forward_op.register_vmap(partial(of_each_entry, forward_op))
backward_op.register_vmap(partial(of_each_entry, backward_op))
flops.register()
