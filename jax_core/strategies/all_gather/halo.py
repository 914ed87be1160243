"""The keys beside a run of queries, which the ranks that hold the neighbouring runs send, and their gradients' way back."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.masks.layout import runs
from jax_core.operands import Keys
from jax_core.strategies.all_gather.reach import Reach
from jax_core.strategies.contract import RingSpec
from jax_core.strategies.transfers.transfer import Buffer, Tree, collective, numbered, ordered_after, pack, unpack, word_of

Routes = dict[tuple[int, int], tuple[tuple[int, int], ...]]  # from which of a rank's runs to which: the pairs of ranks


def add_halo(spec: RingSpec, keys: Keys, halo: Reach) -> list[Keys]:
    """The keys of each of this rank's runs, with those before and after it that its queries may see. Zeros stand where the sequence
    has none."""
    local_runs = [_rows(keys, start, start + halo.run) for start in range(0, keys.key.shape[1], halo.run)]
    tails = [_rows(run, halo.run - halo.left, halo.run) for run in local_runs]
    heads = [_rows(run, 0, halo.right) for run in local_runs]
    before, after = _send(spec, [_Message(tails, _routes(spec, halo.run, 1)), _Message(heads, _routes(spec, halo.run, -1))])
    return [jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *run) for run in zip(before, local_runs, after, strict=True)]


def reduce_halo(spec: RingSpec, gradients: Sequence[tuple[Array, ...]], halo: Reach) -> tuple[Array, ...]:
    """The gradients of this rank's keys, from those of :func:`add_halo`'s results."""
    end = halo.left + halo.run
    before = [_rows(run, 0, halo.left) for run in gradients]
    after = [_rows(run, end, end + halo.right) for run in gradients]
    routes = (_back(_routes(spec, halo.run, direction)) for direction in (1, -1))
    tails, heads = _send(spec, [_Message(*pair) for pair in zip((before, after), routes, strict=True)])
    runs_ = [
        tuple(_added(x[:, halo.left : end], tail, head) for x, tail, head in zip(*run, strict=True))
        for run in zip(gradients, tails, heads, strict=True)
    ]
    return tuple(jnp.concatenate(parts, 1) for parts in zip(*runs_, strict=True))


def _rows(tree: Tree, start: int, end: int) -> Tree:
    return jax.tree.map(lambda x: x[:, start:end], tree)


def _added(x: Array, tail: Array, head: Array) -> Array:
    for start, share in ((x.shape[1] - tail.shape[1], tail), (0, head)):
        # All rows are not indexed: the index would be an array of no elements, as a constant (``api.differentiable``).
        x = x + share if share.shape == x.shape else x.at[:, start : start + share.shape[1]].add(share)
    return x


def _routes(spec: RingSpec, run: int, direction: int) -> Routes:
    """From every run to the one after it (``direction`` 1) or before it (-1) in the sequence."""
    count = len(runs(spec.problem.layout, 0, spec.problem.size, 2))
    place_of = {
        one.start // run: (rank, i)
        for rank in range(spec.problem.size)
        for i, one in enumerate(runs(spec.problem.layout, rank, spec.problem.size, run * count))
    }
    routes = defaultdict(list)
    for chunk, (rank, i) in place_of.items():
        if chunk + direction in place_of:
            other, j = place_of[chunk + direction]
            routes[i, j].append((rank, other))
    return {slots: tuple(sorted(pairs)) for slots, pairs in routes.items()}


def _back(routes: Routes) -> Routes:
    return {(j, i): tuple((to, source) for source, to in pairs) for (i, j), pairs in routes.items()}


class _Message(NamedTuple, Generic[Tree]):
    """What each of a rank's runs sends (a tree of arrays, maybe empty), and where to."""

    runs: Sequence[Tree]
    routes: Routes


def _send(spec: RingSpec, messages: Sequence[_Message[Tree]]) -> list[list[Tree]]:
    """What comes to each run, for each message; zeros where nothing does."""
    arrived = [[jax.tree.map(jnp.zeros_like, run) for run in message.runs] for message in messages]
    before = None
    for message, received in zip(messages, arrived, strict=True):
        for (i, j), pairs in message.routes.items():
            if 0 not in jax.tree.leaves(message.runs[i])[0].shape:
                came, before = _permuted(spec, message.runs[i], pairs, before)
                # At most one of these comes to a rank, the others are zeros.
                received[j] = jax.tree.map(jnp.add, received[j], came)
    return arrived


def _permuted(spec: RingSpec, tree: Tree, pairs: Sequence[tuple[int, int]], before: Buffer | None) -> tuple[Tree, Buffer]:
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
