"""Passes along a piece of a delta rule, chunk by chunk, for what the ring needs of it alone: its maps, and in the backward the
cotangent of the state that enters. What an operator's own passes store of every chunk, these keep on the chip. torch launches them
on its own stream, where an operator of torch's computes the layer.

Operands are those of the chunks' form (Gated Delta Networks, arXiv:2412.06464, section 3.3; Kimi Linear, arXiv:2510.26692, section
3): with ``S`` at a chunk's begin, ``values = u - w S`` and ``S' = decay S + keys^T values``. A state is held transposed,
``[columns, key_dim]``: so both of a chunk's products take what changes from registers.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from jax_core.kernels.triton.constants import padded_dim


@dataclass(frozen=True)
class DeltaRuleConstants:
    """``heads``: of values and states; keys and queries may have fewer. ``vector``: a decay for each dimension of the keys, which
    keys and queries have in them already; otherwise one for all. ``documents``: pieces are sequences of ``cu_seqlens``.
    ``columns``: of a program's part of a state; ``chunk``: tokens."""

    heads: int
    key_heads: int
    query_heads: int
    key_dim: int
    value_dim: int
    vector: bool
    documents: bool
    columns: int
    chunk: int

    @property
    def key_block(self) -> int:
        return padded_dim(self.key_dim)

    @property
    def value_blocks(self) -> int:
        return -(-self.value_dim // self.columns)

    @property
    def maps_blocks(self) -> int:
        return self.value_blocks + -(-self.key_dim // self.columns)


@triton.jit
def _stretch(cu_seqlens, document, piece, tokens, documents: tl.constexpr):
    """The first token of a piece, or of its document, and the one after its last, of all pieces' tokens in a row."""
    if documents:
        return tl.load(cu_seqlens + document).to(tl.int64), tl.load(cu_seqlens + document + 1).to(tl.int64)
    else:
        return piece * tokens, (piece + 1) * tokens


@triton.jit
def maps_kernel(keys, w, u, decays, cu_seqlens, firsts, lasts, tokens, m, e, const: tl.constexpr):
    """``M [pieces, heads, key_dim, key_dim]`` and ``E [..., key_dim, value_dim]``, float32, of a piece: the states that leave it,
    from each unit vector without values (0 where documents begin within), and from nothing. ``keys [tokens of all pieces,
    key_heads, key_dim]``, ``w [..., heads, key_dim]``, ``u [..., heads, value_dim]``; ``decays``: logs of base 2, summed from each
    chunk's begin, ``[..., heads (, key_dim)]``. Launched as ``pieces x heads x const.maps_blocks``."""
    COLUMNS: tl.constexpr = const.columns
    CHUNK: tl.constexpr = const.chunk
    ROWS: tl.constexpr = const.key_block
    block, of_head = tl.program_id(0) % const.maps_blocks, (tl.program_id(0) // const.maps_blocks).to(tl.int64)
    piece, head = of_head // const.heads, of_head % const.heads
    first, document = piece, piece
    if const.documents:
        first, document = tl.load(firsts + piece), tl.load(lasts + piece)
    begin, end = _stretch(cu_seqlens, document, piece, tokens, const.documents)
    of_e = block < const.value_blocks
    columns = tl.where(of_e, block, block - const.value_blocks) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    there = rows < const.key_dim
    valued, keyed = columns < tl.where(of_e, const.value_dim, 0), columns < tl.where(of_e, 0, const.key_dim)
    keys += head // (const.heads // const.key_heads) * const.key_dim + rows[None, :]
    w += head * const.key_dim + rows[None, :]
    u += head * const.value_dim + columns[:, None]
    enters = tl.where(first == document, 1.0, 0.0)  # no state enters a document that begins within
    state = tl.where((columns[:, None] == rows[None, :]) & keyed[:, None], enters, 0.0)
    for start in range(begin, end, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside, last = at < end, tl.minimum(start + CHUNK, end) - 1
        of_keys = tl.load(keys + at[:, None] * (const.key_heads * const.key_dim), mask=inside[:, None] & there[None, :], other=0.0)
        of_w = tl.load(w + at[:, None] * (const.heads * const.key_dim), mask=inside[:, None] & there[None, :], other=0.0)
        of_u = tl.load(u + at[None, :] * (const.heads * const.value_dim), mask=inside[None, :] & valued[:, None], other=0.0)
        if const.vector:
            whole = tl.load(decays + (last * const.heads + head) * const.key_dim + rows, mask=there, other=0.0)
            values = of_u - tl.dot(state.to(of_w.dtype), tl.trans(of_w))
            state *= tl.exp2(whole)[None, :]
        else:
            whole = tl.load(decays + last * const.heads + head)
            until = tl.load(decays + at * const.heads + head, mask=inside, other=0.0)
            values = of_u - tl.dot(state.to(of_w.dtype), tl.trans(of_w))
            values *= tl.where(inside, tl.exp2(whole - until), 0.0)[None, :]
            state *= tl.exp2(whole)
        state = tl.dot(values.to(of_keys.dtype), of_keys, state)
    e += (of_head * const.key_dim + rows[None, :]) * const.value_dim + columns[:, None]
    tl.store(e, state, mask=there[None, :] & valued[:, None])
    m += (of_head * const.key_dim + rows[None, :]) * const.key_dim + columns[:, None]
    tl.store(m, state, mask=there[None, :] & keyed[:, None])


@triton.jit
def back_kernel(queries, keys, w, decays, dy, dvalues, scale, cu_seqlens, firsts, tokens, dstate, const: tl.constexpr):
    """The cotangent of the state that enters a piece's first document, ``[pieces, heads, key_dim, value_dim]``, float32, as far as
    it comes through the output. ``queries`` like ``keys``, ``dy`` like ``u``, ``dvalues``: what ``dy`` tells the values of its own
    chunk; ``scale``: of the queries. Others as of :func:`maps_kernel`. Launched as ``pieces x heads x const.value_blocks``."""
    COLUMNS: tl.constexpr = const.columns
    CHUNK: tl.constexpr = const.chunk
    ROWS: tl.constexpr = const.key_block
    block, of_head = tl.program_id(0) % const.value_blocks, (tl.program_id(0) // const.value_blocks).to(tl.int64)
    piece, head = of_head // const.heads, of_head % const.heads
    document = piece
    if const.documents:
        document = tl.load(firsts + piece)
    begin, end = _stretch(cu_seqlens, document, piece, tokens, const.documents)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.arange(0, ROWS)
    there, valued = rows < const.key_dim, columns < const.value_dim
    queries += head // (const.heads // const.query_heads) * const.key_dim + rows[None, :]
    keys += head // (const.heads // const.key_heads) * const.key_dim + rows[None, :]
    w += head * const.key_dim + rows[None, :]
    dy += head * const.value_dim + columns[:, None]
    dvalues += head * const.value_dim + columns[:, None]
    state = tl.zeros([COLUMNS, ROWS], tl.float32)
    chunks = tl.cdiv(end - begin, CHUNK)
    for number in range(chunks):
        start = begin + (chunks - 1 - number) * CHUNK
        at = start + tl.arange(0, CHUNK)
        inside, last = at < end, tl.minimum(start + CHUNK, end) - 1
        keyed, held = inside[:, None] & there[None, :], inside[None, :] & valued[:, None]
        of_keys = tl.load(keys + at[:, None] * (const.key_heads * const.key_dim), mask=keyed, other=0.0)
        of_queries = tl.load(queries + at[:, None] * (const.query_heads * const.key_dim), mask=keyed, other=0.0)
        of_w = tl.load(w + at[:, None] * (const.heads * const.key_dim), mask=keyed, other=0.0)
        of_dy = tl.load(dy + at[None, :] * (const.heads * const.value_dim), mask=held, other=0.0)
        of_values = tl.load(dvalues + at[None, :] * (const.heads * const.value_dim), mask=held, other=0.0)
        if const.vector:
            whole = tl.load(decays + (last * const.heads + head) * const.key_dim + rows, mask=there, other=0.0)
            total = tl.dot(state.to(of_keys.dtype), tl.trans(of_keys)) + of_values
            state *= tl.exp2(whole)[None, :]
            of_dy = of_dy * scale
        else:
            whole = tl.load(decays + last * const.heads + head)
            until = tl.load(decays + at * const.heads + head, mask=inside, other=0.0)
            total = tl.dot(state.to(of_keys.dtype), tl.trans(of_keys))
            total = total * tl.where(inside, tl.exp2(whole - until), 0.0)[None, :] + of_values
            state *= tl.exp2(whole)
            of_dy = of_dy * (tl.exp2(until) * scale)[None, :]
        state = tl.dot(of_dy.to(of_queries.dtype), of_queries, state)
        state = tl.dot((-total).to(of_w.dtype), of_w, state)
    dstate += (of_head * const.key_dim + rows[None, :]) * const.value_dim + columns[:, None]
    tl.store(dstate, state, mask=there[None, :] & valued[:, None])
