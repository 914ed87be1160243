"""The exchange: shards of the sequence with all heads for more of the sequence with some heads, and back.

Everything that a pass needs goes in one all-to-all, block ``i`` to rank ``i``: its heads of what has heads, all of what has none
(ids, a bias of one head). Sinks and slopes are not split over the sequence: a rank takes its heads of them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.kernels.contract import accumulation_dtype
from jax_core.operands import Operands
from jax_core.options import AxisName
from jax_core.strategies.contract import RingSpec
from jax_core.strategies.transfers.exchange import all_to_all, in_sequence_order, in_shards
from jax_core.strategies.transfers.transfer import Tree, tree_after, wire_dtype
from jax_core.strategies.ulysses.inside import kv_heads_sent, order

Results = tuple[Array, Array, Array, Array | None]  # out, lse, and their cotangents


class _Sent(NamedTuple):
    """Arrays ``[batch|1, length, heads|1, ...]``, or None. Ids have no heads; a mask is sent as words (``transfer.wire_dtype``)."""

    query: Array
    key: Array
    value: Array
    ids: dict[str, Array | None]
    rows: dict[str, Array]  # bias and mask, if their rows are split
    results: Results | None


class Exchange:
    """Over an axis ``name`` of ``size`` ranks, of which this is number ``place``."""

    def __init__(self, spec: RingSpec, operands: Operands, name: AxisName, size: int, place: int | Array) -> None:
        self.spec, self.name, self.size, self.place = spec, name, size, place
        self.heads = operands.query.shape[2]
        self.order = order(spec.problem.layout, alone=size == spec.problem.size)

    def operands(self, operands: Operands) -> Operands:
        """The inner strategy's operands."""
        return self._arrived(operands, self._gathered(self._sent(operands, None)))

    def operands_and_results(self, operands: Operands, results: Results, after: Array) -> tuple[Operands, Results]:
        """The same, with what the forward returned and its cotangents; not sent before ``after`` is computed."""
        arrived = self._gathered(tree_after(self.spec, self._sent(operands, _turned(results)), after))
        assert arrived.results is not None
        return self._arrived(operands, arrived), _turned(arrived.results)

    def results(self, out: Array, lse: Array) -> tuple[Array, Array]:
        """``out`` and ``lse`` of this rank's shard and all heads."""
        out, lse = self._scattered((out, _rows_first(lse)))
        return _merged_heads(out), _rows_first(_merged_heads(lse))

    def gradients(self, operands: Operands, grads: Operands) -> tuple[Array, Array, Array, Array | None]:
        """Those of query, key, value and bias, from the inner strategy's."""
        wide = accumulation_dtype(operands.query.dtype)
        bias, rows = grads.bias, self._has_rows(operands.bias, operands)
        send = {"query": grads.query, "key": grads.key, "value": grads.value}
        send |= {"bias": jnp.swapaxes(bias, 1, 2)} if bias is not None and rows else {}
        received = self._scattered(send)
        key, value = (
            _summed_copies(_merged_heads(received[name]), x) for name, x in (("key", operands.key), ("value", operands.value))
        )
        if bias is not None:
            bias = self._bias(operands, bias.astype(wide), received["bias"].astype(wide) if rows else None)
        return _merged_heads(received["query"]), key, value, bias

    def to_all_heads(self, operand: Array | None, gradient: Array | None, axis: int) -> Array | None:
        """A gradient of this rank's heads as one of all heads."""
        if operand is None or gradient is None or operand.shape[axis] != self.heads:
            return gradient
        zeros = jnp.zeros(operand.shape, gradient.dtype)
        return lax.dynamic_update_slice_in_dim(zeros, gradient, self._first_head(), axis)

    def _sent(self, operands: Operands, results: Results | None) -> _Sent:
        names = "q_segment_ids", "kv_segment_ids", "q_position_ids", "kv_position_ids"
        ids = {name: getattr(operands, name) for name in names}
        dtype, bias, mask = operands.query.dtype, operands.bias, operands.mask
        tables = {  # not narrower than the words of the query: on a CPU XLA rejects float64 in words of 16 bits
            "bias": None if bias is None else bias.astype(jnp.promote_types(bias.dtype, dtype)),
            "mask": None if mask is None else mask.astype(wire_dtype(dtype, packed=True)),
        }
        rows = {name: jnp.swapaxes(x, 1, 2) for name, x in tables.items() if x is not None and self._has_rows(x, operands)}
        key, value = (_copied(x, kv_heads_sent(x.shape[2], self.size)) for x in (operands.key, operands.value))
        return _Sent(operands.query, key, value, ids, rows, results)

    def _arrived(self, operands: Operands, arrived: _Sent) -> Operands:
        bias, mask = (self._table(name, getattr(operands, name), arrived) for name in ("bias", "mask"))
        wide = accumulation_dtype(operands.query.dtype)
        sinks, slopes = (
            None if x is None else self._local_heads(x, axis).astype(wide)
            for x, axis in ((operands.softmax_aux, 0), (operands.alibi_slopes, 1))
        )
        return operands._replace(
            query=arrived.query,
            key=arrived.key,
            value=arrived.value,
            softmax_aux=sinks,
            alibi_slopes=slopes,
            bias=bias,
            mask=None if mask is None else mask.astype(bool),
            origin=self._origin(operands),
            rank=self._rank_inside(operands),
        ).replaced(**arrived.ids)

    def _table(self, name: str, x: Array | None, arrived: _Sent) -> Array | None:
        """A bias or mask for this rank's heads and the inner shard's rows."""
        if name in arrived.rows:
            return jnp.swapaxes(arrived.rows[name], 1, 2)
        return None if x is None else self._local_heads(x, 1)

    def _bias(self, operands: Operands, gradient: Array, received: Array | None) -> Array | None:
        assert operands.bias is not None
        if received is None:
            return self.to_all_heads(operands.bias, gradient, 1)
        if operands.bias.shape[1] == self.heads:
            return jnp.swapaxes(_merged_heads(received), 1, 2)
        return jnp.swapaxes(received.sum(0), 1, 2)

    def _has_rows(self, x: Array | None, operands: Operands) -> bool:
        return x is not None and x.shape[2] == operands.query.shape[1]

    def _local_heads(self, x: Array, axis: int) -> Array:
        """This rank's heads."""
        if x.shape[axis] != self.heads:
            return x
        return lax.dynamic_slice_in_dim(x, self._first_head(), self.heads // self.size, axis)

    def _first_head(self) -> int | Array:
        return self.place * (self.heads // self.size)

    def _origin(self, operands: Operands) -> Array | None:
        scores = self.spec.problem.scores
        if operands.origin is None and not (scores.dropout_prob or scores.predicates):
            return None
        origin = jnp.zeros(2, jnp.int32) if operands.origin is None else operands.origin
        return origin.at[1].add(jnp.asarray(self._first_head(), jnp.int32))

    def _rank_inside(self, operands: Operands) -> Array | None:
        """The rank along the other axis, for those that cannot compute it."""
        if operands.rank is None or self.size == self.spec.problem.size:
            return None
        ring = self.spec.problem.size // self.size
        return operands.rank % ring if self.name == self.spec.axis_name[0] else operands.rank // self.size  # type: ignore[index]

    def _gathered(self, sent: _Sent) -> _Sent:
        blocks = jax.tree.map(self._split_heads, sent)
        return jax.tree.map(lambda x: in_sequence_order(x, self.order), all_to_all(self.spec, blocks, self.name))

    def _scattered(self, tree: Tree) -> Tree:
        """``[batch, rows of the inner shard, heads, ...]`` -> ``[ranks, batch, length, heads, ...]``, by whose heads they are."""
        blocks = jax.tree.map(lambda x: in_shards(x, self.order, self.size), tree)
        return all_to_all(self.spec, blocks, self.name)

    def _split_heads(self, x: Array) -> Array:
        """``[batch, length, heads, ...] -> [ranks, batch, length, heads of the rank, ...]``; what has no heads goes to all."""
        if x.ndim < 3 or x.shape[2] == 1:
            return jnp.broadcast_to(x, (self.size, *x.shape))
        return jnp.moveaxis(x.reshape(*x.shape[:2], self.size, -1, *x.shape[3:]), 2, 0)


def _rows_first(x: Array) -> Array:
    """``[batch, heads, length] <-> [batch, length, heads]``"""
    return jnp.swapaxes(x, 1, 2)


def _turned(results: Results) -> Results:
    """With the rows of the LSE and its cotangent first, as they travel; or back."""
    out, lse, dout, dlse = results
    return out, _rows_first(lse), dout, None if dlse is None else _rows_first(dlse)


def _merged_heads(x: Array) -> Array:
    """``[ranks, batch, length, heads, ...] -> [batch, length, ranks * heads, ...]``"""
    return jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, *x.shape[4:])


def _copied(x: Array, heads: int) -> Array:
    return x if x.shape[2] == heads else jnp.repeat(x, heads // x.shape[2], axis=2)


def _summed_copies(gradient: Array, operand: Array) -> Array:
    batch, length, heads, dim = operand.shape
    if gradient.shape[2] == heads:
        return gradient
    copies = gradient.reshape(batch, length, heads, -1, dim).astype(accumulation_dtype(gradient.dtype))
    return copies.sum(3).astype(operand.dtype)
