"""Ring attention in equinox's ``MultiheadAttention``, which takes no attention function: the layer is replaced."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, TypeVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from jax_core.integrations.settings import Dropout, RingSettings, WithBias

Model = TypeVar("Model")


class RingMultiheadAttention(eqx.nn.MultiheadAttention):
    """``equinox.nn.MultiheadAttention`` whose attention is :func:`jax_core.ring_attention`; made by :func:`replace_attention`.

    It is called as equinox's, on ``[seq, features]`` without a batch (``jax.vmap`` adds one), with its parameters under the same
    names. Inside ``shard_map`` the sequences are shards. Two things differ: a query that sees no key gets 0 (equinox: the mean of
    all values), and dropout drops other weights, in a pattern that follows from the key, the head and the places in the sequence
    and is the same for any ring and layout; inside ``shard_map`` the key must be the same on all devices of a ring.
    """

    settings: RingSettings = eqx.field(static=True)

    def __init__(self, attention: eqx.nn.MultiheadAttention, settings: RingSettings) -> None:
        for field in fields(eqx.nn.MultiheadAttention):
            setattr(self, field.name, getattr(attention, field.name))
        self.settings = settings

    def __call__(
        self,
        query: Array,
        key_: Array,
        value: Array,
        mask: Array | None = None,
        *,
        key: Array | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., Iterable[Array]] | None = None,
        **arrays: Unpack[WithBias],
    ) -> Array:
        """The arguments of ``equinox.nn.MultiheadAttention``.

        ``mask``: bool ``[q_seq, keys of the whole sequence]`` or ``[heads, ...]``, rows in the layout's order. ``arrays``:
        ``q_segment_ids``, ``kv_segment_ids``, ``q_position_ids``, ``kv_position_ids`` (``[seq]``), ``bias``, ``softmax_aux`` and
        ``alibi_slopes`` of :func:`jax_core.ring_attention`.

        Raises ValueError for shapes that do not fit, and for dropout without a ``key``.
        """
        if deterministic is not None:
            inference = deterministic
            warnings.warn("deterministic= is deprecated in equinox.nn.MultiheadAttention; say inference=", stacklevel=2)
        if key_.shape[0] != value.shape[0]:
            raise ValueError(f"key and value must be sequences of one length, got {key_.shape[0]} and {value.shape[0]}")
        heads = [
            self._project(layer, x) for layer, x in ((self.query_proj, query), (self.key_proj, key_), (self.value_proj, value))
        ]
        heads = heads if process_heads is None else _processed(heads, process_heads)
        dropout = _dropout(self.dropout.p, self.dropout.inference if inference is None else inference, key)
        out = self.settings.attend(*(x[None] for x in heads), mask=mask, **dropout, **arrays)
        return jax.vmap(self.output_proj)(out[0].reshape(query.shape[0], -1))


def replace_attention(model: Model, **settings: Any) -> Model:
    """The model with every ``equinox.nn.MultiheadAttention`` in it, itself included, as a :class:`RingMultiheadAttention`.

    ``settings`` are the arguments of :func:`jax_core.ring_attention` that are no arrays: ``axis_name`` for layers inside
    ``shard_map``, ``mesh`` and ``axis_name`` for layers under ``equinox.filter_jit`` on sharded arrays, ``causal``,
    ``sliding_window``, ``layout`` and so on. All parameters stay the same arrays. A layer replaced before
    gets the new settings.

    Raises ValueError where there is nothing to replace.
    """
    chosen, replaced = RingSettings(**settings), []

    def replace(node: object) -> object:
        if not isinstance(node, eqx.nn.MultiheadAttention):
            return node
        replaced.append(node)
        return RingMultiheadAttention(node, chosen)

    new = jax.tree.map(replace, model, is_leaf=lambda node: isinstance(node, eqx.nn.MultiheadAttention))
    if not replaced:
        raise ValueError(f"{type(model).__name__} has no equinox.nn.MultiheadAttention; call jax_core.ring_attention in its layers")
    return new


def _processed(heads: list[Array], process_heads: Callable[..., Iterable[Array]]) -> list[Array]:
    processed = list(process_heads(*heads))
    if [x.shape for x in processed] != [x.shape for x in heads]:
        raise ValueError(f"process_heads must keep the shapes {[x.shape for x in heads]}, got {[x.shape for x in processed]}")
    return processed


def _dropout(prob: float, inference: bool, key: Array | None) -> Dropout:
    if isinstance(prob, Array) or isinstance(inference, Array):
        raise ValueError(
            "dropout's p and inference must be Python numbers, which are compiled in; equinox.filter_jit and filter_grad leave "
            "them so, where jax.jit makes arrays of them"
        )
    if inference or not prob:
        return {}
    if key is None:
        raise ValueError(f"dropout with p={prob} needs key=, or inference=True")
    return {"dropout_prob": prob, "dropout_seed": jax.random.bits(key, (2,), jnp.uint32)}
