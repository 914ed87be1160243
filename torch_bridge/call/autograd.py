"""Calls that torch can differentiate: one ``autograd.Function`` for every backend, wrapping ``torch.library`` custom ops.

Torch saves plain tensors (the operands and the results), so checkpointing and offload hooks work as for any operator.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from operator import index

import torch
from torch._C import DispatchKeySet, _are_functorch_transforms_active, _functorch
from torch.autograd import forward_ad

from torch_bridge.backends.dispatch import backend_of
from torch_bridge.backends.interface import Operators
from torch_bridge.backends.operation import Program, Results, TensorSpecs
from torch_bridge.call.call_cache import PLAIN, CachedCall, observed
from torch_bridge.call.checkpointed_calls import results_of
from torch_bridge.call.flops import tell_counters
from torch_bridge.call.operators import backward_op, forward_op
from torch_bridge.call.programs import call_of, program_for, program_of
from torch_bridge.call.refusal import Context, NoDerivative, NoForwardMode, Refused, name_of
from torch_bridge.mesh.protocol import Tensors
from torch_bridge.tracing import constant, untraced

# Of operands, results, cotangents and the indices of the wanted gradients.
Backward = Callable[[Tensors, Tensors, Tensors, list[int]], Sequence[torch.Tensor]]


def apply(key: str, operands: Tensors) -> Results:
    """The results of the call with this key (``programs.describe``)."""
    if torch.compiler.is_compiling():
        if _transformed():
            return _untraced(key, operands)
        first = operands[0]
        assert first is not None
        if backend_of(first.device).OPERATORS is None:
            return tuple(forward_op(operands, key))
        return _Traced.apply(key, None, *_distinct(operands))
    if _are_functorch_transforms_active():
        return _Transformable.apply(key, *operands)
    if not (torch.is_grad_enabled() or _in_forward_mode()):  # a backward would be compiled for what cannot be differentiated
        operands = tuple(x.detach() if x is not None and x.requires_grad else x for x in operands)
    return _Call.apply(key, None, *operands)


@constant
def _transformed() -> bool:
    """Whether torch.func or dual numbers differentiate: a graph's operators have no derivatives for them, which would be left out
    in silence. Dynamo asks while it traces, and guards what the answer depends on."""
    kinds = {interpreter.key() for interpreter in _functorch.get_interpreter_stack() or ()}
    return _in_forward_mode() or not kinds.isdisjoint({_functorch.TransformType.Grad, _functorch.TransformType.Jvp})


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def _distinct(operands: Tensors) -> Tensors:
    """Dynamo cannot trace an autograd function that takes the same tensor twice; queries and keys often share their ids."""
    twice = [x is not None and any(x is other for other in operands[:place]) for place, x in enumerate(operands)]
    return tuple(x.view_as(x) if x is not None and again else x for x, again in zip(operands, twice, strict=True))


def cached_call(key: str, operands: Tensors) -> CachedCall:
    """A call that has been made, as a function of other operands of the same specs."""
    program = program_of(key, operands)
    count = 1 + max(number for number, x in enumerate(operands) if x is not None)
    absent = (None,) * (len(operands) - count)  # each further argument of an autograd function takes time, also a None
    again = program, absent

    def repeat(operands: Tensors) -> Results:
        inputs = operands[:count]
        if torch.is_grad_enabled() or _in_forward_mode():
            return _Call.apply(key, again, *inputs)
        whole = (*inputs, *absent)
        return results_of(key, whole, partial(program.forward, whole))  # nothing is to be saved, so torch need not know

    return repeat


_untraced = untraced(apply)


class _Traced(torch.autograd.Function):
    """Forward and backward outside of torch's function transforms. ``again``: the program and the operands that are absent at the
    end, of a call that has been made; None if they have to be looked up."""

    @staticmethod
    def forward(ctx: Context, key: str, again: tuple[Program, tuple[None, ...]] | None, *operands: torch.Tensor | None) -> Results:
        program, absent = (None, ()) if again is None else again
        operands += absent
        if program is None and _unobserved(operands):
            program = program_of(key, operands)
        results = _forward(key, operands) if program is None else results_of(key, operands, partial(program.forward, operands))
        ctx.program = program
        _save(ctx, key, operands, results)
        return results

    @staticmethod
    def backward(ctx: Context, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.compiler.is_compiling() or not (torch.is_grad_enabled() or _in_forward_mode()):
            return None, None, *_Traced.gradients(ctx, ctx.saved_tensors, cotangents)
        saved = ctx.saved_tensors
        with torch.no_grad():
            gradients = _Traced.gradients(ctx, saved, cotangents)
        # create_graph=True. ``once_differentiable`` would leave a penalty on them out, in silence: nothing would lead from it to
        # the operands, of which they are functions, nor to the cotangents.
        return None, None, *Refused.apply(name_of(ctx.key), len(gradients), *gradients, *saved, *cotangents)

    @staticmethod
    def gradients(ctx: Context, saved: Tensors, cotangents: Tensors) -> list[torch.Tensor | None]:
        program = ctx.program
        run = program.backward if program is not None and _unobserved((*saved, *cotangents)) else partial(_backward, ctx.key)
        return _gradients(ctx.key, ctx.needs_input_grad[2:], saved, cotangents, run)


class _Call(_Traced, NoForwardMode):
    """The same where Dynamo, which takes no function with a forward mode, does not trace."""


class _Transformable(NoForwardMode):
    """The same for ``torch.func``, in the form that it asks for, which costs every call more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(key: str, *operands: torch.Tensor | None) -> Results:
        return _forward(key, operands)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[str, *tuple[torch.Tensor | None, ...]], output: Results) -> None:
        key, *operands = inputs
        _save(ctx, key, operands, output)

    @staticmethod
    def backward(ctx: Context, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        def once(operands: Tensors, results: Tensors, cotangents: Tensors, indices: list[int]) -> Results:
            groups = operands, results, cotangents
            return _Once.apply(ctx.key, tuple(map(len, groups)), tuple(indices), *(x for tensors in groups for x in tensors))

        return None, *_gradients(ctx.key, ctx.needs_input_grad[1:], ctx.saved_tensors, cotangents, once)


class _Once(NoDerivative):
    """A backward that has none itself: ``once_differentiable`` would give zeros under nested transforms. ``counts``: of operands,
    results and cotangents."""

    generate_vmap_rule = True

    @staticmethod
    def forward(key: str, counts: tuple[int, int, int], indices: tuple[int, ...], *tensors: torch.Tensor | None) -> Results:
        first, second = counts[0], counts[0] + counts[1]
        return tuple(_backward(key, tensors[:first], tensors[first:second], tensors[second:], indices))

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[str, *tuple[object, ...]], output: Results) -> None:
        ctx.key = inputs[0]


