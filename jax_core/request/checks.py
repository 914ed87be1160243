"""Are the operands' shapes and dtypes consistent? Only ``shape`` and ``dtype`` are read, so torch tensors can be checked too."""

from typing import Protocol

from jax_core.masks.layout import Layout, check_shard_length
from jax_core.operands import Operands, Shaped, is_placed

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTS = ("int8", "int16", "int32", "int64", "uint8", "uint16")  # not uint32: it does not fit into int32


class _Typed(Shaped, Protocol):
    """An array of any library, of a dtype of its own."""

    @property
    def dtype(self) -> object: ...


def check_operands(operands: Operands, layout: Layout, size: int) -> None:
    """Raises ValueError for the first inconsistency; ``operands`` are shards of a ring of ``size``."""
    _check_qkv(operands)
    check_shard_length(layout, operands.query.shape[1], "query shard", size)
    check_shard_length(layout, operands.key.shape[1], "key shard", size)
    _check_others(operands, size, "query shard")


def check_whole(operands: Operands) -> None:
    """The same for whole arrays, in any layout."""
    _check_qkv(operands)
    _check_others(operands, 1, "queries")


def _check_others(operands: Operands, size: int, rows: str) -> None:
    batch, q_length, heads, _ = operands.query.shape
    k_length = operands.key.shape[1]
    whole = (batch, heads, q_length, k_length * size)
    _check_broadcast("bias", operands.bias, whole, _FLOATS, rows)
    _check_broadcast("mask", operands.mask, whole, ("bool",), rows)
    for side, length in (("q", q_length), ("kv", k_length)):
        for kind in ("segment", "position"):
            name = f"{side}_{kind}_ids"
            _check_shape(name, getattr(operands, name), [(length,), (1, length), (batch, length)], _INTS)
    _check_documents(operands, size)
    _check_shape("alibi_slopes", operands.alibi_slopes, [(heads,), (1, heads), (batch, heads)], _FLOATS)
    _check_sinks(operands.softmax_aux, heads)
    _refuse_bias_as_sinks(operands.softmax_aux, whole)


def _check_documents(operands: Operands, size: int) -> None:
    documents, (batch, length, *_) = operands.documents, operands.query.shape
    if documents is None:
        return
    _check_dtype("documents", documents, ("int32",))
    shape = tuple(documents.shape)
    if is_placed(operands.documents):
        if shape[0] != size or not shape[1] or shape[2] != 3 or operands.q_position_ids is not None:
            raise ValueError(
                f"documents of a placement must be [{size}, pieces, 3], in place of position ids; got shape {shape} and "
                f"{'no' if operands.q_position_ids is None else 'also'} position ids"
            )
    elif len(shape) != 2 or shape[0] not in (1, batch) or shape[1] < 2:
        raise ValueError(f"documents must be [1 or {batch}, documents + 1], got shape {shape}")
    if operands.q_segment_ids is not None or operands.key.shape[1] != length:
        raise ValueError(
            "documents must be of queries and keys of one length, and stand in place of segment ids; got lengths "
            f"{length} and {operands.key.shape[1]} and {'no' if operands.q_segment_ids is None else 'also'} segment ids"
        )


def _check_qkv(operands: Operands) -> None:
    query, key, value = operands[:3]
    for name, x in (("query", query), ("key", key), ("value", value)):
        if len(x.shape) != 4:
            raise ValueError(f"{name} must be [batch, seq, heads, dim], 4 dimensions; got shape {tuple(x.shape)}")
        if 0 in x.shape[2:]:
            raise ValueError(f"{name} must have heads and a head dim (batch and sequence may be empty), got shape {tuple(x.shape)}")
        _check_dtype(name, x, _FLOATS)
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not _dtype(query) == _dtype(key) == _dtype(value):
        raise ValueError(f"query, key and value must share a dtype, got {_dtype(query)}, {_dtype(key)}, {_dtype(value)}; cast them")
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(f"query, key and value must share the batch size; got {shapes}")
    if key.shape[1:3] != value.shape[1:3]:
        raise ValueError(f"key and value must share length and heads; got {shapes}")
    if query.shape[3] != key.shape[3]:
        raise ValueError(f"query and key must share the head dim; got {shapes}")
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"query heads must be a multiple of key/value heads; got {shapes}")


def _check_sinks(sinks: _Typed | None, heads: int) -> None:
    if sinks is None:
        return
    _check_dtype("softmax_aux", sinks, _FLOATS)
    shape = tuple(sinks.shape)
    if 0 in shape or not (len(shape) == 1 or (len(shape) == 2 and shape[0] == heads)):
        raise ValueError(f"softmax_aux must be [sinks], [heads] or [heads, sinks] with {heads} heads; got shape {shape}")


def _refuse_bias_as_sinks(sinks: _Typed | None, whole: tuple[int, ...]) -> None:
    """``jax.nn.dot_product_attention`` has the bias where ``jax_core.ring_attention`` has sinks: a bias ``[queries, keys]`` with as
    many queries as heads would pass for sinks ``[heads, sinks]``."""
    _, heads, queries, keys = whole
    if sinks is not None and heads == queries and tuple(sinks.shape) == (queries, keys) and keys > 1:
        raise ValueError(
            f"softmax_aux is sinks [heads, sinks]; its shape {tuple(sinks.shape)} is also that of a bias [queries, keys]. Give a "
            "bias as bias=, and sinks in another number of columns"
        )


def _check_broadcast(name: str, x: _Typed | None, whole: tuple[int, ...], dtypes: tuple[str, ...], rows: str) -> None:
    if x is None:
        return
    _check_dtype(name, x, dtypes)
    shape = tuple(x.shape)
    if not 1 <= len(shape) <= 4 or any(have not in (1, want) for have, want in zip(shape[::-1], whole[::-1], strict=False)):
        raise ValueError(
            f"{name} must broadcast to [batch, heads, {rows}, keys of the whole sequence] = {list(whole)}; got shape {shape}"
        )


def _check_shape(name: str, x: _Typed | None, allowed: list[tuple[int, ...]], dtypes: tuple[str, ...]) -> None:
    if x is None:
        return
    _check_dtype(name, x, dtypes)
    if tuple(x.shape) not in allowed:
        raise ValueError(f"{name} must have shape {' or '.join(str(list(shape)) for shape in allowed)}; got {list(x.shape)}")


def _check_dtype(name: str, x: _Typed, dtypes: tuple[str, ...]) -> None:
    if _dtype(x) not in dtypes:
        raise ValueError(f"{name} must be of dtype {', '.join(dtypes)}; got {_dtype(x)}")


def _dtype(x: _Typed) -> str:
    return str(x.dtype).removeprefix("torch.")
