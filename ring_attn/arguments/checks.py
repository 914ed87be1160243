"""Checks of the module's sizes and inputs, and of the arguments of ``ring_attention`` that are the same for every backend."""

from collections.abc import Hashable, Mapping
from numbers import Integral, Real
from operator import index

import torch
from torch import Tensor

from jax_core.config import RingAttentionConfig
from jax_core.operands import Operands
from jax_core.options import Options


def check_sizes(embed_dim: int, num_heads: int, num_kv_heads: int, dropout: float, sinks: int) -> None:
    if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
        raise ValueError(f"embed_dim must be a positive multiple of num_heads, got embed_dim={embed_dim} and num_heads={num_heads}")
    if num_kv_heads <= 0 or num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide num_heads, got num_kv_heads={num_kv_heads} and num_heads={num_heads}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must lie in [0, 1), got {dropout}")
    if not isinstance(sinks, int) or sinks < 0:
        raise ValueError(f"sinks must be a bool or the number of sinks per head, got {sinks}")


def check_inputs(query: Tensor, key: Tensor, value: Tensor, features: tuple[int, int, int]) -> None:
    """Checks ``[batch, seq, features]`` tensors, made from inputs that were all 3-D or all 2-D."""
    for name, tensor, expected in zip(("query", "key", "value"), (query, key, value), features, strict=True):
        if tensor.ndim != 3 or tensor.shape[-1] != expected:
            raise ValueError(
                f"{name} must be 3-D (or 2-D without a batch) with {expected} features last, got {tensor.ndim} dims and "
                f"{tensor.shape[-1] if tensor.ndim else 0} features"
            )
    if key.shape[:2] != value.shape[:2] or query.shape[0] != key.shape[0]:
        raise ValueError(
            "query, key and value must have one batch size, key and value one length, got (batch, length) "
            f"{tuple(query.shape[:2])}, {tuple(key.shape[:2])} and {tuple(value.shape[:2])}; mind batch_first"
        )


def check_tensors(operands: Operands[Tensor], names: Mapping[str, str], dims: int) -> None:
    query = operands.query
    for argument, x in zip(Operands._fields, operands.given, strict=False):
        if x is None:
            continue
        name, q = names.get(argument, argument), names.get("query", "query")
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        check_dense(name, x)
        if argument in ("query", "key", "value") and x.dim() != dims:
            order = "batch, seq, heads, dim in the order of qkv_format" if dims == 4 else "tokens, heads, dim"
            raise ValueError(f"{name} must have {dims} dimensions ({order}), got {list(x.shape)}")
        if x.device != query.device:
            raise ValueError(
                f"all tensors must be on one device: {q} is on {query.device}, {name} on {x.device}; move it with .to()"
            )
        if x.dtype == torch.float64 != query.dtype:
            raise ValueError(f"{name} may be float64 only where {q} is: {q} is {query.dtype}; cast it with .to({q}.dtype)")


def check_dense(name: str, x: Tensor) -> None:
    if x.is_nested:
        raise ValueError(f"{name} must be a dense tensor, got a nested one; pad it, and give padding negative segment ids")
    if x.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {x.layout}; call .to_dense()")


def check_options(options: Options, names: Mapping[str, str]) -> None:
    """Checked here as well, before programs are looked up by them: that asks for a hash, and 4.0 equals 4."""
    _check_integers("sliding_window", options.sliding_window)
    _check_integers("chunk_size", options.chunk_size)
    for name in ("softmax_scale", "logits_soft_cap", "dropout_prob"):
        _check_number(names.get(name, name), getattr(options, name))
    _check_settings(options.cfg, options.mask_builder)


def _check_number(name: str, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise ValueError(
            f"{name} must be a number, which is compiled in and has no gradient; got {type(value).__name__}; take .item() of a "
            "tensor, or multiply the queries by one that is learned"
        )


def _check_settings(cfg: object, mask_builder: object) -> None:
    if cfg is not None and not isinstance(cfg, RingAttentionConfig):
        raise ValueError(f"cfg must be a ring_attn.RingAttentionConfig or None, got {type(cfg).__name__}")
    if mask_builder is not None and not isinstance(mask_builder, Hashable):
        raise ValueError(f"mask_builder must be hashable, as functions are, got {type(mask_builder).__name__}; each compiles anew")


def _check_integers(name: str, value: object) -> None:
    for number in value if isinstance(value, tuple) else (value,):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise ValueError(f"{name} must hold ints, or None for no bound; got {value!r}")


def plain_options(options: Options, **changes: object) -> Options:
    """The options in plain Python (:func:`plain`), with these changes."""
    values = {name: plain(getattr(options, name)) for name in Options.__dataclass_fields__}
    return Options(**(values | changes))  # type: ignore[arg-type]


def plain(value: object) -> object:
    """NumPy numbers as Python numbers and lists as tuples, so that equal calls are equal data on every rank. Where torch.compile
    holds a number for variable it is one number from here on: programs are looked up by it."""
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return index(value)
    if isinstance(value, float):
        return float.fromhex(value.hex())
    if isinstance(value, (Integral, torch.SymInt)):
        return int(value)
    return float(value) if isinstance(value, (Real, torch.SymFloat)) else value
