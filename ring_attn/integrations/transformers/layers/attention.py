"""What transformers calls by the name "ring_attn": a mask function, and an attention function that takes what it returned.

Which batch a mask is made for is a context variable that the model's pre-forward hook sets: keyword arguments do not reach every
mask. The mask then carries all that attention needs, so it is right where a layer is run again, in the backward of a checkpoint.
"""

from collections.abc import Mapping
from typing import Any, NoReturn, TypedDict, Unpack

import torch
from torch import Tensor, nn

from jax_core.options import MaskMod
from ring_attn.functional import AttentionOptions
from ring_attn.integrations.transformers.calls import CALL, Call
from ring_attn.integrations.transformers.generation.cache import RingCache
from ring_attn.integrations.transformers.layers.masks import Predicate, Rule, translate
from ring_attn.integrations.transformers.layers.padding import mean_of_values
from ring_attn.integrations.transformers.layers.positions import at_global_positions, bias_of_all_keys
from ring_attn.integrations.transformers.sequence import Sequence
from ring_attn.integrations.transformers.versions import (
    AttentionInterface,
    AttentionMaskInterface,
    attention_function_of,
    mask_function_of,
)

NAME = "ring_attn"
# Arguments of attention functions that say nothing the mask does not say, or nothing about attention.
_NEEDLESS = (
    "is_causal",
    "sliding_window",
    "position_ids",
    "position_embeddings",
    "cache_position",
    "token_type_ids",
    "mm_token_type_ids",
    "num_items_in_batch",
)
_INSTEAD = {
    "output_attentions": "no rank ever has the attention weights; leave it out",
    "head_mask": "a mask of heads multiplies the weights, which no rank has; prune the heads instead",
    "layer_head_mask": "a mask of heads multiplies the weights, which no rank has; prune the heads instead",
}


class MaskArguments(TypedDict, total=False):
    """What transformers calls its mask functions with, as far as it is read here."""

    batch_size: int
    q_length: int | None
    kv_length: int
    q_offset: int
    kv_offset: int
    cache_position: Tensor
    mask_function: Predicate
    attention_mask: object


class _Prepared:
    """A mask that is made already. Models of images and text give theirs to the text model, which gives it to the mask functions
    again; these ask for its shape."""

    ndim = 4

    def __init__(self, arguments: MaskArguments) -> None:
        self.shape = (arguments.get("batch_size"), 1, arguments.get("q_length"), arguments["kv_length"])


class WholeMask(_Prepared):
    """A mask of whole sequences, as the model's own attention implementation makes it."""

    def __init__(self, arguments: MaskArguments, implementation: str, mask: object) -> None:
        super().__init__(arguments)
        self.implementation, self.mask = implementation, mask


class RingMask(_Prepared):
    """A mask of sharded sequences: the options of ``ring_attention``. No dataclass: FSDP takes those apart.

    ``averaging``: bool ``[batch, local]``, queries that see nothing and get the mean of all values, or None.
    """

    def __init__(
        self, arguments: MaskArguments, call: Call, keys: Sequence, options: AttentionOptions, averaging: Tensor | None
    ) -> None:
        super().__init__(arguments)
        self.call, self.ring, self.keys, self.options, self.averaging = call, keys.ring, keys, options, averaging

    def __getitem__(self, index: object) -> "RingMask":
        if all(part == slice(None) or part == slice(0, None) for part in (index if isinstance(index, tuple) else (index,))):
            return self  # Gemma 4's layers with shared keys cut to the logits to keep, which are all
        raise NotImplementedError("this layer cuts its mask into parts, which a mask over a ring does not allow")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy and pickle ask for these
            raise AttributeError(name)
        raise NotImplementedError(f"this layer reads {name} of its mask, as of a tensor, and a mask over a ring is none")


class CacheMask(_Prepared):
    """A mask of new tokens, which see what a cache over the ring holds, within the window or chunk of ``options``."""

    def __init__(self, arguments: MaskArguments, cache: RingCache, options: AttentionOptions) -> None:
        super().__init__(arguments)
        self.cache, self.options = cache, options


def register() -> None:
    """Makes the name known to transformers. Harmless if it is."""
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_of_call)


