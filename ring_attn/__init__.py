"""Exact attention for PyTorch over sequences too long for one GPU, sharded over a ring of processes."""

from jax_core.config import BwdParams, FwdParams, RingAttentionConfig
from jax_core.experimental import ExperimentalWarning
from ring_attn import memory
from ring_attn.explain import Explaining, explain
from ring_attn.functional import ring_attention
from ring_attn.module.attention import RingAttention
from ring_attn.module.replace import replace_attention
from ring_attn.packed.batch import PackedShard, shard_packed
from ring_attn.recurrence import causal_conv1d, gated_delta_rule, kda, linear_attention, ssd
from ring_attn.ring import Ring, balance
from ring_attn.sharding.sequence import ShardedBatch, pad, positions, shard, shard_batch, unshard
from ring_attn.torch_sdpa.function import sdpa
from ring_attn.torch_sdpa.manager import context_parallel_sdpa
from ring_attn.training.checkpoint import keep_attention
from ring_attn.training.chunked_loss import chunked_cross_entropy
from ring_attn.training.gradients import sync_gradients
from ring_attn.training.loss import cross_entropy, total_loss
from ring_attn.training.tiles import tiled
from ring_attn.verification.entry import verify
from ring_attn.verification.verdict import Verdict
from ring_attn.version import __version__
from torch_bridge.call.sanity_checks import DoubtWarning
from torch_bridge.start.runtime import PeerFailure, start

__all__ = [
    "BwdParams",
    "DoubtWarning",
    "ExperimentalWarning",
    "Explaining",
    "FwdParams",
    "PackedShard",
    "PeerFailure",
    "Ring",
    "RingAttention",
    "RingAttentionConfig",
    "ShardedBatch",
    "Verdict",
    "__version__",
    "balance",
    "causal_conv1d",
    "chunked_cross_entropy",
    "context_parallel_sdpa",
    "cross_entropy",
    "explain",
    "gated_delta_rule",
    "kda",
    "keep_attention",
    "linear_attention",
    "memory",
    "pad",
    "positions",
    "replace_attention",
    "ring_attention",
    "sdpa",
    "shard",
    "shard_batch",
    "shard_packed",
    "ssd",
    "start",
    "sync_gradients",
    "tiled",
    "total_loss",
    "unshard",
    "verify",
]
