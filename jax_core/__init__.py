"""The JAX core: exact attention over a sequence sharded across devices. Importing it starts no backend."""

from importlib import import_module
from typing import Any

_HOMES = {
    "ring_attention": "api.attention",
    "create_shard_map_wrapper": "api.attention",
    "blockwise_attention": "api.blockwise",
    "MaskInfo": "request.options",
    "RingAttentionConfig": "config",
    "FwdParams": "config",
    "BwdParams": "config",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that the standard-library rooms (layouts, static masks) serve torch code without loading jax.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
