"""Shards of the sequence become shards of the heads, by an all-to-all, and back: each rank attends to the whole, for some heads."""

from jax_core.strategies.ulysses.strategy import Ulysses

__all__ = ["Ulysses"]
