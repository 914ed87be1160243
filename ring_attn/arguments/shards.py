"""What a call of attention, or of a layer with a state, got, compared with what this library sharded."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from jax_core.masks.layout import Layout
from jax_core.operands import Operands
from jax_core.options import Options
from ring_attn.arguments.documents import Packing
from ring_attn.sharding.marks import refuse_other_layout, shard_of
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.mesh.rings import MeshArg

_DIMS = {"bshd": 1, "bhsd": 2, "sbhd": 0, "thd": 0}  # of the sequence
_MOST_CALLS = 64


class Called(NamedTuple):
    """A call of ``kind``: attention, or a layer with a state. ``layout``: None where any would do. ``length``: of its shards, in an
    attention of the queries. ``masked``: whether something says which tokens one sees besides the static masks, as documents need
    it."""

    kind: str
    layout: str | None
    length: int
    masked: bool


_calls: set[Called] = set()  # since the last loss


def check_shards(
    where: MeshArg,
    names: Mapping[str, str],
    operands: Operands[Tensor],
    qkv_format: str,
    packing: Packing | None,
    options: Options,
) -> None:
    """ValueError where queries, keys or values are shards of the call's ring along another dimension, or in another layout that
    matters: what was computed from shards, or copied, is not known to be one."""
    query = operands.query
    if not isinstance(query, Tensor):
        return
    dim = _DIMS.get(qkv_format, 1)
    layout = options.layout if _places_matter(operands, packing, options) else None
    masked = _by_place(operands, packing, options) or operands.q_segment_ids is not None or options.mask_mod is not None
    _note("attention", layout, query, dim, masked)
    for name, x in zip(Operands._fields, operands.qkv, strict=False):
        _check_shard(where, names.get(name, name), x, dim, layout)


def check_shards_of_layer(where: MeshArg, layout: Layout, operands: Mapping[str, Tensor | None], masked: bool) -> None:
    """The same for the ``operands [batch, seq, ...]`` of a layer with a state, by the caller's names: those that have tokens, and
    the ids. Its state goes from each token to the next, so every layout matters."""
    present = {name: x for name, x in operands.items() if x is not None}
    for x in list(present.values())[:1]:
        _note("layer with a state", layout, x, 1, masked)
    for name, x in present.items():
        _check_shard(where, name, x, 1, layout)


def _note(kind: str, layout: Layout | None, x: Tensor, dim: int, masked: bool) -> None:
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls.add(Called(kind, layout if type(layout) is str else None, x.shape[dim] if dim < x.ndim else 0, masked))


def _check_shard(where: MeshArg, name: str, x: Tensor, dim: int, layout: Layout | None) -> None:
    if shard_of(x) is not None:
        refuse_other_layout(x, name, backend_of(x.device).resolve(*where), dim, layout)


def called_since(length: int) -> set[Called]:
    """The calls on shards of this length since this was asked last."""
    recent = {called for called in _calls if called.length == length}
    _calls.clear()
    return recent


def _by_place(operands: Operands[Tensor], packing: Packing | None, options: Options) -> bool:
    """Whether something says of each place of the sequence what it sees."""
    arrays = operands.bias is not None or operands.mask is not None
    return arrays or options.mask_builder is not None or packing is not None


def _places_matter(operands: Operands[Tensor], packing: Packing | None, options: Options) -> bool:
    """Whether the call goes by the positions that the layout says."""
    if _by_place(operands, packing, options):
        return True
    if operands.q_position_ids is not None:
        return False
    static = options.causal or options.sliding_window is not None or options.chunk_size is not None
    return bool(static or options.mask_mod is not None or operands.alibi_slopes is not None)
