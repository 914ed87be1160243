"""A ring of hosts around rings of ranks: K/V go from host to host once, while they turn within each host."""

from jax_core.strategies.hierarchical.passes import Hierarchical

__all__ = ["Hierarchical"]
