"""Exact attention over sequences too long for one GPU, for PyTorch: shards of the sequence on a ring of processes."""

from ring_attn.functional import ring_attention
from ring_attn.module import RingAttention
from ring_attn.sequence import ShardedBatch, pad, positions, shard, shard_batch, unshard

__all__ = ["RingAttention", "ShardedBatch", "pad", "positions", "ring_attention", "shard", "shard_batch", "unshard"]
