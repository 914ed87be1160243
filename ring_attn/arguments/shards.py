"""What an attention call got, compared with what this library sharded."""

from typing import Any

from torch import Tensor

from ring_attn.arguments.documents import Packing
from ring_attn.sharding.marks import refuse_other_layout, shard_of
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.job.mesh import MeshDim, MeshLike

_DIMS = {"bshd": 1, "bhsd": 2, "sbhd": 0, "thd": 0}  # of the sequence
_MOST_CALLS = 64
# By layout and shard length: the attention calls since the last loss. The layout is None where any would do.
_calls: set[tuple[str | None, int]] = set()


def check_shards(
    where: tuple[MeshLike, MeshDim],
    names: dict[str, str],
    qkv: dict[str, Tensor],
    others: dict[str, Tensor | None],
    qkv_format: str,
    packing: Packing | None,
    options: dict[str, Any],
) -> None:
    """ValueError where queries, keys or values are shards of the call's ring along another dimension, or in another layout that
    matters: what was computed from shards, or copied, is not known to be one."""
    query = qkv["query"]
    if not isinstance(query, Tensor):
        return
    dim = _DIMS.get(qkv_format, 1)
    layout = options["layout"] if _places_matter(others, packing, options) else None
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls.add((layout if type(layout) is str else None, query.shape[dim] if dim < query.ndim else 0))
    for name, x in qkv.items():
        if shard_of(x) is not None:
            refuse_other_layout(x, names.get(name, name), backend_of(x.device).resolve(*where), dim, layout)


def layouts_called(length: int) -> set[str | None]:
    """The layouts of the attention calls on shards of this length since this was asked last; None for a call without one."""
    found = {layout for layout, called in _calls if called == length}
    _calls.clear()
    return found


def _places_matter(others: dict[str, Tensor | None], packing: Packing | None, options: dict[str, Any]) -> bool:
    """Whether the call goes by the positions that the layout says."""
    given = others.get
    if given("bias") is not None or given("mask") is not None or options["mask_builder"] is not None or packing is not None:
        return True
    if given("q_position_ids") is not None:
        return False
    static = options["causal"] or options["sliding_window"] is not None or options["chunk_size"] is not None
    return bool(static or options["mask_mod"] is not None or given("alibi_slopes") is not None)
