"""The ring: exact attention over local shards inside ``shard_map``, written once for every kernel.

Each rank keeps its queries; K/V rotate round the ring (Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers",
arXiv:2310.01889), and every step continues the online softmax. In the backward K/V rotate again, and their gradients follow one
step behind until they are back at the rank that owns the shard. Of placed documents only the rows travel that other ranks see.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.kernels.contract import Pair, Problem
from jax_core.masks.layout import runs
from jax_core.operands import EIGHTHS, Keys, Operands
from jax_core.strategies.contract import RingSpec, Strategy
from jax_core.strategies.pairs.local import (
    LocalGradients,
    accumulate,
    add,
    kernel_of,
    make_pair,
    open_backward,
    open_forward,
)
from jax_core.strategies.pairs.partial_results import PartialResults
from jax_core.strategies.pairs.rows import query_runs, rank_of
from jax_core.strategies.rotation import Step, run_steps, steps
from jax_core.strategies.transfers.traffic import Traffic, rotated
from jax_core.strategies.transfers.transfer import (
    Transfer,
    Tree,
    finish_transfers,
    ordered_after,
    pack,
    start_transfers,
    unpack,
    word_of,
)
from jax_core.strategies.visibility import visible_shifts

# What a step leaves to the next: the keys as they are sent, how many ranks they have come, and what is summed. (Nothing
# is sent where there is one step. In the backward also the gradients of keys that stay.)
_Forward = tuple[Any, Array, PartialResults]
_Backward = tuple[Any, Array, Any, Any, LocalGradients]

_MULTIPLE = 64  # of rows that are sent


class RingStrategy(Strategy):
    """K/V travel from rank to rank between kernel calls."""

    def traffic(self, problem: Problem, backward: bool) -> Traffic:
        return rotated(replace(problem, k_length=sent_rows(problem)), len(_shifts(problem)) - 1, backward)

    def forward(self, spec: RingSpec, operands: Operands) -> tuple[Array, Array]:
        opened, kernel = open_forward(spec, operands), kernel_of(spec)
        operands, wide = opened.operands, opened.wide
        local_keys, schedule = operands.keys, steps(_shifts(spec.problem))
        sent_keys, _ = _divided(local_keys, spec.problem)

        def run_step(state: _Forward, step: Step) -> _Forward:
            buffer, shift, partials = state
            transfers = [Transfer(buffer, step.hop_out)] if step.hop_out else []
            arriving = start_transfers(transfers, spec.axis_name, spec.problem.size)
            keys = unpack(buffer, sent_keys) if step.hop_in else local_keys
            pair = _pair(spec, operands, keys, shift, diagonal=not step.hop_in, alone=len(schedule) == 1)
            result = opened.attend(pair, partials.carry if kernel.CONTINUES else None, last=not step.hop_out)
            if transfers:
                arriving, result = lax.optimization_barrier((arriving, result))
            partials = partials.plus(result, kernel.CONTINUES, wide)
            (buffer,) = finish_transfers(arriving, transfers) or [buffer]
            return buffer, shift + step.hop_out, partials

        def settle(state: _Forward) -> _Forward:
            buffer, shift, partials = state
            return buffer, shift, partials.merged(wide)

        buffer = pack(sent_keys, word_of(spec, sent_keys)) if len(schedule) > 1 else None
        *_, partials = run_steps(spec, run_step, settle, (buffer, jnp.int32(0), PartialResults()), schedule)
        return opened.close(partials.result(opened.last_dtype))

    def backward(
        self, spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array | None = None
    ) -> Operands:
        opened = open_backward(spec, operands, out, lse, dout, dlse)
        operands = opened.operands
        local_keys, schedule = operands.keys, steps(_shifts(spec.problem))
        sent_keys, _ = _divided(local_keys, spec.problem)
        word = word_of(spec, sent_keys)

        def run_step(state: _Backward, step: Step) -> _Backward:
            buffer, shift, dkv, staying, sums = state
            # In flight during this step: K/V for the next step, and the previous step's dK/dV, which this step's are added to.
            transfers = [Transfer(buffer, step.hop_out)] if step.hop_out else []
            transfers += [Transfer(pack(dkv, word), step.hop_in)] if step.hop_in else []
            arriving = start_transfers(transfers, spec.axis_name, spec.problem.size)
            keys = unpack(buffer, sent_keys) if step.hop_in else local_keys
            pair = _pair(spec, operands, keys, shift, diagonal=not step.hop_in, alone=len(schedule) == 1)
            grads = opened.differentiate(pair, sums.dq)
            if transfers:
                arriving, grads = lax.optimization_barrier((arriving, grads))
            arrived = finish_transfers(arriving, transfers)
            if step.hop_in:
                dkv = add(unpack(arrived[-1], dkv), (grads.dk, grads.dv))
            else:
                dkv, staying = _divided((grads.dk, grads.dv), spec.problem)
            sums = accumulate(sums, grads, pair.k_runs)
            return arrived[0] if step.hop_out else buffer, shift + step.hop_out, dkv, staying, sums

        # The first rotation must neither run beside the forward's nor be merged with it, which would keep its result until now.
        buffer = ordered_after(pack(sent_keys, word), opened.residuals.delta) if len(schedule) > 1 else None
        state: _Backward = buffer, jnp.int32(0), None, None, opened.no_gradients()
        _, _, dkv, staying, sums = run_steps(spec, run_step, lambda state: state, state, schedule)
        sent = sum(step.hop_out for step in schedule)
        return opened.close(dkv, sums, lambda dkv: _joined(_return_to_owner(spec, dkv, word, sent), staying))


def _pair(spec: RingSpec, operands: Operands, keys: Keys, shift: Array, diagonal: bool, alone: bool) -> Pair:
    """The queries and the keys from ``shift`` ranks before this one."""
    owner = (rank_of(spec, operands) - shift) % spec.problem.size
    q_runs, k_runs = query_runs(spec, operands), runs(spec.problem.layout, owner, spec.problem.size, keys.key.shape[1])
    return make_pair(spec, operands, q_runs, keys, k_runs, diagonal, alone)


def _shifts(problem: Problem) -> tuple[int, ...]:
    """The shifts to visit, ascending from 0: at shift ``s`` rank ``r`` has the K/V of rank ``(r - s) % size``. The rotation jumps
    over those at which no rank has a visible pair (a sliding window that reaches one shard back needs two, whatever the ring's
    size)."""
    if not sent_rows(problem):
        return (0,)
    shifts = visible_shifts(problem.scores.mask, problem.layout, (problem.size,), problem.q_length, problem.k_length)
    return tuple(shift for (shift,) in shifts)


def sent_rows(problem: Problem) -> int:
    """Of a shard's keys: its first rows, which hold all that other ranks see."""
    rows = -(-problem.k_length * problem.shared_eighths // EIGHTHS)
    return min(problem.k_length, -(-rows // _MULTIPLE) * _MULTIPLE)


def _divided(tree: Tree, problem: Problem) -> tuple[Tree, Tree | None]:
    """Of keys or their gradients, ``[batch, k_length, ...]``: what travels and what stays, None where that is not divided. (A form
    of the kernel's own is not.)"""
    rows = sent_rows(problem)
    if rows in (0, problem.k_length):  # with none, nothing leaves
        return tree, None
    return jax.tree.map(lambda x: x[:, :rows], tree), jax.tree.map(lambda x: x[:, rows:], tree)


def _joined(returned: Tree, staying: Tree | None) -> Tree:
    if staying is None:
        return returned
    return jax.tree.map(lambda x, rest: jnp.concatenate([x, rest.astype(x.dtype)], 1), returned, staying)


def _return_to_owner(spec: RingSpec, dkv: Tree, word: type | None, sent: int) -> Tree:
    """dK and dV of this rank's own shard, which are ``size - sent`` hops away from it."""
    if not sent:
        return dkv
    transfers = [Transfer(pack(dkv, word), spec.problem.size - sent)]
    (buffer,) = finish_transfers(start_transfers(transfers, spec.axis_name, spec.problem.size), transfers)
    return unpack(buffer, dkv)
