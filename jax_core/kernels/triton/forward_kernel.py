"""The forward kernel: one launch computes a query shard's attention to a key shard, continuing the online softmax from a carry.

After FlashAttention-2 (Dao 2023, arXiv:2307.08691). Scores and their running maximum are base-2 logarithms; the LSE that is read
and written is a natural logarithm.
"""

import triton
import triton.language as tl

from jax_core.kernels.triton.blocks import count, load_tile, nth, place, store_tile, table_row, visits
from jax_core.kernels.triton.scores import (
    LN2,
    LOG2E,
    bias_block,
    bits_block,
    dropout_key,
    head_slope,
    kept,
    key_side,
    logits,
    product,
    query_side,
)


@triton.jit
def forward_kernel(
    p_q,
    p_k,
    p_v,
    p_where,
    p_q_segments,
    p_k_segments,
    p_q_positions,
    p_k_positions,
    p_bias,
    p_slopes,
    p_seed,
    p_bits,
    p_order,
    p_counts,
    p_carry,
    p_carry_lse,
    p_lse,
    p_out,
    const: tl.constexpr,
):
    """Grid: query blocks (the last first: under a causal mask they have the most work), heads, batch.

    ``p_carry``, ``p_carry_lse``: the partial result so far. If ``const.in_place`` is 1 the LSE overwrites the carry's LSE, if 2
    the output does likewise; the corresponding result pointers are then not used.
    """
    if const.in_place > 0:
        p_lse = p_carry_lse
    if const.in_place > 1:
        p_out = p_carry
    i_block = const.q.blocks - 1 - tl.program_id(0)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    M: tl.constexpr = const.q.block
    VALUE_DIM: tl.constexpr = const.value_dim_block
    q_length: tl.constexpr = const.q.runs * const.q.length
    k_length: tl.constexpr = const.k.runs * const.k.length
    row, rows, index = place(i_block, p_where, const, False)
    i_row = tl.arange(0, M)
    m_row = i_row < rows
    o_q = (i_batch.to(tl.int64) * q_length + row) * const.heads + i_head
    o_k = i_batch.to(tl.int64) * k_length * const.kv_heads + i_head // const.group
    o_lse = (i_batch * const.heads + i_head).to(tl.int64) * q_length + row
    whole: tl.constexpr = const.q.even
    b_q = load_tile(p_q + o_q * const.dim, rows, const.heads * const.dim, M, const.dim, const.dim_block, whole)
    q_side = query_side(i_batch, row, rows, index, p_q_segments, p_q_positions, False, const, True)
    slope = head_slope(p_slopes, i_batch, i_head, const)
    p_bias = bias_block(p_bias, i_batch, i_head, row, const)
    p_bits = bits_block(p_bits, i_batch, i_head, i_block, const)
    key = dropout_key(p_seed, p_where, i_batch, i_head, const)

    if const.carry:
        b_acc = load_tile(
            p_carry + o_q * const.value_dim, rows, const.heads * const.value_dim, M, const.value_dim, const.value_dim_block, whole
        )
        b_max = tl.load(p_carry_lse + o_lse + i_row, mask=m_row, other=float("-inf")) * LOG2E
        b_sum = tl.where(b_max == float("-inf"), 0.0, 1.0)
    else:
        b_acc = tl.zeros([M, VALUE_DIM], tl.float32)
        b_max = tl.full([M], float("-inf"), tl.float32)
        b_sum = tl.zeros([M], tl.float32)

    if const.table:
        p_full, full, p_part, part = table_row(p_order, p_counts, i_batch, i_head, i_block, const, True)
        spans = (0, 0, 0, 0, 0, 0, 0, 0)
    else:
        spans = visits(index, index + const.q.stride * (rows - 1), p_where, const, True)
        full, part = count(spans, False), count(spans, True)
        p_full, p_part = p_order, p_order

    state = (b_acc, b_max, b_sum)
    sides = (p_k + o_k * const.dim, p_v + o_k * const.value_dim, p_where, p_k_segments, p_k_positions, i_batch)
    rest = (p_bias, p_bits, slope, key)
    state = _sweep(state, b_q, q_side, sides, rest, full, spans, p_full, const, False)
    b_acc, b_max, b_sum = _sweep(state, b_q, q_side, sides, rest, part, spans, p_part, const, True)

    m_none = b_sum == 0.0
    b_sum = tl.where(m_none, 1.0, b_sum)
    b_lse = tl.where(m_none, float("-inf"), b_max * LN2 + tl.log(b_sum))
    tl.store(p_lse + o_lse + i_row, b_lse, mask=m_row)
    b_out = b_acc / b_sum[:, None]
    p_out += o_q * const.value_dim
    store_tile(p_out, b_out, rows, const.heads * const.value_dim, M, const.value_dim, const.value_dim_block)


