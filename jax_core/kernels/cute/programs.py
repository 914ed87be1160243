"""flash-attn-4's kernel classes as functions that XLA can call: ``(stream, *inputs, *outputs, settings)``.

Imported only to compile: NVIDIA's DSL and flash-attn-4 take seconds to load (and flash-attn-4 loads torch).
"""

import math
from dataclasses import asdict

import cutlass
from cutlass import cute
from flash_attn.cute import utils
from flash_attn.cute.block_sparsity import BlockSparseTensors
from flash_attn.cute.flash_bwd_postprocess import FlashAttentionBackwardPostprocess
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90

from jax_core.masks.static import visible

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


@cute.jit
def forward(stream, q, k, v, where, lists, mask_arrays, o, lse, *, settings):
    """``where``: offsets and lengths of query and key rows (cu_seqlens, seqused), or Nones."""
    kernel = CLASSES[settings.tile.capability].forward(settings, whole=where[0] is None)
    kernel(
        q, k, v, o, lse, cutlass.Float32(settings.scale), where[0], where[2], where[1], where[3], None,
        _bound(settings.left), _bound(settings.right), None, _listed(lists, q, settings), _aux(mask_arrays), None, None, stream,
    )  # fmt: skip


@cute.jit
def backward(stream, q, k, v, dout, lse, delta, where, lists, mask_arrays, *changed, settings):
    """``changed``: the locks of a deterministic backward, dQ, dK, dV. Adds to dQ (float32, in the kernel's own order of elements),
    and to dK and dV likewise if heads share K/V; otherwise writes those. ``lse``: to the base 2."""
    (dq, dk, dv), (of_dq, of_dk, of_dv) = changed[-3:], _locks(changed[:-3])
    kernel = CLASSES[settings.tile.capability].backward(settings)
    kernel(
        q, k, v, dout, lse, delta, dq, dk, dv, cutlass.Float32(settings.scale), where[0], where[2], where[1], where[3],
        _bound(settings.left), _bound(settings.right), of_dq, of_dk, of_dv, _aux(mask_arrays),
        _listed(lists, q, settings), None, stream,
    )  # fmt: skip


@cute.jit
def _locks(given):
    """dQ's, dK's and dV's, of the one array or two that there are. flash-attn-4 asks for two counters for each key block, and uses
    the first of them on Hopper: dV's is the second."""
    if cutlass.const_expr(len(given) == 0):
        return None, None, None
    if cutlass.const_expr(len(given) == 1):
        return given[0], None, None
    return given[0], given[1], cute.domain_offset((0, 0, 0, 1), given[1])


@cute.jit
def convert(stream, sums, where, gradient, *, settings):
    """float32 sums in the backward's own order of elements -> a gradient."""
    kernel = CLASSES[settings.tile.capability].convert(settings)
    kernel(sums, gradient, cutlass.Float32(settings.scale), where[0], where[1], None, None, stream)


class Hopper:
    """flash-attn-4's classes for compute capability 9.0, with the arguments of its own interface."""

    @staticmethod
    def forward(settings, whole):
        """``whole``: sequences, not packed documents, of which tiles of all heads that share K and V were slower."""
        tile_m, group = settings.tile.tile_m, settings.group
        return FlashAttentionForwardSm90(
            DTYPES[settings.dtype],
            settings.dim,
            settings.value_dim,
            group,
            is_causal=settings.causal,
            is_local=settings.local,
            pack_gqa=whole and settings.listed is None and group > 1 and tile_m % group == 0,
            tile_m=tile_m,
            tile_n=settings.tile.tile_n,
            num_stages=2,
            num_threads=384,
            Q_in_regs=False,
            mma_pv_is_rs=settings.tile.weights_in_registers,
            score_mod=_capped(settings.softcap),
            mask_mod=_mask_mod(settings.listed),
            has_aux_tensors=settings.listed is not None,
        )

    @staticmethod
    def backward(settings):
        tile = settings.tile
        return FlashAttentionBackwardSm90(
            DTYPES[settings.dtype],
            # Padded as the accumulators are: flash-attn-4 pads them otherwise where a dim is 16 modulo 32, and dQ is then wrong.
            tile.padded(settings.dim),
            tile.padded(settings.value_dim),
            settings.group,
            settings.causal,
            is_local=settings.local,
            deterministic=settings.deterministic,
            AtomLayoutMSdP=1,
            num_threads=384,
            score_mod=_capped(settings.softcap),
            score_mod_bwd=_capped_gradient(settings.softcap),
            mask_mod=_mask_mod(settings.listed),
            has_aux_tensors=settings.listed is not None,
            q_subtile_factor=128 // tile.tile_m if settings.listed is not None else 1,
            **asdict(tile),
        )

    @staticmethod
    def convert(settings):
        tile = settings.tile
        if settings.of == "query":
            of_tile = tile.tile_m, 128 if tile.dQ_single_wg else 256, tile.AtomLayoutMdQ, tile.dQ_swapAB
        else:
            of_tile = tile.tile_n, 256, tile.AtomLayoutNdKV, tile.dKV_swapAB
        return FlashAttentionBackwardPostprocess(
            DTYPES[settings.dtype], settings.dim, tile.capability, *of_tile, hdim_multiple_of=tile.multiple
        )