def mask_of_call(**arguments: Unpack[MaskArguments]) -> object:
    """The mask function that transformers calls, with the arguments of ``sdpa_mask``; lengths are those of this rank's tensors."""
    call, prepared = _call_of("a mask"), arguments.get("attention_mask")
    if isinstance(prepared, _Prepared):
        return prepared
    if call.cache is not None and call.sharded is None:
        rule = translate(arguments["mask_function"])
        if not rule.causal or rule.predicates:
            raise NotImplementedError(
                "a cache over a ring keeps causal attention, and no mask functions of a model's own; leave it out"
            )
        return CacheMask(arguments, call.cache, _window_of(rule))
    if call.sharded is None:
        return WholeMask(arguments, call.previous, _previous_mask(call, arguments))
    rule = translate(arguments["mask_function"])
    if call.whole_encoder and not rule.causal:
        return _previous_mask(call, arguments)  # of layers that attend to all of the encoder's output, and keep their attention
    return _ring_mask(call, rule, arguments)


def _previous_mask(call: Call, arguments: MaskArguments) -> object:
    make = mask_function_of(call.previous)
    return None if make is None else make(**arguments)


def _call_of(asked: str) -> Call:
    """The forward under way. Whole inputs on a ring of several ranks are refused here, which all attention comes by."""
    call = CALL.get()
    if call is None:
        raise RuntimeError(
            f"{asked} of a context-parallel model is asked for outside its forward: call the model that context_parallel was "
            "given, or its base model (model.base_model), not another part of it"
        )
    check_sharded(call)
    return call


def check_sharded(call: Call) -> None:
    """ValueError for whole inputs on a ring of several ranks."""
    if call.sharded is None and not call.decoding and call.ring.size > 1:
        raise ValueError(
            f"the batch was not sharded over the ring of {call.ring.size} ranks: call batch = cp.shard(batch), then "
            "model(**batch); or cp(**batch). To generate, use model.generate with the whole prompt"
        )


def _ring_mask(call: Call, rule: Rule, arguments: MaskArguments) -> RingMask:
    assert call.sharded is not None
    own = call.sharded.sequences[call.part]
    cross = call.part == "decoder" and "encoder" in call.sharded.sequences and not rule.causal
    keys = call.sharded.sequences["encoder"] if cross else own
    _check_lengths(arguments, own, keys)
    averaging = None
    if own.unfounded is not None and call.previous == "eager" and rule.causal:
        averaging = own.ring.shard(own.unfounded)
    return RingMask(arguments, call, keys, _options(rule, own, keys), averaging)


def _check_lengths(arguments: MaskArguments, queries: Sequence, keys: Sequence) -> None:
    length = arguments.get("q_length")
    length = arguments["cache_position"].shape[0] if length is None else length
    offsets = arguments.get("q_offset", 0), arguments.get("kv_offset", 0)
    if (length, arguments["kv_length"]) != (queries.local, keys.local) or any(offsets):
        raise NotImplementedError(
            f"the model makes a mask of {length} queries at {offsets[0]} and {arguments['kv_length']} keys at {offsets[1]}, but "
            f"this rank has {queries.local} and {keys.local} at 0: a K/V cache, or a part of the sequence, cannot be sharded"
        )


def _options(rule: Rule, queries: Sequence, keys: Sequence) -> AttentionOptions:
    if rule.predicates and queries.offsets is not None:
        raise NotImplementedError(
            f"the mask function {rule.predicates[0].__qualname__} goes by places in the whole sequence, and placed documents have "
            "others; give place_documents=False"
        )
    if rule.predicates and queries.positions is not None:
        raise NotImplementedError(
            "documents that restart position_ids cannot be combined with the mask function "
            f"{rule.predicates[0].__qualname__}, which transformers would count from each document's start"
        )
    options: AttentionOptions = {"causal": rule.causal, **_window_of(rule)}
    positions = queries.offsets if rule.chunk is None else _chunked_by(queries, rule.counts_from_first)
    options |= {"q_position_ids": positions, "kv_position_ids": positions}
    if rule.predicates:
        options["mask_mod"] = _mask_mod(rule, queries, keys)
    options["q_segment_ids"], options["kv_segment_ids"] = queries.segments_with(keys, rule.causal)
    return options


def _window_of(rule: Rule) -> AttentionOptions:
    options: AttentionOptions = {}
    if rule.left is not None or rule.right is not None:
        options["sliding_window"] = (rule.left, None if rule.causal else rule.right)
    if rule.chunk is not None:
        options["chunk_size"] = rule.chunk
    return options


def _chunked_by(queries: Sequence, from_first: bool) -> Tensor | None:
    """Position ids that chunks go by: places in the whole sequence, unless transformers counts within documents, or from each
    entry's first token that is not padding. None: as the layout has it."""
    left = queries.left if from_first else None
    if queries.positions is not None:
        if left is not None:
            raise NotImplementedError(
                "documents that restart position_ids cannot be combined with chunks with padding on the left: pad on the right"
            )
        return queries.positions
    if queries.offsets is None and left is None:
        return None
    places = queries.ring.positions(queries.padded, device=queries.device)[None]
    return places if left is None else (places - left[:, None]).clamp_min(0)