@triton.jit
def _sweep(state, b_q, q_side, sides, rest, number, spans, p_order, const: tl.constexpr, masked: tl.constexpr):
    """The online softmax over ``number`` key blocks: partly visible ones, with masks, or fully visible ones."""
    b_acc, b_max, b_sum = state
    p_k, p_v, p_where, p_k_segments, p_k_positions, i_batch = sides
    p_bias, p_bits, slope, key = rest
    M: tl.constexpr = const.q.block
    N: tl.constexpr = const.k.block
    whole: tl.constexpr = const.k.even or not masked
    plain: tl.constexpr = const.softcap is None and const.bias_batch == 0 and const.alibi == 0 and const.logits_dtype is None
    fast: tl.constexpr = plain and not masked and const.scale > 0
    i_row = tl.arange(0, N)
    if fast:
        b_sums = tl.zeros([M, N], tl.float32)  # per column: the sum over columns can wait until the end
    i_block = nth(0, spans, p_order, const, True, masked)
    for j in range(number):
        i_next = nth(j + 1, spans, p_order, const, True, masked)
        row, rows, index = place(i_block, p_where, const, True)
        o_row = row.to(tl.int64) * const.kv_heads
        b_k = load_tile(p_k + o_row * const.dim, rows, const.kv_heads * const.dim, N, const.dim, const.dim_block, whole)
        b_s = product(b_q, tl.trans(b_k), const)
        if fast:
            # Scaling after the maximum lets the compiler fuse the multiplication and the subtraction into one instruction.
            b_new = tl.maximum(b_max, tl.max(b_s, 1) * (const.scale * LOG2E))
            b_p = tl.exp2(b_s * (const.scale * LOG2E) - b_new[:, None])
            b_old = tl.exp2(b_max - b_new)
            b_sum = b_sum * b_old
            b_sums = b_sums * b_old[:, None] + b_p
        else:
            k_side = key_side(i_batch, i_block, row, rows, index, p_k_segments, p_k_positions, True, const, masked)
            x, _ = logits(b_s, q_side, k_side, p_bias, p_bits, slope, const, masked)
            b_new = tl.maximum(b_max, tl.max(x, 1))
            b_finite = tl.where(b_new == float("-inf"), 0.0, b_new)
            b_p = tl.exp2(x - b_finite[:, None])
            b_old = tl.exp2(b_max - b_finite)
            b_sum = b_sum * b_old + tl.sum(b_p, 1)
        if const.dropout_threshold is not None:
            b_p = tl.where(kept(key, q_side[2], (index + const.k.stride * i_row)[None, :], const), b_p * const.dropout_factor, 0.0)
        p_tile = p_v + o_row * const.value_dim
        b_v = load_tile(p_tile, rows, const.kv_heads * const.value_dim, N, const.value_dim, const.value_dim_block, whole)
        b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_old[:, None], input_precision=const.input_precision)
        b_max = b_new
        i_block = i_next
    if fast:
        b_sum += tl.sum(b_sums, 1)
    return b_acc, b_max, b_sum
