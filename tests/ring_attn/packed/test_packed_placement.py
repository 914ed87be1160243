"""Which rank holds which tokens of a packed batch: all of them, equal lengths, and balanced work."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_mixes import mixes

from ring_attn.packed.placement import Piece, place


def in_layouts(lengths: list[int], size: int) -> tuple[float, float]:
    """The imbalance of contiguous shards of the whole batch, and of zigzag ones."""
    work = np.concatenate([np.arange(1, length + 1) for length in lengths])
    chunks = work[: len(work) // (2 * size) * 2 * size].reshape(2 * size, -1).sum(1)
    contiguous, zigzag = chunks[::2] + chunks[1::2], (chunks + chunks[::-1])[:size]
    return contiguous.max() / contiguous.mean(), zigzag.max() / zigzag.mean()


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("mix", mixes())
def test_causal_work_is_balanced(mix, size):
    """Within 5 % of the mean, where contiguous or zigzag shards of the batch reach 3 and 2.5 times the mean."""
    lengths = mixes()[mix]
    placement = place(lengths, size, -(-sum(lengths) // size))
    contiguous, zigzag = in_layouts(lengths, size)
    print(f"{mix}, {size} ranks: {placement.imbalance:.3f}, contiguous {contiguous:.2f}, zigzag {zigzag:.2f}")
    assert placement.imbalance <= 1.05 and placement.table is not None
    if mix == "web pages and books":
        assert contiguous > 1.2 and zigzag > 1.2


def test_a_document_that_fits_stays_whole():
    """Only the long one is cut, and every rank has as many of its tokens."""
    lengths = [4096] + [256] * 16
    placement = place(lengths, 4, 2048)
    for pieces in placement.pieces:
        whole = [piece for piece in pieces if piece.document]
        assert [(piece.start, piece.stop) for piece in whole] == [(0, 256)] * 4
        assert sum(piece.stop - piece.start for piece in pieces if not piece.document) == 1024
    own = [sorted(int(placement.numbers[piece.document]) for piece in pieces if piece.document) for pieces in placement.pieces]
    assert own == [list(range(1 + 4 * rank, 5 + 4 * rank)) for rank in range(4)]  # each rank's numbers are consecutive


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 5), st.integers(0, 7))
@settings(deadline=None, max_examples=200)
def test_every_token_has_one_place(lengths, size, more):
    check_places(lengths, size, -(-sum(lengths) // size) + more)


def check_places(lengths, size, shard_length):
    placement = place(lengths, size, shard_length)
    seen = set()
    for pieces in placement.pieces:
        assert sum(piece.stop - piece.start for piece in pieces) <= shard_length
        keys = [(placement.numbers[piece.document], piece.start) for piece in pieces]
        assert keys == sorted(keys)  # blocks of a shard hold neighbours
        seen |= {(piece.document, at) for piece in pieces for at in range(piece.start, piece.stop)}
        assert all(piece.stop > piece.start for piece in pieces)
    assert seen == {(document, at) for document, length in enumerate(lengths) for at in range(length)}
    assert sum(piece.stop - piece.start for pieces in placement.pieces for piece in pieces) == sum(lengths)
    assert sorted(placement.numbers) == list(range(len(lengths)))
    first = placement.shared_eighths(shard_length) * shard_length / 8  # rows, after which no document is another rank's, too
    after = [piece.document for pieces in placement.pieces for piece in rows_after(pieces, first)]
    holders = Counter(document for pieces in placement.pieces for document in {piece.document for piece in pieces})
    assert all(holders[document] == 1 for document in after)


@pytest.mark.parametrize(("lengths", "shard_length"), [([1, 128, 256, 384], 512), ([8, 1, 16, 20], 30)])
def test_what_others_see_ends_with_its_last_piece(lengths, shard_length):
    """Before it there may be a document that was to be cut, and is whole."""
    check_places(lengths, 2, shard_length)


def rows_after(pieces, first):
    ends = np.cumsum([piece.stop - piece.start for piece in pieces])
    return [piece for piece, end in zip(pieces, ends, strict=True) if end > first]


def test_work_counts_the_keys_that_are_seen():
    assert Piece(0, 3, 6).work == 4 + 5 + 6
