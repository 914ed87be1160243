"""What computes a rank's tokens in a layer with a state: the user's operators of torch's, or fla's and mamba_ssm's, as in one
process, or plain JAX."""

import logging
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

Operators = Mapping[str, Callable[..., Any]]  # by the names of ring_attn's functions
_INSTALLED = {
    "gated_delta_rule": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("fla.ops.kda", "chunk_kda"),
    "ssd": ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"),
}
_log = logging.getLogger(__name__)


def check_operators(operators: Operators | None) -> None:
    for name, operator in (operators or {}).items():
        if name not in _INSTALLED:
            raise ValueError(f"operators has {name!r}, which is no layer's operator; give some of {', '.join(_INSTALLED)}")
        if not callable(operator):
            raise ValueError(f"operators[{name!r}] must be a function, as fla's and mamba_ssm's are, got {type(operator).__name__}")


def operator_for(name: str, operators: Operators | None, like: Tensor) -> Callable[..., Any] | None:
    """None: plain JAX. ``operators``: None for what is installed, which is for 16 bits on GPUs: of float32 it is not known to keep
    the precision. ``like``: the operand that the result is like."""
    if operators is not None:
        return operators.get(name)
    return _installed(name) if like.device.type == "cuda" and like.dtype.itemsize == 2 else None


@cache
def _installed(name: str) -> Callable[..., Any] | None:
    file, function = _INSTALLED[name]
    package = file.split(".")[0]
    try:
        import_module(package)
        operator: Callable[..., Any] = getattr(import_module(file), function)
    except Exception as error:  # also of a package that was built for another torch, say
        if not (isinstance(error, ModuleNotFoundError) and error.name == package):
            _say(name, f"{package} cannot be imported: {type(error).__name__}: {error}")
        return None
    if name == "gated_delta_rule" and _is_refused_on_hopper():
        _say(name, "flash-linear-attention refuses its backward on Hopper with Triton 3.4.0 to 3.7.0")
        return None
    return operator


def _say(name: str, why: str) -> None:
    _log.warning("%s of layers on the ring is computed by plain JAX, which is slower: %s", name, why)


def _is_refused_on_hopper() -> bool:
    """By what fla knows of its surroundings: its gradients would be wrong. (Some are right with tilelang, which it may not use.)"""
    utils = import_module("fla.utils")
    wrong = getattr(utils, "TRITON_ABOVE_3_4_0", False) and not getattr(utils, "TRITON_ABOVE_3_7_1", False)
    return bool(getattr(utils, "IS_NVIDIA_HOPPER", False) and wrong)
