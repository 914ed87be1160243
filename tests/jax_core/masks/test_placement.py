"""Tables of pieces of documents: what is visible of two ranks' shards is one rectangle a document, as the ids say."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_core.kernels.contract import Extras, Pair, Scores
from jax_core.kernels.cute import rectangles
from jax_core.masks.layout import runs
from jax_core.masks.placement import pieces_of
from jax_core.masks.static import Mask
from ring_attn.packed.placement import place

MOST = 320  # tokens


@partial(jax.jit, static_argnames=("layout", "length"))
def computed(table, ranks, layout: str, length: int):
    """The ids of both ranks' rows, and the rectangles of their pair."""
    q = jnp.zeros((1, length, 1, 8))
    places = (runs(layout, rank, len(table), length) for rank in ranks)
    pair = Pair(q, q, q, *places, Scores(Mask(causal=True, any_position=True), 1.0), Extras(documents=table))
    return [pieces_of(table, rank).ids(length) for rank in ranks], rectangles.of_shared_documents(pair)


def covered(first: np.ndarray, lengths: np.ndarray, length: int) -> np.ndarray:
    """bool ``[length, sequences]``; each row in one sequence at most, as they lie in memory."""
    rows, first = np.arange(length)[:, None], first[:-1]
    found = (rows >= first) & (rows < first + lengths)
    assert (found.sum(1) <= 1).all() and (np.diff(first) >= 0).all()
    return found


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([2, 4]), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_rectangles_are_what_the_ids_say(layout, lengths, size, random):
    length, ranks = MOST // size, random.sample(range(size), 2)
    placement = place(lengths, size, length)
    if placement.table is None:
        return
    ids, ((q_first, q_lengths, k_first, k_lengths), *rows) = jax.device_get(computed(placement.table, ranks, layout, length))
    for rank, own in zip(ranks, ids, strict=True):
        wanted = [(placement.numbers[x.document], at) for x in placement.pieces[rank] for at in range(x.start, x.stop)]
        wanted += [(-1, 0)] * (length - len(wanted))
        assert np.array_equal(np.concatenate(own).T, wanted)
    (q_ids, q_at), (k_ids, k_at) = ids
    seen = (k_ids == q_ids.T) & (q_ids.T >= 0) & (k_at <= q_at.T)
    queries, keys = covered(q_first, q_lengths, length), covered(k_first, k_lengths, length)
    assert np.array_equal(queries.astype(int) @ keys.T.astype(int), seen)
    assert np.array_equal(queries.any(1), rows[0][0]) and np.array_equal(keys.any(1), rows[1][0])
