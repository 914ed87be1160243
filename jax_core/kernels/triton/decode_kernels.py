"""Decoding: a few queries against all keys of a rank, cut into parts ("flash decoding", Dao et al. 2023), the joining of parts, and
the keeping of new tokens' keys and values.

torch launches these kernels on its own stream, so that it can capture them in a CUDA graph; JAX has none of them. What a score is
and which key is seen is what it is in every other kernel (``scores.py``).
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from jax_core.kernels.triton.scores import LN2, LOG2E, logits, product, seen
from jax_core.masks.static import Mask


@dataclass(frozen=True)
class Side:
    """As far as ``scores.py`` asks for it: whether the blocks of a side hold nothing but its rows."""

    even: bool = False


@dataclass(frozen=True)
class DecodeConstants:
    """What :func:`decode_kernel` is compiled for. ``rows``: queries of a group of heads that share a K/V head, in blocks of
    ``rows_block``; keys of a ``part`` come in blocks of ``keys_block``. ``segments``, ``positions``, ``alibi``: rows of ids and
    slopes, 0 without, 1 if the batch shares them, or the batch size. The rest as in ``constants.LaunchConstants``."""

    heads: int
    kv_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    dim_block: int
    value_dim_block: int
    rows_block: int
    keys_block: int
    part: int
    mask: Mask
    scale: float
    softcap: float | None
    logits_dtype: str | None
    input_precision: str
    segments: int
    positions: int
    alibi: int
    bias_batch: int = 0
    bits_batch: int = 0
    fused: bool = False
    k: Side = Side()

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def row_blocks(self) -> int:
        return -(-self.queries * self.group // self.rows_block)

    @property
    def parts(self) -> int:
        return -(-self.keys // self.part)


@triton.jit
def decode_kernel(p_q, p_k, p_v, p_q_segments, p_k_segments, p_q_positions, p_k_positions, p_slopes, p_out, const: tl.constexpr):
    """Grid: parts, blocks of rows of each K/V head, batch.

    ``p_q [batch, queries, heads, dim]``, ``p_k [batch, keys, kv_heads, dim]``, ``p_v [batch, keys, kv_heads, value_dim]``, ids
    int32 ``[batch|1, queries or keys]``; ``p_out`` float32 ``[parts, batch, queries, heads, value_dim + 1]``: the attention to the
    keys of a part, and its LSE, a natural logarithm, ``-inf`` where no key is seen.
    """
    M: tl.constexpr = const.rows_block
    N: tl.constexpr = const.keys_block
    DIM: tl.constexpr = const.dim_block
    VALUE_DIM: tl.constexpr = const.value_dim_block
    group: tl.constexpr = const.heads // const.kv_heads
    row_blocks: tl.constexpr = (const.queries * group + M - 1) // M
    i_part, i_batch = tl.program_id(0), tl.program_id(2)
    i_head, i_block = tl.program_id(1) // row_blocks, tl.program_id(1) % row_blocks
    row = i_block * M + tl.arange(0, M)
    m_row = row < const.queries * group
    query, head = row // group, i_head * group + row % group
    o_row = (i_batch * const.queries + query).to(tl.int64) * const.heads + head
    i_dim, i_value = tl.arange(0, DIM), tl.arange(0, VALUE_DIM)
    m_dim, m_value = i_dim < const.dim, i_value < const.value_dim
    b_q = tl.load(p_q + o_row[:, None] * const.dim + i_dim[None, :], mask=m_row[:, None] & m_dim[None, :], other=0.0)
    q_position, q_segment = _ids(p_q_positions, p_q_segments, i_batch, query, m_row, const.queries, const)
    q_side = (row[:, None], m_row[:, None], row[:, None], q_position[:, None], q_segment[:, None])
    slope = 0.0
    if const.alibi > 0:
        slope = tl.load(p_slopes + (i_batch % const.alibi) * const.heads + head, mask=m_row, other=0.0).to(tl.float32)[:, None]

    b_acc = tl.zeros([M, VALUE_DIM], tl.float32)
    b_max = tl.full([M], float("-inf"), tl.float32)
    b_sum = tl.zeros([M], tl.float32)
    first = i_part * const.part
    last = tl.minimum(first + const.part, const.keys)
    for start in range(first, last, N):
        key = start + tl.arange(0, N)
        m_key = key < last
        k_position, k_segment = _ids(p_k_positions, p_k_segments, i_batch, key, m_key, const.keys, const)
        k_side = (key[None, :], m_key[None, :], key[None, :], key[None, :], k_position[None, :], k_segment[None, :])
        m_seen = seen(q_side, k_side, p_slopes, const) & m_row[:, None]
        m_read = tl.max(m_seen.to(tl.int32), 0) > 0  # keys that nobody sees are not read
        o_key = (i_batch.to(tl.int64) * const.keys + key) * const.kv_heads + i_head
        b_k = tl.load(p_k + o_key[:, None] * const.dim + i_dim[None, :], mask=m_read[:, None] & m_dim[None, :], other=0.0)
        p_value = p_v + o_key[:, None] * const.value_dim + i_value[None, :]
        b_v = tl.load(p_value, mask=m_read[:, None] & m_value[None, :], other=0.0)
        b_s = product(b_q, tl.trans(b_k), const)
        x, _ = logits(b_s, q_side, k_side, p_slopes, p_slopes, slope, const, True)
        b_new = tl.maximum(b_max, tl.max(x, 1))
        b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(x - b_finite[:, None])
        b_old = tl.exp2(b_max - b_finite)
        b_sum = b_sum * b_old + tl.sum(b_p, 1)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_old[:, None], input_precision=const.input_precision)
        b_max = b_new

    b_sum, b_lse = _closed(b_max, b_sum)
    batch = tl.num_programs(2)
    p_row = p_out + (i_part.to(tl.int64) * batch * const.queries * const.heads + o_row) * (const.value_dim + 1)
    tl.store(p_row[:, None] + i_value[None, :], b_acc / b_sum[:, None], mask=m_row[:, None] & m_value[None, :])
    tl.store(p_row + const.value_dim, b_lse, mask=m_row)


@triton.jit
def _closed(b_max, b_sum):
    """What to divide by, and the LSE, of an online softmax: 1 and ``-inf`` where it saw nothing."""
    m_none = b_sum == 0.0
    b_sum = tl.where(m_none, 1.0, b_sum)
    return b_sum, tl.where(m_none, float("-inf"), b_max * LN2 + tl.log(b_sum))


@triton.jit
def _ids(p_positions, p_segments, i_batch, index, m_index, length: tl.constexpr, const: tl.constexpr):
    position = index * 0
    if const.positions > 0:
        position = tl.load(p_positions + (i_batch % const.positions) * length + index, mask=m_index, other=-1)
    segment = index * 0
    if const.segments > 0:
        segment = tl.load(p_segments + (i_batch % const.segments) * length + index, mask=m_index, other=-1)
    return position, segment


@dataclass(frozen=True)
class JoinConstants:
    """What :func:`join_kernel` is compiled for: ``parts`` come ``parts_block`` at a time. ``sinks``: rows of the sinks' logarithms,
    0 or 1. ``last``: whether output and LSE go to tensors of their own; if not, they go to the part ``rank`` of ``ranks``, and the
    others become 0."""

    parts: int
    parts_block: int
    queries: int
    heads: int
    value_dim: int
    value_dim_block: int
    sinks: int
    last: bool
    rank: int = 0
    ranks: int = 1


@triton.jit
def join_kernel(p_parts, p_sinks, p_out, p_lse, const: tl.constexpr):
    """Grid: rows, one for each batch entry, query and head.

    ``p_parts`` float32 ``[parts, rows, value_dim + 1]``, outputs with their LSE; ``p_sinks`` float32 ``[heads]``: the logarithm of
    what a head's sinks add to the sum. To ``p_out [rows, value_dim]`` and ``p_lse`` float32 ``[batch, heads, queries]``, or, if
    they are not the last, to ``p_out [ranks, rows, value_dim + 1]`` as the parts are.
    """
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    wide: tl.constexpr = const.value_dim + 1
    PARTS: tl.constexpr = const.parts_block
    VALUE_DIM: tl.constexpr = const.value_dim_block
    i_part, i_value = tl.arange(0, PARTS), tl.arange(0, VALUE_DIM)
    m_value = i_value < const.value_dim
    head = row % const.heads
    b_max, b_sum = float("-inf"), 0.0
    if const.sinks > 0:
        b_max, b_sum = tl.load(p_sinks + head) * LOG2E, 1.0
        b_sum = tl.where(b_max == float("-inf"), 0.0, b_sum)
    b_acc = tl.zeros([VALUE_DIM], tl.float32)
    for first in range(0, const.parts, PARTS):
        part = first + i_part
        m_part = part < const.parts
        o_part = (part.to(tl.int64) * rows + row) * wide
        x = tl.load(p_parts + o_part + const.value_dim, mask=m_part, other=float("-inf")) * LOG2E
        b_new = tl.maximum(b_max, tl.max(x, 0))
        b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
        weight, b_old = tl.exp2(x - b_finite), tl.exp2(b_max - b_finite)
        b_out = tl.load(p_parts + o_part[:, None] + i_value[None, :], mask=m_part[:, None] & m_value[None, :], other=0.0)
        b_acc = b_acc * b_old + tl.sum(weight[:, None] * b_out, 0)
        b_sum = b_sum * b_old + tl.sum(weight, 0)
        b_max = b_new
    b_sum, b_lse = _closed(b_max, b_sum)
    if const.last:
        query = row // const.heads
        o_lse = (query // const.queries * const.heads + head) * const.queries + query % const.queries
        tl.store(p_out + row * const.value_dim + i_value, b_acc / b_sum, mask=m_value)
        tl.store(p_lse + o_lse, b_lse)
    else:
        RANKS: tl.constexpr = const.ranks
        for rank in tl.static_range(RANKS):
            p_row = p_out + (rank * rows + row) * wide
            if rank == const.rank:
                tl.store(p_row + i_value, b_acc / b_sum, mask=m_value)
                tl.store(p_row + const.value_dim, b_lse)
            else:
                tl.store(p_row + i_value, tl.zeros([VALUE_DIM], tl.float32), mask=m_value)
                tl.store(p_row + const.value_dim, 0.0)


@dataclass(frozen=True)
class AppendConstants:
    """What :func:`append_kernel` is compiled for, of keys and of values: the numbers of a token, a power of two as large, and the
    strides of batch and tokens where new ones come from."""

    slots: int
    keys: int
    keys_block: int
    key_batch: int
    key_token: int
    values: int
    values_block: int
    value_batch: int
    value_token: int


@triton.jit
def append_kernel(p_places, p_key, p_value, p_keys, p_values, const: tl.constexpr):
    """Grid: tokens, batch. Each token's ``p_key``, ``p_value [batch, tokens, kv_heads * dim]`` go to its place, of int64 ``p_places
    [tokens]``, in ``p_keys``, ``p_values [batch, slots, kv_heads * dim]``."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = batch * const.slots + tl.load(p_places + token)
    KEYS: tl.constexpr = const.keys_block
    VALUES: tl.constexpr = const.values_block
    i_key, i_value = tl.arange(0, KEYS), tl.arange(0, VALUES)
    m_key, m_value = i_key < const.keys, i_value < const.values
    b_key = tl.load(p_key + batch * const.key_batch + token * const.key_token + i_key, mask=m_key)
    b_value = tl.load(p_value + batch * const.value_batch + token * const.value_token + i_value, mask=m_value)
    tl.store(p_keys + slot * const.keys + i_key, b_key, mask=m_key)
    tl.store(p_values + slot * const.values + i_value, b_value, mask=m_value)
