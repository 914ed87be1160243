"""The keys beside a run of queries, which the ranks that hold the neighbouring runs send, and their gradients' way back."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.masks.layout import runs
from jax_core.operands import Keys
from jax_core.strategies.all_gather.reach import Reach
from jax_core.strategies.contract import RingSpec
from jax_core.strategies.transfers.transfer import collective, numbered, ordered_after, pack, unpack, word_of

Ways = dict[tuple[int, int], tuple[tuple[int, int], ...]]  # from which of a rank's runs to which: the pairs of ranks


def add_halo(spec: RingSpec, keys: Keys, near: Reach) -> list[Keys]:
    """The keys of each of this rank's runs, with those before and after it that its queries may see. Zeros stand where the sequence
    has none."""
    own_runs = [_rows(keys, start, start + near.run) for start in range(0, keys.key.shape[1], near.run)]
    tails = [_rows(run, near.run - near.left, near.run) for run in own_runs]
    heads = [_rows(run, 0, near.right) for run in own_runs]
    before, after = _send(spec, [_Parcel(tails, _ways(spec, near.run, 1)), _Parcel(heads, _ways(spec, near.run, -1))])
    return [jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *run) for run in zip(before, own_runs, after, strict=True)]


def reduce_halo(spec: RingSpec, gradients: Sequence[tuple[Array, ...]], near: Reach) -> tuple[Array, ...]:
    """The gradients of this rank's keys, from those of :func:`add_halo`'s results."""
    end = near.left + near.run
    before = [_rows(run, 0, near.left) for run in gradients]
    after = [_rows(run, end, end + near.right) for run in gradients]
    ways = (_back(_ways(spec, near.run, direction)) for direction in (1, -1))
    tails, heads = _send(spec, [_Parcel(*pair) for pair in zip((before, after), ways, strict=True)])
    runs_ = [
        tuple(_added(x[:, near.left : end], tail, head) for x, tail, head in zip(*run, strict=True))
        for run in zip(gradients, tails, heads, strict=True)
    ]
    return tuple(jnp.concatenate(parts, 1) for parts in zip(*runs_, strict=True))


def _rows(tree: Any, start: int, end: int) -> Any:
    return jax.tree.map(lambda x: x[:, start:end], tree)


def _added(x: Array, tail: Array, head: Array) -> Array:
    for start, share in ((x.shape[1] - tail.shape[1], tail), (0, head)):
        # All rows are not indexed: the index would be an array of no elements, as a constant (``api.differentiable``).
        x = x + share if share.shape == x.shape else x.at[:, start : start + share.shape[1]].add(share)
    return x


def _ways(spec: RingSpec, run: int, direction: int) -> Ways:
    """From every run to the one after it (``direction`` 1) or before it (-1) in the sequence."""
    count = len(runs(spec.problem.layout, 0, spec.problem.size, 2))
    place_of = {
        one.start // run: (rank, i)
        for rank in range(spec.problem.size)
        for i, one in enumerate(runs(spec.problem.layout, rank, spec.problem.size, run * count))
    }
    ways = defaultdict(list)
    for chunk, (rank, i) in place_of.items():
        if chunk + direction in place_of:
            other, j = place_of[chunk + direction]
            ways[i, j].append((rank, other))
    return {slots: tuple(sorted(pairs)) for slots, pairs in ways.items()}


def _back(ways: Ways) -> Ways:
    return {(j, i): tuple((to, source) for source, to in pairs) for (i, j), pairs in ways.items()}


class _Parcel(NamedTuple):
    """What each of a rank's runs sends (a tree of arrays, maybe empty), and where to."""

    runs: Sequence[Any]
    ways: Ways


def _send(spec: RingSpec, parcels: Sequence[_Parcel]) -> list[list[Any]]:
    """What comes to each run, for each parcel; zeros where nothing does."""
    arrived = [[jax.tree.map(jnp.zeros_like, run) for run in parcel.runs] for parcel in parcels]
    before = None
    for parcel, of_parcel in zip(parcels, arrived, strict=True):
        for (i, j), pairs in parcel.ways.items():
            if 0 not in jax.tree.leaves(parcel.runs[i])[0].shape:
                came, before = _permuted(spec, parcel.runs[i], pairs, before)
                # At most one of these comes to a rank, the others are zeros.
                of_parcel[j] = jax.tree.map(jnp.add, of_parcel[j], came)
    return arrived


def _permuted(spec: RingSpec, tree: Any, pairs: Sequence[tuple[int, int]], before: Any) -> tuple[Any, Any]:
    """``tree`` from the first rank of a pair to its second, zeros on the others; also the buffer that arrived, which on a CPU the
    next must not overtake (``transfer``)."""
    axes, places = numbered(spec.axis_name, spec.problem.size)
    word = word_of(spec, tree)
    buffer = pack(tree, word)
    if word is not None and before is not None:
        buffer = ordered_after(buffer, before)
    to = [(places[source], places[target]) for source, target in pairs]
    came = collective(partial(lax.ppermute, axis_name=axes, perm=to), buffer)
    return unpack(came, tree), came