def _gradients(
    key: str, needed: Sequence[bool], saved: Tensors, cotangents: Tensors, backward: Backward
) -> list[torch.Tensor | None]:
    count = len(saved) - len(cotangents)
    operands, results = saved[:count], saved[count:]
    if cotangents[0] is None:
        assert results[0] is not None
        cotangents = torch.zeros_like(results[0]), *cotangents[1:]
    wanted = [number for number, need in enumerate(needed) if need]
    indices = sorted({*_differentiated(key), *wanted})
    gradients = dict(zip(indices, backward(operands, results, cotangents, indices), strict=True))
    return [gradients[number] if need else None for number, need in enumerate(needed)]


def _forward_of_graph(keys: DispatchKeySet, operands: Tensors, call: str) -> list[torch.Tensor]:
    """The operator where torch differentiates, as in a compiled or an exported graph."""
    if _differentiable(operands):
        return list(_Call.apply(call, None, *operands))
    with torch._C._AutoDispatchBelowAutograd():
        return forward_op._opoverload.redispatch(keys & torch._C._after_autograd_keyset, operands, call)


def _backward_of_graph(
    keys: DispatchKeySet, operands: Tensors, results: Tensors, cotangents: Tensors, wanted: list[int], call: str
) -> list[torch.Tensor]:
    inputs = *operands, *results, *cotangents
    with torch._C._AutoDispatchBelowAutograd():
        keys &= torch._C._after_autograd_keyset
        gradients = backward_op._opoverload.redispatch(keys, operands, results, cotangents, wanted, call)
    return list(Refused.apply(call, len(gradients), *gradients, *inputs)) if _differentiable(inputs) else gradients


def _differentiable(tensors: Tensors) -> bool:
    reverse = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return reverse or _in_forward_mode()


# In place of the kernels that torch makes for custom ops, which find no tensors that need gradients in a list with None.
_LIBRARY = torch.library.Library("ring_attn", "FRAGMENT")
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "(?s).*[Oo]verrid", UserWarning)
    _LIBRARY.impl("forward", _forward_of_graph, "Autograd", with_keyset=True, allow_override=True)
    _LIBRARY.impl("backward", _backward_of_graph, "Autograd", with_keyset=True, allow_override=True)


@constant
def _differentiated(key: str) -> tuple[int, ...]:
    return call_of(key).operation.differentiated


def _save(ctx: Context, key: str, operands: Tensors, results: Results) -> None:
    ctx.save_for_backward(*operands, *results)
    ctx.set_materialize_grads(False)  # an unused result gets no cotangent, rather than one of zeros
    ctx.key = key


def _forward(key: str, operands: Tensors) -> Results:
    operators = _operators_of_program(key, operands)
    tell_counters()
    return (
        tuple(forward_op(operands, key)) if operators is None else results_of(key, operands, partial(operators.forward, operands))
    )


def _backward(key: str, operands: Tensors, results: Tensors, cotangents: Tensors, indices: Sequence[int]) -> list[torch.Tensor]:
    operators, inputs = _operators_of_program(key, operands), (operands, results, cotangents, indices)
    tell_counters()
    return backward_op(*inputs, key) if operators is None else operators.backward(*inputs)


def _operators_of_program(key: str, operands: Tensors) -> Operators | None:
    """The program's own custom ops, of a backend that has them. They are for one set of shapes: a length that torch.compile holds
    for variable is fixed here."""
    first = operands[0]
    assert first is not None
    operators = backend_of(first.device).OPERATORS
    if operators is None:
        return None
    specs = tuple(None if x is None else (tuple(map(index, x.shape)), x.dtype) for x in operands)
    number = _number_of_operators(key, specs, first.device)
    return None if number is None else Operators(partial(operators.forward, number), partial(operators.backward, number))


@constant
def _number_of_operators(key: str, specs: TensorSpecs, device: torch.device) -> int | None:
    return program_for(key, specs, device).operators


def _unobserved(tensors: Tensors) -> bool:
    """Whether nothing needs to see the custom op: no tracing, no function transform, no dispatch mode, no profiler, no tensor
    subclass. Going through torch's dispatcher takes longer than passing the tensors to JAX and back."""
    return not observed() and PLAIN.issuperset(map(type, tensors))
