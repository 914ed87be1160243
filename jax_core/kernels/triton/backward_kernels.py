"""The backward kernels: they recompute the weights tile by tile, from the rows' final LSE.

After FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 4).

``keys_kernel`` computes dK and dV of a key block in a loop over the query blocks that see it; ``queries_kernel`` computes dQ of a
query block in a loop over the key blocks it sees. No sum has two writers, so results are the same in every run. With
``const.fused`` the first also adds to dQ, atomically, and the second is not needed. ``bias_kernel`` computes the bias gradient,
summed over the batch entries, heads and rows that share it.
"""

import triton
import triton.language as tl

from jax_core.kernels.triton.blocks import count, load_tile, nth, place, store_tile, table_row, visits
from jax_core.kernels.triton.scores import (
    LOG2E,
    bias_block,
    bits_block,
    distance,
    dropout_key,
    head_slope,
    kept,
    key_side,
    logits,
    product,
    query_side,
)


@triton.jit
def keys_kernel(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_lse,
    p_delta,
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
    p_dq,
    p_dq_again,
    p_dslope,
    p_dk,
    p_dv,
    const: tl.constexpr,
):
    """dK and dV, and each key's part of the slopes' gradient. Grid: key blocks, key heads, batch. With ``const.fused``, this adds
    to ``p_dq``, the dQ so far."""
    i_block = tl.program_id(0)
    i_kv_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    N: tl.constexpr = const.k.block
    DIM: tl.constexpr = const.dim_block
    VALUE_DIM: tl.constexpr = const.value_dim_block
    k_length: tl.constexpr = const.k.runs * const.k.length
    row, rows, index = place(i_block, p_where, const, True)
    o_k = (i_batch.to(tl.int64) * k_length + row) * const.kv_heads + i_kv_head
    whole: tl.constexpr = const.k.even
    b_k = load_tile(p_k + o_k * const.dim, rows, const.kv_heads * const.dim, N, const.dim, const.dim_block, whole)
    b_v = load_tile(
        p_v + o_k * const.value_dim, rows, const.kv_heads * const.value_dim, N, const.value_dim, const.value_dim_block, whole
    )
    k_side = key_side(i_batch, i_block, row, rows, index, p_k_segments, p_k_positions, False, const, True)

    b_dk = tl.zeros([N, DIM], tl.float32)
    b_dv = tl.zeros([N, VALUE_DIM], tl.float32)
    spans = (0, 0, 0, 0, 0, 0, 0, 0)
    if not const.table:
        spans = visits(index, index + const.k.stride * (rows - 1), p_where, const, False)
    for i_member in range(const.group):
        i_head = i_kv_head * const.group + i_member
        if const.table:
            p_full, full, p_part, part = table_row(p_order, p_counts, i_batch, i_head, i_block, const, False)
        else:
            full, part = count(spans, False), count(spans, True)
            p_full, p_part = p_order, p_order
        pointers = (p_q, p_dout, p_lse, p_delta, p_dq, p_where, p_q_segments, p_q_positions, p_bias, p_bits)
        rest = (i_batch, i_head, head_slope(p_slopes, i_batch, i_head, const), dropout_key(p_seed, p_where, i_batch, i_head, const))
        sums = (b_dk, b_dv, tl.zeros([N], tl.float32))
        sums = _over_queries(sums, b_k, b_v, k_side, pointers, rest, full, spans, p_full, const, False)
        b_dk, b_dv, b_dslope = _over_queries(sums, b_k, b_v, k_side, pointers, rest, part, spans, p_part, const, True)
        if const.alibi > 0:
            o_slope = (i_batch * const.heads + i_head).to(tl.int64) * k_length + row
            tl.store(p_dslope + o_slope + tl.arange(0, N), b_dslope, mask=tl.arange(0, N) < rows)
    store_tile(p_dk + o_k * const.dim, b_dk * const.scale, rows, const.kv_heads * const.dim, N, const.dim, const.dim_block)
    p_dv += o_k * const.value_dim
    store_tile(p_dv, b_dv, rows, const.kv_heads * const.value_dim, N, const.value_dim, const.value_dim_block)


