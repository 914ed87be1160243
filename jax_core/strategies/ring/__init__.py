"""The ring: K/V travel from rank to rank between kernel calls."""

from jax_core.strategies.ring.loop import RingStrategy

__all__ = ["RingStrategy"]
