"""Every rank gets the keys and values that its queries may see, at once, and its kernel runs once over all of them."""

from jax_core.strategies.all_gather.passes import AllGather

__all__ = ["AllGather"]