@triton.jit
def _over_queries(sums, b_k, b_v, k_side, pointers, rest, number, spans, p_order, const: tl.constexpr, masked: tl.constexpr):
    b_dk, b_dv, b_dslope = sums
    p_q, p_dout, p_lse, p_delta, p_dq, p_where, p_q_segments, p_q_positions, p_bias, p_bits = pointers
    i_batch, i_head, slope, key = rest
    M: tl.constexpr = const.q.block
    DIM: tl.constexpr = const.dim_block
    length: tl.constexpr = const.q.runs * const.q.length
    whole: tl.constexpr = const.q.even or not masked
    i_row = tl.arange(0, M)
    i_block = nth(0, spans, p_order, const, False, masked)
    for j in range(number):
        i_next = nth(j + 1, spans, p_order, const, False, masked)
        row, rows, index = place(i_block, p_where, const, False)
        m_row = i_row < rows
        o_q = (i_batch.to(tl.int64) * length + row) * const.heads + i_head
        o_lse = (i_batch * const.heads + i_head).to(tl.int64) * length + row
        b_q = load_tile(p_q + o_q * const.dim, rows, const.heads * const.dim, M, const.dim, const.dim_block, whole)
        b_lse, b_delta = load_rows(p_lse + o_lse, p_delta + o_lse, i_row, m_row, whole)
        b_s = product(b_k, tl.trans(b_q), const)  # [N, M]
        p_tile = p_dout + o_q * const.value_dim
        b_dout = load_tile(p_tile, rows, const.heads * const.value_dim, M, const.value_dim, const.value_dim_block, whole)
        q_side = query_side(i_batch, row, rows, index, p_q_segments, p_q_positions, True, const, masked)
        p_bias_block = bias_block(p_bias, i_batch, i_head, row, const)
        p_bits_block = bits_block(p_bits, i_batch, i_head, i_block, const)
        b_dp = product(b_v, tl.trans(b_dout), const)
        b_p, b_ds, b_dlogits = gradient(
            b_s, b_dp, b_lse[None, :], b_delta[None, :], q_side, k_side, p_bias_block, p_bits_block, slope, key, const, masked
        )
        if const.alibi > 0:
            b_dslope -= tl.sum(b_dlogits * distance(q_side[3], k_side[4], const), 1)
        b_dv = tl.dot(b_p.to(b_dout.dtype), b_dout, b_dv, input_precision=const.input_precision)
        b_dst = b_ds.to(b_q.dtype)
        b_dk = tl.dot(b_dst, b_q, b_dk, input_precision=const.input_precision)
        if const.fused:
            b_dq = product(tl.trans(b_dst), b_k, const) * const.scale
            i_dim = tl.arange(0, DIM)
            p_tile = p_dq + o_q * const.dim + i_row[:, None] * (const.heads * const.dim) + i_dim[None, :]
            tl.atomic_add(p_tile, b_dq, mask=m_row[:, None] & (i_dim < const.dim)[None, :], sem="relaxed")
        i_block = i_next
    return b_dk, b_dv, b_dslope


@triton.jit
def queries_kernel(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_lse,
    p_delta,
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
    p_before,
    p_dq,
    const: tl.constexpr,
):
    """dQ. Grid: query blocks (the last first), heads, batch.

    ``p_before``: with ``const.carry``, the dQ so far, to which this launch adds in place.
    """
    if const.carry:
        p_dq = p_before
    i_block = const.q.blocks - 1 - tl.program_id(0)
    i_head = tl.program_id(1)
    i_batch = tl.program_id(2)
    M: tl.constexpr = const.q.block
    DIM: tl.constexpr = const.dim_block
    q_length: tl.constexpr = const.q.runs * const.q.length
    k_length: tl.constexpr = const.k.runs * const.k.length
    row, rows, index = place(i_block, p_where, const, False)
    i_row = tl.arange(0, M)
    m_row = i_row < rows
    whole: tl.constexpr = const.q.even
    o_q = (i_batch.to(tl.int64) * q_length + row) * const.heads + i_head
    o_lse = (i_batch * const.heads + i_head).to(tl.int64) * q_length + row
    b_q = load_tile(p_q + o_q * const.dim, rows, const.heads * const.dim, M, const.dim, const.dim_block, whole)
    p_tile = p_dout + o_q * const.value_dim
    b_dout = load_tile(p_tile, rows, const.heads * const.value_dim, M, const.value_dim, const.value_dim_block, whole)
    b_lse, b_delta = load_rows(p_lse + o_lse, p_delta + o_lse, i_row, m_row, whole)
    q_side = query_side(i_batch, row, rows, index, p_q_segments, p_q_positions, False, const, True)
    p_bias_block = bias_block(p_bias, i_batch, i_head, row, const)
    p_bits_block = bits_block(p_bits, i_batch, i_head, i_block, const)
    slope = head_slope(p_slopes, i_batch, i_head, const)
    key = dropout_key(p_seed, p_where, i_batch, i_head, const)
    if const.table:
        p_full, full, p_part, part = table_row(p_order, p_counts, i_batch, i_head, i_block, const, True)
        spans = (0, 0, 0, 0, 0, 0, 0, 0)
    else:
        spans = visits(index, index + const.q.stride * (rows - 1), p_where, const, True)
        full, part = count(spans, False), count(spans, True)
        p_full, p_part = p_order, p_order

    b_dq = tl.zeros([M, DIM], tl.float32)
    o_k = i_batch.to(tl.int64) * k_length * const.kv_heads + i_head // const.group
    pointers = (p_k + o_k * const.dim, p_v + o_k * const.value_dim, p_where, p_k_segments, p_k_positions)
    rows_of_q = (b_q, b_dout, b_lse[:, None], b_delta[:, None])
    rest = (i_batch, p_bias_block, p_bits_block, slope, key)
    b_dq = _over_keys(b_dq, rows_of_q, q_side, pointers, rest, full, spans, p_full, const, False)
    b_dq = _over_keys(b_dq, rows_of_q, q_side, pointers, rest, part, spans, p_part, const, True)
    b_dq *= const.scale
    if const.carry:
        b_dq += load_tile(p_dq + o_q * const.dim, rows, const.heads * const.dim, M, const.dim, const.dim_block, whole)
    store_tile(p_dq + o_q * const.dim, b_dq, rows, const.heads * const.dim, M, const.dim, const.dim_block)


