"""``RingAttention``, the module, and what puts it in the place of another."""

from ring_attn.module.attention import RingAttention

__all__ = ["RingAttention"]
