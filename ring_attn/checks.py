"""Checks of the module's sizes and inputs."""

from torch import Tensor


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
    """Checks batch-first tensors, made from inputs that were all 3-D or all 2-D."""
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
