"""What a Triton kernel is compiled for: everything static about a launch, as one constant.

The kernels read it as ``const.name``; its fields are numbers, strings, None or frozen dataclasses of them.
"""

from dataclasses import dataclass, replace
from typing import TypedDict, Unpack

from jax_core.kernels.blocks import BlockLayout, block_layout
from jax_core.kernels.contract import Pair, Scores
from jax_core.masks.dropout import threshold
from jax_core.masks.static import Mask


@dataclass(frozen=True)
class LaunchConstants:
    """The constants of a launch. ``q`` and ``k`` are the two sides; names ending in ``_block`` are a dim padded to a
    power of two."""

    q: BlockLayout
    k: BlockLayout
    batch: int
    heads: int
    kv_heads: int
    group: int
    dim: int
    value_dim: int
    dim_block: int
    value_dim_block: int
    mask: Mask
    reach: Mask  # the same, but with window and chunk limited to the range of positions, so that sums fit into int32
    scale: float
    softcap: float | None
    dropout_threshold: int | None  # a weight is dropped if its 32 random bits are below it
    dropout_factor: float
    logits_dtype: str | None
    input_precision: str
    segments: int  # rows of ids, the same on both sides: 0 without ids, 1 if the batch shares them, or the batch size
    positions: int
    bias_batch: int  # dimensions of the bias; 0 without a bias
    bias_heads: int
    bias_rows: int
    alibi: int  # rows of the slopes: 0 without slopes, 1 if the batch shares them, or the batch size
    bits_batch: int  # dimensions of the packed mask; 0 without a mask
    bits_heads: int
    table: bool  # the blocks to visit come from a table, not from the runs
    table_batch: int
    table_heads: int
    carry: bool = False  # continue from a partial result
    in_place: int = 0  # how many of the forward's results (lse, out) overwrite the carry
    fused: bool = False


class OfTables(TypedDict):
    bits_batch: int
    bits_heads: int
    table: bool
    table_batch: int
    table_heads: int


class OfLaunch(OfTables, total=False):
    """What a launch decides."""

    carry: bool
    in_place: int
    fused: bool


def make_constants(pair: Pair, blocks: tuple[int, int], /, **more: Unpack[OfLaunch]) -> LaunchConstants:
    """``blocks``: of queries and keys. ``more``: what the launch decides."""
    (q, k, v), scores, extras = pair.shards, pair.scores, pair.extras
    bias, rows = extras.bias, (lambda x: 0 if x is None else x.shape[0])
    return LaunchConstants(
        q=block_layout(pair.q_runs, blocks[0]),
        k=block_layout(pair.k_runs, blocks[1]),
        batch=q.shape[0],
        heads=q.shape[2],
        kv_heads=k.shape[2],
        group=q.shape[2] // k.shape[2],
        dim=q.shape[3],
        value_dim=v.shape[3],
        dim_block=padded_dim(q.shape[3]),
        value_dim_block=padded_dim(v.shape[3]),
        mask=scores.mask,
        reach=_reachable(scores.mask),
        scale=scores.scale,
        softcap=scores.softcap,
        dropout_threshold=threshold(scores.dropout_prob) if scores.dropout_prob else None,
        dropout_factor=1 / (1 - scores.dropout_prob),
        logits_dtype=scores.logits_dtype,
        input_precision=input_precision(scores),
        segments=rows(extras.q_segment_ids),
        positions=rows(extras.q_position_ids),
        bias_batch=0 if bias is None else bias.shape[0],
        bias_heads=0 if bias is None else bias.shape[1],
        bias_rows=0 if bias is None else bias.shape[2],
        alibi=rows(extras.alibi_slopes),
        **more,
    )


def _reachable(mask: Mask) -> Mask:
    left, right = (None if side is None else min(side, 2**30) for side in (mask.left, mask.right))
    return replace(mask, left=left, right=right, chunk=None if mask.chunk is None else min(mask.chunk, 2**30))


def padded_dim(dim: int) -> int:
    """The smallest power of two that a matrix unit takes and ``dim``, or so many rows, fit in."""
    return max(16, 1 << (dim - 1).bit_length())


_PRECISIONS = {
    "default": "tf32",
    "fastest": "tf32",
    "bfloat16": "tf32",
    "tensorfloat32": "tf32",
    "high": "tf32x3",
    "float32": "ieee",
}


def input_precision(scores: Scores) -> str:
    """Triton's name for how float32 inputs are multiplied: in full precision unless a precision is given."""
    return _PRECISIONS.get(scores.precision_name or "float32", "ieee")
