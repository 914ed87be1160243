"""Lists the blocks that each block visits, from one row of the block sparsity map at a time."""

import triton
import triton.language as tl


@triton.jit
def lists_kernel(p_kinds, p_order, p_counts, const: tl.constexpr):
    """``p_kinds`` int32 ``[rows, columns]``: 0 for a fully visible pair, 1 for a partly visible one, 2 for a hidden one. ``p_order
    [rows, columns + 1]``: the columns of kind 0, then those of kind 1; ``p_counts [rows, 2]``: the number of each. Grid: rows."""
    columns: tl.constexpr = const.columns
    BLOCK: tl.constexpr = const.block
    row = tl.program_id(0).to(tl.int64)
    full = 0
    for start in range(0, columns, BLOCK):
        i_column = start + tl.arange(0, BLOCK)
        b_kind = tl.load(p_kinds + row * columns + i_column, mask=i_column < columns, other=2)
        full += tl.sum((b_kind == 0).to(tl.int32))
    seen_full = 0
    seen_part = full
    for start in range(0, columns, BLOCK):
        i_column = start + tl.arange(0, BLOCK)
        b_kind = tl.load(p_kinds + row * columns + i_column, mask=i_column < columns, other=2)
        b_full = (b_kind == 0).to(tl.int32)
        b_part = (b_kind == 1).to(tl.int32)
        b_place = tl.where(b_kind == 0, seen_full + tl.cumsum(b_full, 0), seen_part + tl.cumsum(b_part, 0)) - 1
        tl.store(p_order + row * (columns + 1) + b_place, i_column, mask=b_kind < 2)
        seen_full += tl.sum(b_full)
        seen_part += tl.sum(b_part)
    # Kernels read one entry ahead: the entry after the list must be a valid block index.
    tl.store(p_order + row * (columns + 1) + seen_part, 0)
    tl.store(p_counts + row * 2, full)
    tl.store(p_counts + row * 2 + 1, seen_part - full)
