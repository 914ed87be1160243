"""Exact attention for PyTorch over sequences too long for one GPU, sharded over a ring of processes."""

from jax_core.config import BwdParams, FwdParams, RingAttentionConfig
from ring_attn.functional import ring_attention
from ring_attn.gradients import sync_gradients
from ring_attn.loss import cross_entropy, total_loss
from ring_attn.module import RingAttention
from ring_attn.ring import Ring
from ring_attn.sequence import ShardedBatch, pad, positions, shard, shard_batch, unshard
from torch_bridge.runtime import PeerFailure, start

__all__ = [
    "BwdParams",
    "FwdParams",
    "PeerFailure",
    "Ring",
    "RingAttention",
    "RingAttentionConfig",
    "ShardedBatch",
    "cross_entropy",
    "pad",
    "positions",
    "ring_attention",
    "shard",
    "shard_batch",
    "start",
    "sync_gradients",
    "total_loss",
    "unshard",
]