def _mask_mod(rule: Rule, queries: Sequence, keys: Sequence) -> MaskMod:
    # Imported here so that JAX is loaded by the first mask that needs it.
    from torch_bridge.attention.torch_predicate import Lengths, traced

    return traced(rule.all_predicates(), Lengths(queries.batch, queries.length, keys.length))


def attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers calls: query, key and value ``[batch, heads, seq, dim]``, the output
    ``[batch, seq, heads, dim]``, and None for the weights."""
    if isinstance(attention_mask, WholeMask):
        function = attention_function_of(attention_mask.implementation, module)
        return function(module, query, key, value, attention_mask.mask, **options)
    if isinstance(attention_mask, CacheMask):
        return _through_cache(module, (query, key, value), attention_mask, **options), None
    if not isinstance(attention_mask, RingMask):
        call = _call_of(f"the attention of {_named(module)}")
        if call.decoding:
            raise NotImplementedError(_no_mask(module, attention_mask))
        if call.sharded is None:
            return attention_function_of(call.previous, module)(module, query, key, value, attention_mask, **options)
        if not _hides_nothing(attention_mask, key):
            raise NotImplementedError(_no_mask(module, attention_mask))
        attention_mask = _ring_mask(call, Rule(), {"q_length": query.shape[2], "kv_length": key.shape[2]})
    return _on_ring(module, (query, key, value), attention_mask, **options), None


def _hides_nothing(mask: object, key: Tensor) -> bool:
    """Whether a tensor is a mask of keys, the same for all queries, and hides none: what Switch's encoder makes by itself of the
    ones that a sharded batch has. What padding there is, the batch knows."""
    keys = key.shape[2]
    return isinstance(mask, Tensor) and mask.ndim == 4 and mask.shape[1:] == (1, 1, keys) and keys > 1 and not bool(mask.any())


def _on_ring(
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: RingMask,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    deterministic: bool | None = None,
    **others: object,
) -> Tensor:
    _check_others(module, others)
    query, key, value = (x.transpose(1, 2) for x in qkv)
    query = at_global_positions(module, query, mask.ring)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options: AttentionOptions = {
        "scale": scale,
        "softcap": softcap,
        "sinks": s_aux,
        "dropout_p": dropout,
        "bias": bias_of_all_keys(module, position_bias, mask.keys),
        "deterministic": bool(deterministic),
        "head_groups": mask.call.head_groups,
        **mask.options,
    }
    if mask.call.cache is not None:
        mask.call.cache.keep(module, key, value, options, _named(module))
    out = mask.ring.attention(query, key, value, **options)
    if mask.averaging is None or s_aux is not None:  # a sink takes all the weight where nothing is seen
        return out
    return torch.where(mask.averaging[:, :, None, None], mean_of_values(query, key, value, scale, softcap, mask.keys), out)


def _through_cache(
    module: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: CacheMask,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> Tensor:
    _check_others(module, others)
    if dropout:
        raise NotImplementedError(
            f"the attention of {_named(module)} drops weights out ({dropout}), which a cache does not; call model.eval() first"
        )
    query, key, value = (x.transpose(1, 2) for x in qkv)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return mask.cache.attend(module, query, key, value, {"scale": scale, "softcap": softcap, "sinks": s_aux, **mask.options})


def _check_others(module: nn.Module, others: Mapping[str, object]) -> None:
    for name, value in others.items():
        if value is None or value is False or name in _NEEDLESS or not (isinstance(value, Tensor) or name in _INSTEAD):
            continue
        reason = _INSTEAD.get(name, "its meaning over a ring is not known")
        raise NotImplementedError(f"{name} was given to the attention of {_named(module)}: {reason}")


def _named(module: nn.Module) -> str:
    number = getattr(module, "layer_idx", None)
    return type(module).__name__ if number is None else f"{type(module).__name__} of layer {number}"


def _no_mask(module: nn.Module, mask: object) -> str:
    if isinstance(mask, Tensor):
        what = (
            f"got the attention mask {list(mask.shape)} as a tensor, which covers this rank's tokens only; give a mask "
            "[batch, seq] of 1 and 0 to cp.shard, or and_mask_function and or_mask_function where the model takes them"
        )
    else:
        what = "got no mask from transformers' mask functions, so it is not known what it may attend to"
    return f"the attention of {_named(module)} {what}"
