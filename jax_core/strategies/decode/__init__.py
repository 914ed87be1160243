"""A few queries, the same on every rank, attend to keys and values that are spread over the ranks."""

from jax_core.strategies.decode.attention import Decode

__all__ = ["Decode"]