@triton.jit
def _over_keys(b_dq, rows_of_q, q_side, pointers, rest, number, spans, p_order, const: tl.constexpr, masked: tl.constexpr):
    b_q, b_dout, b_lse, b_delta = rows_of_q
    p_k, p_v, p_where, p_k_segments, p_k_positions = pointers
    i_batch, p_bias, p_bits, slope, key = rest
    N: tl.constexpr = const.k.block
    whole: tl.constexpr = const.k.even or not masked
    i_block = nth(0, spans, p_order, const, True, masked)
    for j in range(number):
        i_next = nth(j + 1, spans, p_order, const, True, masked)
        row, rows, index = place(i_block, p_where, const, True)
        o_row = row.to(tl.int64) * const.kv_heads
        b_k = load_tile(p_k + o_row * const.dim, rows, const.kv_heads * const.dim, N, const.dim, const.dim_block, whole)
        p_tile = p_v + o_row * const.value_dim
        b_v = load_tile(p_tile, rows, const.kv_heads * const.value_dim, N, const.value_dim, const.value_dim_block, whole)
        k_side = key_side(i_batch, i_block, row, rows, index, p_k_segments, p_k_positions, True, const, masked)
        b_s = product(b_q, tl.trans(b_k), const)
        b_dp = product(b_dout, tl.trans(b_v), const)
        _, b_ds, _ = gradient(b_s, b_dp, b_lse, b_delta, q_side, k_side, p_bias, p_bits, slope, key, const, masked)
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=const.input_precision)
        i_block = i_next
    return b_dq


