"""How many operations torch's ``FlopCounterMode`` counts of a call. Its module loads Triton, which takes longer than the first call
of a job whose programs are kept: formulas are given to it once somebody imports it."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torch_bridge.backends.operation import Shapes
from torch_bridge.call.programs import call_of
from torch_bridge.mesh.protocol import tensors_per_sequence

_COUNTER = "torch.utils.flop_counter"


def register() -> None:
    """Of the operators ``ring_attn::forward`` and ``ring_attn::backward``, which must be there."""
    if _COUNTER in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _AfterImport(_COUNTER, _register))


def _register() -> dict[object, object]:
    """Once, and returns torch's formulas of the two."""
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    formulas: dict[object, Callable[..., int]] = {
        torch.ops.ring_attn.forward: _of_forward,
        torch.ops.ring_attn.backward: _of_backward,
    }
    for operator, formula in formulas.items():
        if operator not in flop_registry:
            register_flop_formula(operator)(formula)
    return {operator: flop_registry[operator] for operator in formulas}


def tell_counters() -> None:
    """Those that are at work, and were made before this module was loaded."""
    if torch.compiler.is_compiling():
        return
    for mode in _get_current_dispatch_mode_stack():
        known = getattr(getattr(mode, "counter", None), "flop_registry", None)
        if known is not None and torch.ops.ring_attn.forward not in known:
            known.update(_register())


def _of_forward(operands: Shapes, call: str, **_: object) -> int:
    return _flops(operands, call)[0]


def _of_backward(operands: Shapes, results: Shapes, cotangents: Shapes, wanted: list[int], call: str, **_: object) -> int:
    return _flops(operands, call)[1]


def _flops(shapes: Shapes, key: str) -> tuple[int, int]:
    call = call_of(key)
    return call.operation.flops(shapes, tensors_per_sequence(call.ring))


class _AfterImport(MetaPathFinder):
    """Finds a module as others do, and does something once it has been executed."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self._name, self._then, self._asks_others = name, then, False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._name or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = find_spec(fullname)
        finally:
            self._asks_others = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_then(module: ModuleType) -> None:
                execute(module)
                if module.__name__ == self._name:
                    self._then()

            with suppress(AttributeError):  # of a loader that takes no attributes; counters are told at a call, then
                spec.loader.exec_module = execute_and_then  # type: ignore[method-assign]
        return spec
