"""What ``pad`` padded, for the attention calls that would see it."""

import torch
from torch import Tensor

from jax_core.operands import Operands
from jax_core.options import Options
from torch_bridge.call.sanity_checks import warn_once

# By the length of a shard: the last sequence of such shards that was padded, its length before and after.
_padded: dict[int, tuple[int, int]] = {}


def note_padding(padded: Tensor, dim: int, length: int, ring_size: int) -> None:
    """Remember that ``padded`` had ``length`` positions along ``dim``; one that fitted is remembered as none."""
    if torch.compiler.is_compiling():
        return
    whole = padded.shape[dim]
    if whole == length:
        _padded.pop(whole // ring_size, None)
        return
    _padded[whole // ring_size] = length, whole
    padded.ring_attn_padded = dim, length  # type: ignore[attr-defined]


def forget_padding(shard_length: int) -> None:
    """For who hides the padding of such shards in every call."""
    _padded.pop(shard_length, None)


def carry_padding(padded: Tensor, shard: Tensor, dim: int) -> None:
    """A shard of a padded tensor carries how long it was, too. What is computed of it does not."""
    if getattr(padded, "ring_attn_padded", (None,))[0] == dim:
        shard.ring_attn_padded = padded.ring_attn_padded  # type: ignore[attr-defined]


def check_padding(operands: Operands[Tensor], qkv_format: str, options: Options) -> None:
    """ValueError where keys or values are padded, and nothing hides that from the queries; a doubt where a sequence of their length
    was padded. A causal mask hides it, segment ids do, and what else could is taken at its word."""
    if torch.compiler.is_compiling() or _hidden(operands, options):
        return
    dim = max(qkv_format.find("s"), 0)
    if not all(isinstance(x, Tensor) for x in operands.qkv):
        return  # which is told by what checks them
    for name, x in (("key", operands.key), ("value", operands.value)):
        at, length = getattr(x, "ring_attn_padded", (None, 0))
        if at == dim:
            raise ValueError(f"the {name} was padded from {length} positions, which {_SEEN}")
    if operands.key.ndim > dim and (lengths := _padded.get(operands.key.shape[dim])):
        warn_once(f"a sequence of {lengths[0]} positions was padded to {lengths[1]}; if these are its keys, the padding {_SEEN}")


_SEEN = (
    "all queries see here: give q_segment_ids and kv_segment_ids that are -1 on padding (shard_batch returns them), a key padding "
    "mask, or lengths that need no padding"
)


def _hidden(operands: Operands[Tensor], options: Options) -> bool:
    window = options.sliding_window
    ahead = isinstance(window, (tuple, list)) and len(window) == 2 and window[1] == 0
    arrays = operands.q_segment_ids, operands.kv_segment_ids, operands.mask, operands.bias
    functions = options.chunk_size, options.mask_mod, options.mask_builder
    return bool(options.causal) or ahead or any(x is not None for x in (*arrays, *functions))
