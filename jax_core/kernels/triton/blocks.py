"""Where a block is, which blocks it visits, and how tiles are loaded and stored.

Names in all kernels: ``p_`` pointer, ``b_`` block of values, ``o_`` offset, ``m_`` mask, ``i_`` index; a *place* is an index into
the whole sequence.
"""

import triton
import triton.language as tl

from jax_core.kernels.triton.scores import seen_from


@triton.jit
def place(i_block, p_where, const: tl.constexpr, of_keys: tl.constexpr):
    """``(row, count, index)`` of a block: its first row in the shard, its number of rows, its first place in the sequence."""
    if of_keys:
        runs: tl.constexpr = const.k.runs
        length: tl.constexpr = const.k.length
        stride: tl.constexpr = const.k.stride
        block: tl.constexpr = const.k.block
        per_run: tl.constexpr = const.k.blocks_per_run
        o_start: tl.constexpr = const.q.runs
    else:
        runs: tl.constexpr = const.q.runs
        length: tl.constexpr = const.q.length
        stride: tl.constexpr = const.q.stride
        block: tl.constexpr = const.q.block
        per_run: tl.constexpr = const.q.blocks_per_run
        o_start: tl.constexpr = 0
    i_run = 0
    if runs > 1:
        i_run = i_block // per_run
    o_row = (i_block - i_run * per_run) * block
    start = tl.load(p_where + o_start + i_run)
    return i_run * length + o_row, tl.minimum(length - o_row, block), start + stride * o_row


@triton.jit
def least(a, b):
    return tl.minimum(a, b)


@triton.jit
def greatest(a, b):
    return tl.maximum(a, b)


@triton.jit
def reach(first, last, i_run: tl.constexpr, p_where, const: tl.constexpr, of_keys: tl.constexpr):
    """``(low, high, full_low, full_high)``: which blocks of a run of the other side are visible from any of the positions ``first``
    to ``last``, and which of them are fully visible. ``low <= full_low <= full_high <= high``."""
    if of_keys:
        length: tl.constexpr = const.k.length
        stride: tl.constexpr = const.k.stride
        block: tl.constexpr = const.k.block
        start = tl.load(p_where + const.q.runs + i_run)
    else:
        length: tl.constexpr = const.q.length
        stride: tl.constexpr = const.q.stride
        block: tl.constexpr = const.q.block
        start = tl.load(p_where + i_run)
    # The other side's positions that are visible from some, and from all, of these positions, counted from the run's start.
    some_low, all_high = seen_from(
        tl.constexpr(const.reach), first - start, 0, stride * (length - 1), start, of_keys, least, greatest
    )
    all_low, some_high = seen_from(
        tl.constexpr(const.reach), last - start, 0, stride * (length - 1), start, of_keys, least, greatest
    )
    # From positions to rows (an end before the run's start becomes row -1, so that the ranges are empty), then to blocks.
    low = (some_low + stride - 1) // stride // block
    high = tl.maximum((some_high + stride) // stride + block - 1, 0) // block
    full_low = ((all_low + stride - 1) // stride + block - 1) // block
    full_high = tl.maximum((all_high + stride) // stride, 0) // block
    high = tl.maximum(high, low)
    full_low = tl.minimum(tl.maximum(full_low, low), high)
    full_high = tl.maximum(tl.minimum(full_high, high), full_low)
    none = full_low == full_high
    return low, high, tl.where(none, high, full_low), tl.where(none, high, full_high)


@triton.jit
def visits(first, last, p_where, const: tl.constexpr, of_keys: tl.constexpr):
    """The blocks to visit by position: ``reach`` for each run of the other side (empty for a missing second run). Of more than two
    runs the blocks come from a table."""
    runs: tl.constexpr = const.k.runs if of_keys else const.q.runs
    a = reach(first, last, 0, p_where, const, of_keys)
    if runs == 2:
        b = reach(first, last, 1, p_where, const, of_keys)
    else:
        b = (a[0], a[0], a[0], a[0])
    return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]


@triton.jit
def count(spans, masked: tl.constexpr):
    low, high, full_low, full_high, low2, high2, full_low2, full_high2 = spans
    full = (full_high - full_low) + (full_high2 - full_low2)
    if masked:
        return (high - low) + (high2 - low2) - full
    else:
        return full


@triton.jit
def nth(j, spans, p_order, const: tl.constexpr, of_keys: tl.constexpr, masked: tl.constexpr):
    """The index of the j-th block to visit among the fully visible ones, or (``masked``) among the partly visible ones."""
    low, high, full_low, full_high, low2, _, full_low2, full_high2 = spans
    runs: tl.constexpr = const.k.runs if of_keys else const.q.runs
    per_run: tl.constexpr = const.k.blocks_per_run if of_keys else const.q.blocks_per_run
    if const.table:
        number = tl.load(p_order + j)
    elif masked:
        before = full_low - low
        number = tl.where(j < before, low + j, full_high + (j - before))
        if runs == 2:
            j -= before + (high - full_high)
            before = full_low2 - low2
            number2 = per_run + tl.where(j < before, low2 + j, full_high2 + (j - before))
            number = tl.where(j < 0, number, number2)
    else:
        number = full_low + j
        if runs == 2:
            in_first_run = full_high - full_low
            number = tl.where(j < in_first_run, number, per_run + full_low2 + (j - in_first_run))
    return number


@triton.jit
def table_row(p_order, p_counts, i_batch, i_head, i_block, const: tl.constexpr, of_keys: tl.constexpr):
    """``(p_full, full, p_part, part)``: the lists of blocks that a block visits, fully and partly visible, and their lengths."""
    blocks: tl.constexpr = const.q.blocks if of_keys else const.k.blocks
    other: tl.constexpr = const.k.blocks if of_keys else const.q.blocks
    i_row = i_block
    if const.table_heads > 1:
        i_row += i_head * blocks
    if const.table_batch > 1:
        i_row += i_batch * blocks * const.table_heads
    full = tl.load(p_counts + i_row * 2)
    part = tl.load(p_counts + i_row * 2 + 1)
    p_full = p_order + i_row.to(tl.int64) * (other + 1)
    return p_full, full, p_full + full, part


@triton.jit
def load_tile(
    p, count, row_stride: tl.constexpr, rows: tl.constexpr, dim: tl.constexpr, dim_block: tl.constexpr, whole: tl.constexpr
):
    """Loads ``[rows, dim_block]`` at ``p``; 0 beyond ``count`` rows (unless ``whole``) and beyond ``dim``."""
    i_row = tl.arange(0, rows)[:, None]
    i_dim = tl.arange(0, dim_block)[None, :]
    p_tile = p + i_row * row_stride + i_dim
    if whole:
        if dim == dim_block:
            return tl.load(p_tile)
        else:
            return tl.load(p_tile, mask=i_dim < dim, other=0.0)
    else:
        return tl.load(p_tile, mask=(i_row < count) & (i_dim < dim), other=0.0)


@triton.jit
def store_tile(p, b, count, row_stride: tl.constexpr, rows: tl.constexpr, dim: tl.constexpr, dim_block: tl.constexpr):
    i_row = tl.arange(0, rows)[:, None]
    i_dim = tl.arange(0, dim_block)[None, :]
    tl.store(p + i_row * row_stride + i_dim, b.to(p.dtype.element_ty), mask=(i_row < count) & (i_dim < dim))
