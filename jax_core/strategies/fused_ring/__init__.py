"""The ring fused into one Pallas kernel, for TPUs."""

from jax_core.strategies.fused_ring.host import FusedRing

__all__ = ["FusedRing"]
