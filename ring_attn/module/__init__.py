"""``RingAttention``, the module."""

from ring_attn.module.attention import RingAttention

__all__ = ["RingAttention"]
