"""What a KVCache objects to, in words."""

from typing import Any

import torch
from torch import Tensor

from ring_attn.generation.layer import CacheSlots, Layer


def check_prompt(input_ids: Tensor, lengths: Tensor | None, segment_ids: Tensor | None, max_length: int) -> None:
    if input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ValueError(f"prompts must be integers [batch, seq], got {input_ids.dtype} {list(input_ids.shape)}")
    if segment_ids is not None and segment_ids.shape != input_ids.shape:
        raise ValueError(f"segment_ids must be {list(input_ids.shape)}, as the prompts; got {list(segment_ids.shape)}")
    if lengths is not None and (lengths.shape != input_ids.shape[:1] or not 0 <= int(lengths.min()) <= int(lengths.max())):
        raise ValueError(f"lengths must be {list(input_ids.shape[:1])} and not negative, got {lengths.tolist()}")
    if lengths is not None and int(lengths.max()) > input_ids.shape[1]:
        raise ValueError(f"no prompt is longer than the {input_ids.shape[1]} tokens that came; got lengths {lengths.tolist()}")
    if input_ids.shape[1] > max_length:
        raise ValueError(f"the prompts have {input_ids.shape[1]} tokens, more than the cache's max_length={max_length}")


def check_operands(*operands: Tensor | None) -> None:
    """``q, k, v``, or any of them; k and v come both or neither."""
    present = [x for x in operands if x is not None]
    if len(present) == 2 and len(operands) == 3:
        raise ValueError("k and v come both, as those of new tokens, or neither, for cross attention; got one of them")
    if any(x.dim() != 4 for x in present):
        raise ValueError(f"q, k and v must be [batch, tokens, heads, dim], got {', '.join(str(list(x.shape)) for x in present)}")
    if torch.is_grad_enabled() and any(x.requires_grad for x in present):
        raise ValueError("a KVCache keeps no gradients: run the model within torch.no_grad()")


def check_appended(number: int, layer: Layer, new: CacheSlots, longest: int, max_length: int) -> None:
    if layer.written:
        raise ValueError(f"the keys of layer {number} were written once, for cross attention: call attend without k and v")
    now, old = ([(x.shape[0], *x.shape[2:], x.dtype, x.device) for x in tensors[:2]] for tensors in (new, layer.contents))
    if now != old:
        raise ValueError(
            f"layer {number} holds keys and values of (batch, heads, dim, dtype, device) {old}, but new ones of {now} came"
        )
    if len(counts := {x.shape[1] for x in new}) > 1:
        raise ValueError(f"q, k and v are of the same new tokens; of {sorted(counts)} tokens came")
    check_room(layer.appended, new.slots, longest, max_length)
    _check_at_once(number, layer, new.slots)


def check_new_tokens(layers: dict[int, Layer], appended: int, new: int, longest: int, max_length: int) -> None:
    """What each layer would object to, before any has appended."""
    check_room(appended, new, longest, max_length)
    for number, layer in layers.items():
        _check_at_once(number, layer, new)


def _check_at_once(number: int, layer: Layer, new: int) -> None:
    if layer.reach is not None and new > layer.at_once:
        raise ValueError(
            f"layer {number} has a window and takes at most {layer.at_once} new tokens in one call, got {new}: make the cache with "
            "a larger at_once"
        )


def check_room(appended: int, new: int, longest: int, max_length: int) -> None:
    if longest + appended + new > max_length:
        raise ValueError(
            f"the cache has room for {max_length} tokens of an entry; after a prompt of {longest} and {appended} new tokens "
            f"{new} more came: make it with a larger max_length, or call cache.grow"
        )


def reach_of(options: dict[str, Any], max_length: int) -> int | None:
    """How far back a query looks; None: to the beginning. Within a chunk it is less than the chunk's length."""
    window, chunk = options.get("sliding_window"), options.get("chunk_size")
    left = window[0] if isinstance(window, (tuple, list)) else window
    sides = [*([] if left is None or left < 0 else [left]), *([] if chunk is None else [chunk - 1])]
    return min((side for side in sides if side < max_length), default=None)


def check_cropped(layers: dict[int, Layer], appended: int, left: int) -> None:
    if not 0 <= left <= appended:
        raise ValueError(f"crop must leave between 0 and the {appended} tokens that were appended to the prompt, got {left}")
    for number, layer in layers.items():
        gone = max(layer.furthest, layer.appended) - left
        if layer.reach is not None and gone > layer.at_once:
            raise ValueError(
                f"layer {number} has a window and has kept what {layer.at_once} tokens back see, and {gone} are to be taken back: "
                "make the cache with a larger at_once"
            )