@triton.jit
def bias_kernel(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_lse,
    p_delta,
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
    p_dbias,
    const: tl.constexpr,
):
    """A tile of the bias gradient, ``[bias_batch, bias_heads, bias_rows, keys]``: the sum over the batch entries, heads and rows
    that share it. Grid: query blocks (one if rows share the bias), key blocks, batch entries x heads of the bias."""
    M: tl.constexpr = const.q.block
    N: tl.constexpr = const.k.block
    q_length: tl.constexpr = const.q.runs * const.q.length
    k_length: tl.constexpr = const.k.runs * const.k.length
    shared: tl.constexpr = const.bias_rows == 1
    i_k_block = tl.program_id(1)
    k_row, k_rows, k_index = place(i_k_block, p_where, const, True)
    i_k = tl.arange(0, N)
    i_m = tl.arange(0, M)
    b_sum = tl.zeros([M, N], tl.float32)
    for i_share in range((const.batch // const.bias_batch) * (const.heads // const.bias_heads)):
        # Either all batch entries share the bias or each has its own; likewise for heads.
        i_batch = tl.program_id(2) // const.bias_heads + i_share // (const.heads // const.bias_heads)
        i_head = tl.program_id(2) % const.bias_heads + i_share % (const.heads // const.bias_heads)
        slope = head_slope(p_slopes, i_batch, i_head, const)
        key = dropout_key(p_seed, p_where, i_batch, i_head, const)
        o_k = (i_batch.to(tl.int64) * k_length + k_row) * const.kv_heads + i_head // const.group
        b_k = load_tile(p_k + o_k * const.dim, k_rows, const.kv_heads * const.dim, N, const.dim, const.dim_block, False)
        p_tile = p_v + o_k * const.value_dim
        b_v = load_tile(p_tile, k_rows, const.kv_heads * const.value_dim, N, const.value_dim, const.value_dim_block, False)
        k_side = key_side(i_batch, i_k_block, k_row, k_rows, k_index, p_k_segments, p_k_positions, True, const, True)
        for i_turn in range(const.q.blocks if shared else 1):
            i_block = tl.program_id(0) + i_turn
            row, rows, index = place(i_block, p_where, const, False)
            m_row = i_m < rows
            o_q = (i_batch.to(tl.int64) * q_length + row) * const.heads + i_head
            o_lse = (i_batch * const.heads + i_head).to(tl.int64) * q_length + row
            b_q = load_tile(p_q + o_q * const.dim, rows, const.heads * const.dim, M, const.dim, const.dim_block, False)
            p_tile = p_dout + o_q * const.value_dim
            b_dout = load_tile(p_tile, rows, const.heads * const.value_dim, M, const.value_dim, const.value_dim_block, False)
            b_lse, b_delta = load_rows(p_lse + o_lse, p_delta + o_lse, i_m, m_row, False)
            q_side = query_side(i_batch, row, rows, index, p_q_segments, p_q_positions, False, const, True)
            p_bias_block = bias_block(p_bias, i_batch, i_head, row, const)
            p_bits_block = bits_block(p_bits, i_batch, i_head, i_block, const)
            b_s = product(b_q, tl.trans(b_k), const)
            b_dp = product(b_dout, tl.trans(b_v), const)
            _, _, b_dlogits = gradient(
                b_s, b_dp, b_lse[:, None], b_delta[:, None], q_side, k_side, p_bias_block, p_bits_block, slope, key, const, True
            )
            b_sum += b_dlogits
    o_plane = tl.program_id(2).to(tl.int64) * const.bias_rows
    if shared:
        tl.store(p_dbias + o_plane * k_length + k_row + i_k, tl.sum(b_sum, 0), mask=i_k < k_rows)
    else:
        row, rows, _ = place(tl.program_id(0), p_where, const, False)
        p_tile = p_dbias + (o_plane + row) * k_length + i_m[:, None] * k_length + (k_row + i_k)[None, :]
        tl.store(p_tile, b_sum, mask=(i_m < rows)[:, None] & (i_k < k_rows)[None, :])


@triton.jit
def gradient(b_s, b_dp, b_lse, b_delta, q, k, p_bias, p_bits, slope, key, const: tl.constexpr, masked: tl.constexpr):
    """``(weights after dropout, gradient of scale * q . k, gradient of the logits)`` of a tile."""
    x, t = logits(b_s, q, k, p_bias, p_bits, slope, const, masked)
    b_p = tl.exp2(x - b_lse)
    b_kept = b_p
    if const.dropout_threshold is not None:
        m_kept = kept(key, q[2], k[3], const)
        b_kept = tl.where(m_kept, b_p * const.dropout_factor, 0.0)
        b_dp = tl.where(m_kept, b_dp * const.dropout_factor, 0.0)
    b_dlogits = b_p * (b_dp - b_delta)
    b_ds = b_dlogits
    if const.softcap is not None:
        b_ds = b_ds * (1 - t * t)
    return b_kept, b_ds, b_dlogits


@triton.jit
def load_rows(p_lse, p_delta, i_row, m_row, whole: tl.constexpr):
    """The rows' LSE in base 2, infinite for a row that saw no key or pads a block, so that ``exp2(x - lse)`` is 0; and delta."""
    if whole:
        b_lse = tl.load(p_lse + i_row)
        b_delta = tl.load(p_delta + i_row)
    else:
        b_lse = tl.load(p_lse + i_row, mask=m_row, other=float("-inf"))
        b_delta = tl.load(p_delta + i_row, mask=m_row, other=0.0)
    # Only rows beyond the shard are -inf here. In whole blocks the select does nothing, but without it ptxas schedules the loop
    # worse: the backward of full attention took 3.5 % longer (benchmarks/NOTES.md).
    return tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2E), b_delta
