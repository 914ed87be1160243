"""Generation from keys and values that are spread over a ring: docs/generation.md."""

from ring_attn.generation.cache import KVCache, Prompt
from ring_attn.generation.loop import decode, generate
from ring_attn.generation.sampling import GREEDY, Sampler

__all__ = ["GREEDY", "KVCache", "Prompt", "Sampler", "decode", "generate"]
