"""The command ``python -m jax_core.tune`` (docs/contributing/tuning.md)."""

from jax_core.tune.command.main import main

__all__ = ["main"]
