"""Weighted outer products summed over tokens: what a state space model's piece adds to its state, and what its output's cotangent
tells of the state that enters. torch launches it on its own stream, where an operator of torch's computes the layer."""

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class SumsConstants:
    """What :func:`sums_kernel` is compiled for, whatever the number of tokens. ``rows_block``, ``columns_block``: of a program's
    part of the sums; ``tokens_block``: of those it adds at a time."""

    heads: int
    groups: int
    rows: int
    columns: int
    rows_block: int
    columns_block: int
    tokens_block: int

    @property
    def group(self) -> int:
        return self.heads // self.groups

    @property
    def column_blocks(self) -> int:
        return -(-self.columns // self.columns_block)

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.rows_block) * self.column_blocks


@triton.jit
def sums_kernel(a, b, weights, sums, tokens, part, const: tl.constexpr):
    """``sums [parts, pieces, heads, rows, columns]``, float32, of ``a [pieces, tokens, groups, rows]``, ``b [pieces, tokens, heads,
    columns]`` and ``weights [pieces, heads, tokens]``, float32; for each ``part`` of so many tokens by itself. Launched as
    ``(pieces x heads, parts, const.blocks)``. A weighted ``b`` is rounded to its dtype."""
    ROWS: tl.constexpr = const.rows_block
    COLUMNS: tl.constexpr = const.columns_block
    TOKENS: tl.constexpr = const.tokens_block
    of_head, number, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    piece, head = of_head // const.heads, of_head % const.heads
    rows = block // const.column_blocks * ROWS + tl.arange(0, ROWS)
    columns = block % const.column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    of_rows, of_columns = (rows < const.rows)[:, None], (columns < const.columns)[None, :]
    a += (piece * tokens * const.groups + head // const.group) * const.rows + rows[:, None]
    b += (piece * tokens * const.heads + head) * const.columns + columns[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    end = tl.minimum((number + 1) * part, tokens)
    for start in range(number * part, end, TOKENS):
        at = (start + tl.arange(0, TOKENS)).to(tl.int64)
        there = at < end
        of_a = tl.load(a + at[None, :] * (const.groups * const.rows), mask=of_rows & there[None, :], other=0.0)
        of_b = tl.load(b + at[:, None] * (const.heads * const.columns), mask=of_columns & there[:, None], other=0.0)
        weight = tl.load(weights + of_head * tokens + at, mask=there, other=0.0)
        total = tl.dot(of_a, (of_b * weight[:, None]).to(of_a.dtype), total)
    count = tl.num_programs(0).to(tl.int64)
    sums += ((number * count + of_head) * const.rows + rows[:, None]) * const.columns + columns[None, :]
    tl.store(sums, total, mask=of_rows & of_columns)
