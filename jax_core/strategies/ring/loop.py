"""The ring: exact attention over local shards inside ``shard_map``, written once for every kernel.

Each rank keeps its queries; K/V travel round the ring (Liu, Zaharia, Abbeel 2023, "Ring Attention with Blockwise Transformers",
arXiv:2310.01889), and every step continues the online softmax. In the backward K/V travel again, and the gradients of K/V follow
one step behind them until they are home.
"""

from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jax_core.kernels.contract import Extras, Grads, Kernel, accumulation_dtype
from jax_core.kernels.merge import join_sinks, sink_gradient, sinks_per_head
from jax_core.masks.layout import Run, runs
from jax_core.strategies.contract import Operands, RingSpec, make_residuals
from jax_core.strategies.padding import clear_cotangents, clear_hidden, clear_operands, clear_values
from jax_core.strategies.ring.columns import put_columns, take_columns
from jax_core.strategies.ring.schedule import shifts
from jax_core.strategies.ring.transfer import Load, after, depart, land, pack, unpack, word_type
from jax_core.varying import vary, varying_axes


def forward(spec: RingSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Attention of the local queries over the whole sequence.

    Returns ``out [batch, q_length, heads, value_dim]`` in the query's dtype and ``lse [batch, heads, q_length]``, natural log,
    float32 (float64 for float64 inputs), ``-inf`` where a row saw neither key nor sink.
    """
    kernel = _kernel(spec)
    operands, _ = _in_full_shape(spec, clear_values(operands))
    own = _travellers(operands)
    moves = _moves(spec, operands)
    # Sinks join after the last pair; without them the last pair gives the output as it leaves.
    wide, final = accumulation_dtype(operands.query.dtype), operands.query.dtype
    last_dtype = final if operands.softmax_aux is None else wide

    def step(state, move: _Move):
        words, shift, result = state
        loads = [Load(words, move.onward)] if move.onward else []
        arriving = depart(loads, spec.axis_name, spec.size)
        shards, extras = _meeting(spec, operands, unpack(words, own) if move.came else own, shift)
        result = kernel.forward(
            *shards,
            diagonal=not move.came,
            scores=spec.scores,
            extras=extras,
            carry=result,
            out_dtype=wide if move.onward else last_dtype,
            config=spec.fwd_params,
        )
        if loads:
            arriving, result = lax.optimization_barrier((arriving, result))
        return *(land(arriving, loads) or [words]), shift + move.onward, result

    words = pack(own, word_type(operands.key.dtype, packed=spec.backend == "cpu")) if len(moves) > 1 else None
    _, _, result = _walk(spec, step, (words, jnp.int32(0), None), moves)
    if operands.softmax_aux is not None:
        result = join_sinks(result, operands.softmax_aux)
    return result.out.astype(final), result.lse


def backward(spec: RingSpec, operands: Operands, out, lse, dout, dlse=None) -> Operands:
    """The gradients of :func:`forward`'s operands, each in its operand's shape and dtype; None for integer operands.

    ``out``, ``lse``: what the forward gave. ``dout``, ``dlse`` (may be None): their cotangents. The gradient of an operand that
    ranks share (sinks, slopes) is this rank's part of the sum.
    """
    kernel = _kernel(spec)
    operands, to_given_shape = _in_full_shape(spec, clear_operands(operands))
    dout, dlse = clear_cotangents(operands, dout, dlse)
    residuals = make_residuals(out, lse, dout, dlse if spec.lse_gradient else None)
    own, word, moves = _travellers(operands), word_type(operands.key.dtype, packed=spec.backend == "cpu"), _moves(spec, operands)

    def step(state, move: _Move):
        words, shift, dkv, sums = state
        # In flight during this step: K/V on to the next one, and dK/dV of the step before, to be added to this one's.
        loads = [Load(words, move.onward)] if move.onward else []
        loads += [Load(pack(dkv, word), move.came)] if move.came else []
        arriving = depart(loads, spec.axis_name, spec.size)
        (q, k, v, q_runs, k_runs), extras = _meeting(spec, operands, unpack(words, own) if move.came else own, shift)
        grads = kernel.backward(
            q,
            k,
            v,
            residuals,
            q_runs,
            k_runs,
            diagonal=not move.came,
            scores=spec.scores,
            extras=extras,
            dq=sums.dq,
            fused=spec.fused_backward,
            config=spec.bwd_params,
        )
        if loads:
            arriving, grads = lax.optimization_barrier((arriving, grads))
        landed = land(arriving, loads)
        dkv = _add(unpack(landed[-1], dkv) if move.came else None, (grads.dk, grads.dv))
        return landed[0] if move.onward else words, shift + move.onward, dkv, _accumulate(sums, grads, k_runs)

    # The first rotation must not run beside the forward's, nor be shared with it, which would hold its result until now.
    words = after(pack(own, word), residuals.delta) if len(moves) > 1 else None
    _, _, dkv, sums = _walk(spec, step, (words, jnp.int32(0), None, _no_sums(operands, lse.dtype)), moves)
    dk, dv = _send_home(spec, dkv, word, sum(move.onward for move in moves))
    dsinks = None if operands.softmax_aux is None else sink_gradient(operands.softmax_aux, lse, residuals.delta)
    floats = to_given_shape(_Floats(dsinks, sums.dbias, sums.dalibi_slopes))
    query, key, value = (x.astype(operand.dtype) for x, operand in zip((sums.dq, dk, dv), operands[:3], strict=True))
    nothing = jax.tree.map(lambda _: None, operands)
    return nothing._replace(query=query, key=key, value=value, **floats._asdict())


def _kernel(spec: RingSpec) -> Kernel:
    assert spec.kernel is not None
    return spec.kernel


class _Floats(NamedTuple):
    """The small operands that have a gradient."""

    softmax_aux: Any
    bias: Any
    alibi_slopes: Any


def _in_full_shape(spec: RingSpec, operands: Operands):
    """The operands in the shapes that the ring works with (sinks ``[heads, n]``, bias and mask with 4 dimensions and all
    columns, the others with a batch dimension), and the function that brings gradients of those back to the shapes given."""
    reshape = partial(_floats_in_full_shape, spec, operands)
    given = _Floats(operands.softmax_aux, operands.bias, operands.alibi_slopes)
    names = ("q_segment_ids", "kv_segment_ids", "q_position_ids", "kv_position_ids")
    ids = {name: _map(_as_ids, getattr(operands, name)) for name in names}
    mask = _map(partial(_whole_columns, spec, operands), operands.mask)

    def to_given_shape(gradients: _Floats) -> _Floats:
        # Sums over what was broadcast, in the gradients' own dtype: they are rounded to the operand's once, afterwards.
        dtype = accumulation_dtype(operands.query.dtype)
        _, transpose = jax.vjp(reshape, jax.tree.map(lambda array: array.astype(dtype), given))
        (summed,) = transpose(gradients)
        return jax.tree.map(lambda gradient, array: gradient.astype(array.dtype), summed, given)

    return operands._replace(**reshape(given)._asdict(), **ids, mask=mask), to_given_shape


def _floats_in_full_shape(spec: RingSpec, operands: Operands, given: _Floats) -> _Floats:
    return _Floats(
        _map(lambda sinks: sinks_per_head(sinks, operands.query.shape[2]), given.softmax_aux),
        _map(partial(_whole_columns, spec, operands), given.bias),
        _map(jnp.atleast_2d, given.alibi_slopes),
    )


def _as_ids(x):
    """Signed, and wide enough for differences of positions: int32, or int64 as it came."""
    return jnp.atleast_2d(x if x.dtype.itemsize == 8 else x.astype(jnp.int32))


def _whole_columns(spec: RingSpec, operands: Operands, x):
    """``[batch|1, heads|1, rows|1, columns]``: the ring cuts columns, everything else may stay shared."""
    x = x.reshape((1,) * (4 - x.ndim) + x.shape)
    return jnp.broadcast_to(x, (*x.shape[:3], operands.key.shape[1] * spec.size))


def _map(function, value):
    return None if value is None else function(value)


class _Travellers(NamedTuple):
    """What moves with a shard of keys."""

    key: Any
    value: Any
    segment_ids: Any
    position_ids: Any


def _travellers(operands: Operands) -> _Travellers:
    return _Travellers(operands.key, operands.value, operands.kv_segment_ids, operands.kv_position_ids)


class _Move(NamedTuple):
    """What travels during one meeting of the rank's queries with a shard of keys.

    ``came``: how far K/V have travelled since the last meeting (0 at the first), which their gradients must follow now.
    ``onward``: how far it is to the next meeting (0 at the last).
    """

    came: int
    onward: int


def _moves(spec: RingSpec, operands: Operands) -> list[_Move]:
    if operands.q_position_ids is None:
        stops = shifts(spec.scores.mask, spec.layout, spec.size, operands.query.shape[1], operands.key.shape[1])
    else:
        stops = tuple(range(spec.size))  # positions are data: any shard may be seen
    hops = [after - before for before, after in pairwise(stops)]
    return [_Move(came, onward) for came, onward in zip([0, *hops], [*hops, 0], strict=True)]


def _walk(spec: RingSpec, step, state, moves: list[_Move]):
    """The state after all moves. Equal moves in a row (all but the first and the last, without gaps) are one loop: XLA cannot run
    its rotations ahead of its kernels, which would overlap nothing and hold every shard at once, and the program does not grow
    with the ring."""
    for move, equal in groupby(moves):
        state = _repeat(partial(step, move=move), state, len(list(equal)), unroll=1 if spec.backend == "cpu" else 2)
    return state


def _repeat(step, state, count: int, unroll: int):
    """``unroll``: two steps in a body use two buffers in turn; with one, what arrived is copied to where the next step finds it."""
    if count == 1:
        return step(state)
    return lax.scan(lambda state, _: (step(state), None), state, length=count, unroll=min(unroll, count))[0]


def _meeting(spec: RingSpec, operands: Operands, here: _Travellers, shift):
    """The kernel's positional arguments ``(q, k, v, q_runs, k_runs)`` and extras for K/V that have travelled ``shift``."""
    rank = _rank(spec, operands)
    q_runs = runs(spec.layout, rank, spec.size, operands.query.shape[1])
    k_runs = runs(spec.layout, (rank - shift) % spec.size, spec.size, here.key.shape[1])
    extras = Extras(
        bias=_map(lambda bias: take_columns(bias, k_runs), operands.bias),
        mask=_map(lambda mask: take_columns(mask, k_runs), operands.mask),
        q_segment_ids=operands.q_segment_ids,
        kv_segment_ids=here.segment_ids,
        q_position_ids=operands.q_position_ids,
        kv_position_ids=here.position_ids,
        alibi_slopes=operands.alibi_slopes,
        dropout_seed=operands.dropout_seed,
        origin=operands.origin,
        predicate_arrays=operands.predicate_arrays,
    )
    key, value = (clear_hidden(x, extras.mask) for x in (here.key, here.value))
    return (operands.query, key, value, q_runs, k_runs), extras


def _rank(spec: RingSpec, operands: Operands):
    if spec.size == 1:
        return 0
    return lax.axis_index(spec.axis_name) if operands.rank is None else operands.rank[0]


class _Sums(NamedTuple):
    """Gradients that stay with the rank."""

    dq: Any
    dbias: Any
    dalibi_slopes: Any


def _no_sums(operands: Operands, dtype) -> _Sums:
    """Nothing yet; each meeting writes its own columns of the bias' gradient."""
    if operands.bias is None:
        return _Sums(None, None, None)
    return _Sums(None, vary(jnp.zeros(operands.bias.shape, dtype), varying_axes(operands)), None)


def _accumulate(sums: _Sums, grads: Grads, k_runs: tuple[Run, ...]) -> _Sums:
    dbias = None if sums.dbias is None else put_columns(sums.dbias, grads.dbias, k_runs)
    return _Sums(grads.dq, dbias, _add(sums.dalibi_slopes, grads.dalibi_slopes))


def _add(total, share):
    return share if total is None else jax.tree.map(jnp.add, total, share)


def _send_home(spec: RingSpec, dkv, word, travelled: int):
    if not travelled:
        return dkv
    loads = [Load(pack(dkv, word), spec.size - travelled)]
    (words,) = land(depart(loads, spec.axis_name, spec.size), loads)
    return unpack(words, dkv)
