"""transformers models on a ring: ``cp = context_parallel(model, mesh)``, ``batch = cp.shard(batch)``, ``model(**batch)``."""

from ring_attn.integrations.transformers.context import ContextParallel, context_parallel

__all__ = ["ContextParallel", "context_parallel"]
