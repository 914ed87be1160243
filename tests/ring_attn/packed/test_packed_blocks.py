"""Attention across documents is not computed: which blocks the kernels visit."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from packed_mixes import mixes

from jax_core.config import FwdParams
from jax_core.kernels import blocks
from jax_core.kernels.blocks import block_layout, block_sparsity
from jax_core.kernels.contract import Extras, Pair, Scores
from jax_core.kernels.xla import blocks as xla
from jax_core.masks.layout import LAYOUTS, Run, runs
from jax_core.masks.static import Mask, make_mask
from ring_attn.packed.documents import read_documents
from ring_attn.packed.placement import place

SIZE, BLOCK, TOTAL = 4, 16, 2048


def batch(mix):
    """The documents of a mix, in one row; as many as fit."""
    lengths = np.minimum(mixes()[mix], TOTAL)
    lengths = lengths[: np.searchsorted(np.cumsum(lengths), TOTAL) + 1]
    lengths[-1] -= lengths.sum() - TOTAL
    ends = torch.from_numpy(np.concatenate([[0], lengths.cumsum()]))
    return read_documents({"input_ids": torch.zeros(1, TOTAL, dtype=torch.int64), "cu_seqlens": ends})


def placed(documents):
    """The segment and position ids of all ranks' balanced shards, ``[ranks, shard length]`` each."""
    placement = place(documents.lengths, SIZE, TOTAL // SIZE)
    order = placement.order(documents.lengths, TOTAL // SIZE).reshape(SIZE, -1)
    return placement.numbers[documents.numbers.numpy()][order], documents.offsets.numpy()[order]


def in_blocks(x, axis):
    return x.reshape(*x.shape[:axis], -1, BLOCK, *x.shape[axis + 1 :])


def counts(visited, q, k, q_at, k_at):
    """How many pairs of blocks are visited; have a visible pair; and are visited although they share no document."""
    same = q[:, None] == k[None]
    seen, shared = (in_blocks(in_blocks(pairs, 1), 0).any((1, 3)) for pairs in (same & (k_at[None] <= q_at[:, None]), same))
    visited = np.asarray(visited)
    assert not (seen & ~visited).any()
    return int(visited.sum()), int(seen.sum()), int((visited & ~shared).sum())


def make_pair(q_runs, k_runs, mask, extras, batch=1):
    q, k = (jnp.zeros((batch, sum(run.length for run in held), 1, 1)) for held in (q_runs, k_runs))
    return Pair(q, k, k, q_runs, k_runs, Scores(mask, 1.0), extras)


def visited_by_lists(q_runs, k_runs, mask, extras):
    """By the Triton and the TPU kernel, whose lists come from here."""
    layouts = block_layout(q_runs, BLOCK), block_layout(k_runs, BLOCK)
    return block_sparsity(*layouts, make_pair(q_runs, k_runs, mask, extras)).visible[0]


def visited_by_xla(q_runs, k_runs, mask, extras):
    _, _, tiles, _ = xla.cut(make_pair(q_runs, k_runs, mask, extras), FwdParams(BLOCK, BLOCK))
    return tiles.needed


VISITED = {"lists": visited_by_lists, "xla": visited_by_xla}


@pytest.mark.parametrize("kernel", VISITED)
@pytest.mark.parametrize("mix", ["conversations", "web pages and books", "one long, many short"])
def test_balanced_shards_visit_the_blocks_of_their_documents(mix, kernel):
    """Those with a visible pair and no other, on any rank at any step."""
    check_balanced(mix, kernel, 1)


def check_balanced(mix, kernel, more):
    """``more``: how many times as many blocks may be visited as have a visible pair."""
    segments, offsets = placed(batch(mix))
    held = (Run(0, 1, TOTAL // SIZE),)  # the ids replace it
    total = np.zeros(3, int)
    for rank in range(SIZE):
        for source in range(SIZE):
            ids = dict(q_segment_ids=segments[rank], kv_segment_ids=segments[source])
            ids |= dict(q_position_ids=offsets[rank], kv_position_ids=offsets[source])
            extras = Extras(**{name: jnp.asarray(array[None], jnp.int32) for name, array in ids.items()})
            visited = VISITED[kernel](held, held, Mask(causal=True, any_position=True), extras)
            total += counts(visited, segments[rank], segments[source], offsets[rank], offsets[source])
    print(f"{mix}: {total[0]} blocks visited, {total[1]} with a visible pair, of {(TOTAL // BLOCK) ** 2}")
    assert total[2] == 0
    assert total[0] <= more * total[1]


def test_long_shards_are_judged_by_groups_of_places(monkeypatch):
    """Which may visit a block too much, where two documents end in one group on both sides, but never one too few."""
    monkeypatch.setattr(blocks, "_PAIRS", (TOTAL // SIZE // 4) ** 2)
    check_balanced("web pages and books", "lists", 1.02)


@pytest.mark.parametrize("kernel", VISITED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_a_layout_visit_the_blocks_of_their_documents(layout, kernel):
    """The same with positions of the layout and segment ids alone, as ``cu_seqlens`` become."""
    documents = batch("web pages and books")
    numbers = documents.numbers.numpy()
    held = [runs(layout, rank, SIZE, TOTAL // SIZE) for rank in range(SIZE)]
    at = [np.concatenate([run.start + run.stride * np.arange(run.length) for run in own]) for own in held]
    total = np.zeros(3, int)
    for rank in range(SIZE):
        for source in range(SIZE):
            segments = [jnp.asarray(numbers[at[each]][None], jnp.int32) for each in (rank, source)]
            extras = Extras(q_segment_ids=segments[0], kv_segment_ids=segments[1])
            visited = VISITED[kernel](held[rank], held[source], make_mask(True), extras)
            total += counts(visited, numbers[at[rank]], numbers[at[source]], at[rank], at[source])
    assert total[2] == 0
    assert total[0] == total[1]


@pytest.mark.parametrize("kernel", VISITED)
def test_a_block_with_the_ends_of_two_documents_does_not_meet_what_lies_between(kernel):
    """Bounds alone would say that a block of documents 0 and 9 shares one with a block of documents 4 and 5."""
    q = np.repeat([0, 9], BLOCK // 2)[None]
    k = np.repeat([4, 5], BLOCK // 2)[None]
    extras = Extras(q_segment_ids=jnp.asarray(q), kv_segment_ids=jnp.asarray(k))
    held = (Run(0, 1, BLOCK),)
    assert not VISITED[kernel](held, held, make_mask(), extras).any()
    swapped = Extras(q_segment_ids=extras.kv_segment_ids, kv_segment_ids=extras.q_segment_ids)
    assert not VISITED[kernel](held, held, make_mask(), swapped).any()
    assert VISITED[kernel](held, held, make_mask(), extras._replace(kv_segment_ids=extras.q_segment_ids)).all()


def test_the_xla_kernel_judges_every_batch_entry_by_itself():
    """Row 0 holds document 0 on one side and 1 on the other, row 1 the reverse: no row has a visible pair."""
    q, k = np.array([[0] * BLOCK, [1] * BLOCK]), np.array([[1] * BLOCK, [0] * BLOCK])
    extras = Extras(q_segment_ids=jnp.asarray(q), kv_segment_ids=jnp.asarray(k))
    held = (Run(0, 1, BLOCK),)
    _, _, tiles, _ = xla.cut(make_pair(held, held, make_mask(), extras, batch=2), FwdParams(BLOCK, BLOCK))
    assert not tiles.needed.any()
