"""The ring fused into one Pallas kernel, for TPUs.

Experimental: run in Pallas' interpreter and compiled for four generations of TPUs, never run on one.
"""

from jax_core.strategies.fused_ring.host import FusedRing

__all__ = ["FusedRing"]
