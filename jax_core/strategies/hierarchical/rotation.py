"""The rotation of the keys past all ranks, and of their gradients: within a host as in a ring, between hosts once for each host.

While the ranks of a host pass round the keys of one host, those of the next come from the host before, in as many pieces as there
are steps: they have all of these steps to arrive. dK/dV follow their keys one step behind within a host, and the sums of what the
hosts have added follow one host behind, in pieces too.

In pieces, because on a GPU collectives run one after another: a whole shard on a slow link would hold up the rotation within the
host, and with it the kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from jax_core.kernels.contract import Pair
from jax_core.masks.layout import runs
from jax_core.operands import Keys, Operands
from jax_core.strategies.contract import RingSpec
from jax_core.strategies.hierarchical.pieces import put_piece, room_for, take_piece
from jax_core.strategies.hierarchical.schedule import Hop, HostStep, Shift, host_steps, way_home
from jax_core.strategies.pairs.local import add, make_pair
from jax_core.strategies.pairs.rows import query_runs, rank_of
from jax_core.strategies.rotation import Step, run_steps
from jax_core.strategies.transfers.transfer import (
    Transfer,
    Tree,
    finish_transfers,
    ordered_after,
    pack,
    start_transfers,
    tree_after,
    unpack,
    word_of,
)
from jax_core.strategies.visibility import visible_shifts

Result = TypeVar("Result")  # a rank's own, so far
Computed = TypeVar("Computed")  # by a kernel, of a pair
Sums = TypeVar("Sums")  # of dK and dV; None in a forward
R = TypeVar("R")


class PairStep(NamedTuple):
    """A pair, and whether it is the last."""

    pair: Pair
    last: bool


class _Relay(NamedTuple, Generic[Tree]):
    """What travels from host to host: what this rank sends on, and room for what comes to it."""

    sent: Tree
    room: Any  # like ``sent``; None where there is one host


class _AtHost(NamedTuple, Generic[Result, Sums]):
    """Before the steps for a host. ``shift``: the first number of their shifts; ``sums``: of dK/dV, from the second host on;
    ``before``: of what has arrived last, which the next transfer must not overtake."""

    shift: Array
    keys: _Relay[Keys]
    sums: _Relay[Sums] | None
    before: Array | None
    result: Result


class _AtStep(NamedTuple, Generic[Result, Sums]):
    """Before a step for a host. ``number``: how many there were; ``shift``: the second number; ``current``: the keys that are here;
    ``dkv``: of those that were here before."""

    number: Array
    shift: Array
    current: Keys
    dkv: Sums | None
    keys: _Relay[Keys]
    sums: _Relay[Sums] | None
    before: Array | None
    result: Result


_State = TypeVar("_State", _AtHost, _AtStep)


@dataclass(frozen=True)
class HostRotation(Generic[Result, Computed, Sums]):
    """``compute(result, step)`` runs the kernel on a pair, beside what travels; ``keep(result, step, computed) -> (result, dkv)``
    adds to a rank's own result what was computed, and gives the pair's gradients of keys and values, None in a forward.
    ``settle(result)``: in the form that a loop's body gives it."""

    spec: RingSpec
    operands: Operands
    compute: Callable[[Result, PairStep], Computed]
    keep: Callable[[Result, PairStep, Computed], tuple[Result, Sums]]
    settle: Callable[[Result], Result]

    def run(self, result: Result, after: Array | None = None) -> tuple[Result, Sums | None, Callable[[Sums], Sums]]:
        """The result of all steps; the sums of dK/dV of the keys that came last, and what sends such to the rank that owns the
        keys. Nothing is sent before ``after`` is computed."""
        shifts, keys = self._shifts(), self.operands.keys
        if after is not None and len(shifts) > 1:
            keys = tree_after(self.spec, keys, after)
        hosts = host_steps(shifts)
        begin: _AtHost[Result, Sums] = _AtHost(
            jnp.int32(0), _Relay(keys, room_for(keys) if len(hosts) > 1 else None), None, None, result
        )
        end = run_steps(self.spec, self._step_of_host, self._settled, begin, hosts)
        return end.result, end.sums and end.sums.sent, partial(self._send_home, way_home(shifts, self._sizes), end.before)

    def _send_home(self, home: Hop, before: Array | None, dkv: Sums) -> Sums:
        if home == (0, 0):
            return dkv
        (arrived,), *_ = self._exchange([(dkv, home)], before, lambda: ())
        return arrived

    def _step_of_host(self, state: _AtHost[Result, Sums], step: HostStep) -> _AtHost[Result, Sums]:
        shift, keys, sums, before, result = state
        begin = _AtStep(jnp.int32(0), jnp.int32(step.first), keys.sent, None, keys, sums, before, result)
        end = run_steps(self.spec, partial(self._step_of_rank, host_shift=shift, host=step), self._settled, begin, step.steps)
        keys, sums = end.keys, end.sums
        if step.hop_out:
            keys, shift = _Relay(keys.room, keys.sent), shift + step.hop_out[0]
        if end.dkv is not None:
            total = add(sums and sums.room, end.dkv)
            sums = _Relay(total, sums.sent if sums else room_for(total))
        return _AtHost(shift, keys, sums, end.before, end.result)

    def _step_of_rank(self, state: _AtStep[Result, Sums], host_shift: Array, host: HostStep, step: Step) -> _AtStep[Result, Sums]:
        """In flight meanwhile: within the host the keys for the next step and dK/dV of the step before; between hosts a piece of
        the keys for the next host, and of the sums that this host's are added to."""
        number, shift, current, dkv, keys, sums, before, result = state
        count = len(host.steps)
        routes = {
            "current": (current, (0, step.hop_out)) if step.hop_out else None,
            "dkv": (dkv, (0, step.hop_in)) if step.hop_in and dkv is not None else None,
            "keys": (take_piece(keys.sent, number, count), host.hop_out) if host.hop_out else None,
            "sums": (take_piece(sums.sent, number, count), host.hop_in) if host.hop_in and sums else None,
        }
        sent = {name: route for name, route in routes.items() if route is not None}
        pair = self._pair(current, (host_shift, shift), diagonal=not (host.hop_in or step.hop_in))
        pair_step = PairStep(pair, last=not (host.hop_out or step.hop_out))
        # What is sent on later waits for this step: all its pieces might leave at once otherwise.
        arrived, before, (computed, keys, sums) = self._exchange(
            list(sent.values()), before, lambda: (self.compute(result, pair_step), keys, sums)
        )
        result, share = self.keep(result, pair_step, computed)
        received = dict(zip(sent, arrived, strict=True))
        if "keys" in received:
            keys = keys._replace(room=put_piece(keys.room, received["keys"], number, count))
        if sums and "sums" in received:
            sums = sums._replace(room=put_piece(sums.room, received["sums"], number, count))
        return _AtStep(
            number + 1,
            shift + step.hop_out,
            received.get("current", current),
            add(received.get("dkv"), share),
            keys,
            sums,
            before,
            result,
        )

    def _exchange(
        self, sent: list[tuple[Any, Hop]], before: Array | None, compute: Callable[[], R]
    ) -> tuple[list[Any], Array | None, R]:
        """Sends each tree by its hop while ``compute`` runs; what came, and what the next exchange must not overtake."""
        if not sent:
            return [], before, compute()
        transfers = [Transfer(pack(tree, self._word), hop) for tree, hop in sent]
        if before is not None:
            transfers = [Transfer(ordered_after(buffer, before), hop) for buffer, hop in transfers]
        arriving = start_transfers(transfers, self.spec.axis_name, self._sizes)
        arriving, result = lax.optimization_barrier((arriving, compute()))
        arrived = finish_transfers(arriving, transfers)
        before = None if self._word is None else arriving[-1][:1]
        return [unpack(buffer, tree) for buffer, (tree, _) in zip(arrived, sent, strict=True)], before, result

    def _pair(self, keys: Keys, shift: tuple[Array, Array], diagonal: bool) -> Pair:
        """The queries and the keys from ``shift`` before this rank."""
        hosts, ranks = self._sizes
        rank = rank_of(self.spec, self.operands)
        owner = (rank // ranks - shift[0]) % hosts * ranks + (rank - shift[1]) % ranks
        k_runs = runs(self.spec.problem.layout, owner, self.spec.problem.size, keys.key.shape[1])
        return make_pair(self.spec, self.operands, query_runs(self.spec, self.operands), keys, k_runs, diagonal)

    def _settled(self, state: _State) -> _State:
        return state._replace(result=self.settle(state.result))

    def _shifts(self) -> list[Shift]:
        lengths = self.operands.query.shape[1], self.operands.key.shape[1]
        problem = self.spec.problem
        return [(host, rank) for host, rank in visible_shifts(problem.scores.mask, problem.layout, self._sizes, *lengths)]

    @property
    def _sizes(self) -> tuple[int, int]:
        hosts, ranks = self.spec.problem.sizes
        return hosts, ranks

    @property
    def _word(self) -> type | None:
        return word_of(self.spec, self.operands.keys)
