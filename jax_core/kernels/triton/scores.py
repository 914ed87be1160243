"""How scores are computed in the forward and the backward: scale, soft cap, bias, ALiBi, masks; and dropout's bits.

The functions take the query side's values expanded one way and the key side's the other (``[M, 1]`` and ``[1, N]``, or ``[1, M]``
and ``[N, 1]``), so they serve both scores and transposed scores.
"""

import triton
import triton.language as tl

from jax_core.masks import static as static_mask

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# The shared definition of the mask: compiled by Triton, or called as it is under Triton's interpreter.
if isinstance(triton.jit(static_mask.visible), triton.JITFunction):
    visible = triton.jit(static_mask.visible)
    seen_from = triton.jit(static_mask.seen_from)
else:

    def visible(mask, q_pos, k_pos):
        return static_mask.visible(mask.value, q_pos, k_pos)

    def seen_from(mask, *span):
        return static_mask.seen_from(mask.value, *span)


@triton.jit
def cap(x):
    """tanh, to an ulp or two even near 0: an odd polynomial (Cephes, Moshier 1989) below 0.625, exponentials above."""
    z = x * x
    p = (((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z - 3.33332819422e-1
    near = x + x * z * p
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.625, near, tl.where(x < 0, -far, far))


@triton.jit
def threefry(k0, k1, x0, x1):
    """Threefry-2x32-20, as in ``jax_core.masks.dropout``."""
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    x0, x1 = x0 + k0, x1 + k1
    x0, x1 = _rounds(x0, x1, 13, 15, 26, 6)
    x0, x1 = _rounds(x0 + k1, x1 + k2 + 1, 17, 29, 16, 24)
    x0, x1 = _rounds(x0 + k2, x1 + k0 + 2, 13, 15, 26, 6)
    x0, x1 = _rounds(x0 + k0, x1 + k1 + 3, 17, 29, 16, 24)
    x0, x1 = _rounds(x0 + k1, x1 + k2 + 4, 13, 15, 26, 6)
    return x0 + k2, x1 + k0 + 5


@triton.jit
def _rounds(x0, x1, r0: tl.constexpr, r1: tl.constexpr, r2: tl.constexpr, r3: tl.constexpr):
    x0, x1 = _round(x0, x1, r0)
    x0, x1 = _round(x0, x1, r1)
    x0, x1 = _round(x0, x1, r2)
    return _round(x0, x1, r3)


@triton.jit
def _round(x0, x1, r: tl.constexpr):
    x0 = x0 + x1
    return x0, ((x1 << r) | (x1 >> (32 - r))) ^ x0


@triton.jit
def dropout_key(p_seed, p_where, i_batch, i_head, const: tl.constexpr):
    if const.dropout_threshold is None:
        return i_batch, i_head
    else:
        seed0 = tl.load(p_seed).to(tl.uint32)
        seed1 = tl.load(p_seed + 1).to(tl.uint32)
        i_batch = (i_batch + tl.load(p_where + const.q.runs + const.k.runs)).to(tl.uint32)
        i_head = (i_head + tl.load(p_where + const.q.runs + const.k.runs + 1)).to(tl.uint32)
        return threefry(seed0, seed1, i_batch, i_head)


@triton.jit
def kept(key, i_q, i_k, const: tl.constexpr):
    """Which weights dropout keeps. ``i_q``, ``i_k`` are places in the whole sequence."""
    bits, _ = threefry(key[0], key[1], i_q.to(tl.uint32), i_k.to(tl.uint32))
    return bits >= tl.full([], const.dropout_threshold, tl.uint32)


@triton.jit
def product(a, b, const: tl.constexpr):
    return tl.dot(a, b, input_precision=const.input_precision)


@triton.jit
def logits(b_s, q, k, p_bias, p_bits, slope, const: tl.constexpr, masked: tl.constexpr):
    """``(x, t)``: the scores as base-2 logarithms, ``-inf`` where hidden, and the soft cap's tanh.

    ``b_s`` float32: ``q . k``. The two sides, expanded to broadcast: ``q = (row in the block, row is real, place, position,
    segment)`` and ``k = (row in the shard, row is real, row counted in whole blocks, place, position, segment)``.
    """
    if const.logits_dtype is not None:
        b_s = rounded(b_s, const)
    t = b_s
    if const.softcap is not None:
        t = cap(b_s * (const.scale / const.softcap))
        x = t * (const.softcap * LOG2E)
    else:
        x = b_s * (const.scale * LOG2E)
    if const.bias_batch > 0:
        stride: tl.constexpr = 0 if const.bias_rows == 1 else const.k.runs * const.k.length
        b_bias = tl.load(p_bias + q[0] * stride + k[0], mask=q[1] & k[1], other=0.0)
        x += b_bias.to(tl.float32) * LOG2E
    if const.alibi > 0:
        x -= distance(q[3], k[4], const) * (slope * LOG2E)
    if masked:
        x = tl.where(seen(q, k, p_bits, const), x, float("-inf"))
    elif const.fused and not const.k.even:
        x = tl.where(k[1], x, float("-inf"))  # otherwise padding's weights, which may be infinite, would enter dQ
    return x, t


@triton.jit
def distance(q_pos, k_pos, const: tl.constexpr):
    """``|q - k|`` in float32, correct even if the difference of two ids overflows int32 and wraps to a negative number."""
    if const.mask.any_position:
        b_distance = (tl.maximum(q_pos, k_pos) - tl.minimum(q_pos, k_pos)).to(tl.float32)
        return tl.where(b_distance < 0, b_distance + 4294967296.0, b_distance)
    else:
        return tl.abs(q_pos - k_pos).to(tl.float32)


@triton.jit
def seen(q, k, p_bits, const: tl.constexpr):
    m_seen = visible(tl.constexpr(const.mask), q[3], k[4]) & k[1]
    if const.segments > 0:
        m_seen &= (q[4] == k[5]) & (q[4] >= 0)
    if const.bits_batch > 0:
        words: tl.constexpr = const.k.blocks * const.k.block // 32
        b_word = tl.load(p_bits + q[0] * words + k[2] // 32)
        m_seen &= ((b_word >> (k[2] % 32)) & 1) != 0
    return m_seen


@triton.jit
def rounded(x, const: tl.constexpr):
    if const.logits_dtype == "bfloat16":
        return x.to(tl.bfloat16).to(tl.float32)
    elif const.logits_dtype == "float16":
        return x.to(tl.float16).to(tl.float32)
    else:
        return x


@triton.jit
def expanded(x, across: tl.constexpr):
    """``[n]`` as ``[1, n]`` if ``across``, else as ``[n, 1]``."""
    if across:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def query_side(i_batch, row, rows, index, p_segments, p_positions, across: tl.constexpr, const: tl.constexpr, masked: tl.constexpr):
    """``(row in the block, row is real, place, position, segment)`` of a query block, as :func:`logits` takes them."""
    M: tl.constexpr = const.q.block
    length: tl.constexpr = const.q.runs * const.q.length
    i_row = tl.arange(0, M)
    m_row = i_row < rows
    at = index + const.q.stride * i_row
    position, segment = ids(i_batch, row + i_row, m_row, at, p_segments, p_positions, length, const, masked)
    return (
        expanded(i_row, across),
        expanded(m_row, across),
        expanded(at, across),
        expanded(position, across),
        expanded(segment, across),
    )


@triton.jit
def key_side(
    i_batch, i_block, row, rows, index, p_segments, p_positions, across: tl.constexpr, const: tl.constexpr, masked: tl.constexpr
):
    """``(row in the shard, row is real, row counted in whole blocks, place, position, segment)`` of a key block, likewise."""
    N: tl.constexpr = const.k.block
    length: tl.constexpr = const.k.runs * const.k.length
    i_row = tl.arange(0, N)
    m_row = i_row < rows
    at = index + const.k.stride * i_row
    position, segment = ids(i_batch, row + i_row, m_row, at, p_segments, p_positions, length, const, masked)
    return (
        expanded(row + i_row, across),
        expanded(m_row, across),
        expanded(i_block * N + i_row, across),
        expanded(at, across),
        expanded(position, across),
        expanded(segment, across),
    )


@triton.jit
def ids(i_batch, i_row, m_row, at, p_segments, p_positions, length: tl.constexpr, const: tl.constexpr, masked: tl.constexpr):
    """Positions and segments of rows of the shard; places stand in for missing ids. Segments are only read with masks."""
    position = at
    if const.positions > 0:
        position = tl.load(p_positions + (i_batch % const.positions) * length + i_row, mask=m_row, other=-1)
    segment = at
    if const.segments > 0 and masked:
        segment = tl.load(p_segments + (i_batch % const.segments) * length + i_row, mask=m_row, other=-1)
    return position, segment


@triton.jit
def head_slope(p_slopes, i_batch, i_head, const: tl.constexpr):
    if const.alibi > 0:
        return tl.load(p_slopes + (i_batch % const.alibi) * const.heads + i_head).to(tl.float32)
    else:
        return 0.0


@triton.jit
def bias_block(p_bias, i_batch, i_head, row, const: tl.constexpr):
    """A pointer to the bias of a block's first query row."""
    if const.bias_batch > 0:
        o_bias = (i_batch % const.bias_batch * const.bias_heads + i_head % const.bias_heads).to(tl.int64) * const.bias_rows
        return p_bias + (o_bias + row % const.bias_rows) * (const.k.runs * const.k.length)
    else:
        return p_bias


@triton.jit
def bits_block(p_bits, i_batch, i_head, i_block, const: tl.constexpr):
    """A pointer to the packed mask of a query block's first row."""
    if const.bits_batch > 0:
        words: tl.constexpr = const.k.blocks * const.k.block // 32
        plane = i_batch % const.bits_batch * const.bits_heads + i_head % const.bits_heads
        return p_bits + (plane.to(tl.int64) * const.q.blocks + i_block) * (const.q.block * words)
    else:
        return p_bits