CLASSES = {90: Hopper}  # by compute capability, as tiles.TILES


def _capped(cap):
    """The soft cap as flash-attn-4 asks for it, or None. Its own takes an approximate tanh: a relative error of 5e-4 in a score, so
    0.01 in the weight of a score of 20."""
    if cap is None:
        return None

    @cute.jit
    def capped(score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        return cap * _tanh(score * (1 / cap))

    return capped


def _capped_gradient(cap):
    if cap is None:
        return None

    @cute.jit
    def gradient(dscore, score, batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors):
        tanh = _tanh(score * (1 / cap))
        return dscore * (1.0 - tanh * tanh)

    return gradient


@cute.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + cute.math.exp2(x * (2 / math.log(2)), fastmath=True))


def _bound(side):
    return None if side is None else cutlass.Int32(side)


def _aux(mask_arrays):
    return utils.AuxData(None if mask_arrays is None else list(mask_arrays), None)


@cute.jit
def _listed(lists, q, settings):
    """The lists of blocks ``(counts of partly visible, their list, counts of fully visible, their list)``, shared by all heads, and
    by the batch if they have one row."""
    if cutlass.const_expr(lists is None):
        return None
    return BlockSparseTensors(*[_per_head(x, q.shape[0], q.shape[2], settings.listed.list_batch) for x in lists])


@cute.jit
def _per_head(array, batch, heads, rows):
    step = 0 if cutlass.const_expr(rows == 1) else array.stride[0]
    layout = cute.make_layout((batch, heads, *array.shape[1:]), stride=(step, 0, *array.stride[1:]))
    return cute.make_tensor(array.iterator, layout)


def _mask_mod(listed):
    """A pair's visibility as flash-attn-4 asks for it, or None."""
    if listed is None:
        return None

    @cute.jit
    def seen(batch, head, q_index, k_index, seqlen, arrays):
        return _seen(listed, batch[0], head[0], q_index[0], k_index[0], arrays)

    return seen


@cute.jit
def _seen(listed, batch, head, i, j, arrays):
    """``arrays``: ``starts`` (of block_sparse.py), then those that ``listed`` says there are."""
    there = dict(zip(listed.arrays, arrays, strict=True))
    starts = there["starts"]
    result = cutlass.Boolean(True)
    if cutlass.const_expr(listed.static):
        q_at, k_at = _position(starts, 0, i), _position(starts, 1, j)
        if cutlass.const_expr("q_positions" in there):
            q_at = there["q_positions"][_row(batch, listed.position_batch), i]
            k_at = there["k_positions"][_row(batch, listed.position_batch), j]
        result = visible(listed.mask, q_at, k_at)
    if cutlass.const_expr("q_segments" in there):
        row = _row(batch, listed.segment_batch)
        q_id, k_id = there["q_segments"][row, i], there["k_segments"][row, j]
        result = result & (q_id == k_id) & (q_id >= 0)
    if cutlass.const_expr("bits" in there):
        bits = there["bits"]
        word = bits[_row(batch, listed.bits_batch), _row(head, listed.bits_heads), i, j // 32]
        result = result & (((word >> (j % 32)) & 1) != 0)
    return utils.scalar_to_ssa(result, cutlass.Boolean)


def _row(index, shared):
    return 0 if shared else index


@cute.jit
def _position(starts, side, index):
    """The position of a row, counted in the shard: ``starts[side]`` is (first run, second run, their length, their stride)."""
    length, stride = starts[side, 2], starts[side, 3]
    position = starts[side, 0] + index * stride
    if index >= length:
        position = starts[side, 1] + (index - length) * stride
    return position
