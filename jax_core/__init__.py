"""The JAX core: exact attention over a sequence sharded across devices. Importing it starts no backend."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_core.api.attention import create_shard_map_wrapper, explain, ring_attention
    from jax_core.api.blockwise import blockwise_attention
    from jax_core.api.recurrence import causal_conv1d, gated_delta_rule, kda, linear_attention, ssd
    from jax_core.config import BwdParams, FwdParams, RingAttentionConfig
    from jax_core.experimental import ExperimentalWarning
    from jax_core.masks.balance import balance
    from jax_core.options import MaskInfo

__all__ = [
    "BwdParams",
    "ExperimentalWarning",
    "FwdParams",
    "MaskInfo",
    "RingAttentionConfig",
    "balance",
    "blockwise_attention",
    "causal_conv1d",
    "create_shard_map_wrapper",
    "explain",
    "gated_delta_rule",
    "kda",
    "linear_attention",
    "ring_attention",
    "ssd",
]

_HOMES = {
    "ring_attention": "api.attention",
    "create_shard_map_wrapper": "api.attention",
    "explain": "api.attention",
    "blockwise_attention": "api.blockwise",
    "causal_conv1d": "api.recurrence",
    "gated_delta_rule": "api.recurrence",
    "kda": "api.recurrence",
    "linear_attention": "api.recurrence",
    "ssd": "api.recurrence",
    "balance": "masks.balance",
    "MaskInfo": "options",
    "ExperimentalWarning": "experimental",
    "RingAttentionConfig": "config",
    "FwdParams": "config",
    "BwdParams": "config",
}


def __getattr__(name: str) -> object:
    # Loaded on first use: torch code can use the modules that need no more than NumPy (layouts, static masks) without loading jax.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
