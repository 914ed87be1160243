"""What transformers' ``generate`` is asked for over a ring, and what it cannot do there."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn.integrations.transformers.generation.cache import NAMES, RingCache
from ring_attn.integrations.transformers.versions import GenerationConfig

# A call's options, its configuration, the model's: the first that says anything counts.
Settings = Sequence[Mapping[str, object]]

_BY_ITSELF = "each rank would draft by itself, and drafts may differ; prompt_lookup_num_tokens drafts from the prompt"
_CLOCKS = "the clocks of the ranks would end it at different tokens; give max_new_tokens"
_INSTEAD = {
    "max_time": _CLOCKS,
    "assistant_model": _BY_ITSELF,
    "assistant_early_exit": _BY_ITSELF,
    "use_mtp": _BY_ITSELF,
    "custom_generate": "how another loop uses a cache is not known; leave it out",
    "negative_prompt_ids": "it runs a second sequence through the model; leave it out",
    "token_healing": "it changes the prompt after the cache has it; leave it out",
    "inputs_embeds": "give the prompt as input_ids",
    "position_ids": "they are counted from attention_mask, padding being on the left; leave them out",
    "output_attentions": "no rank ever has the attention weights; leave it out",
    "output_hidden_states": "those of the prompt are spread over the ranks; call model(**cp.shard(prompt)) for them",
}
_TENSORS = ("inputs", "input_ids", "attention_mask")
_DEFAULT_NEW = 20  # transformers' own


class Asked(NamedTuple):
    """``prompt [batch, seq]``, whole; ``mask``: the same shape, or None; ``most``: tokens that a row may have in the end."""

    prompt: Tensor
    mask: Tensor | None
    most: int

    @property
    def padded(self) -> bool:
        return self.mask is not None and not bool((self.mask != 0).all())


def asked(cache: RingCache, arguments: Sequence[object], options: Mapping[str, object]) -> Asked:
    """Raises ValueError and NotImplementedError, by name, for what cannot be honoured, before anything has run."""
    config = options.get("generation_config")
    settings = [options, *(vars(x) for x in (config, cache.settings) if isinstance(x, GenerationConfig))]
    _check_settings(settings, cache)
    prompt, mask = _prompt_of(arguments, options), options.get("attention_mask")
    _check_mask(prompt, mask, settings)
    other_rows = cache.seen > 0 and cache.kv.lengths is not None and len(prompt) != len(cache.kv.lengths)
    known = cache.ids is None or prompt[:, : cache.seen].equal(cache.ids.to(prompt.device))
    if cache.seen >= prompt.shape[1] or other_rows or not known:
        raise ValueError(
            f"input_ids must be the {cache.seen} tokens that the cache holds, and at least one new; {list(prompt.shape)} came. "
            "After beams it holds those of the last step; call cache.reset() to begin anew"
        )
    request = Asked(prompt, mask if isinstance(mask, Tensor) else None, _most(prompt.shape[1], settings))
    if request.most - 1 > cache.kv.max_length:  # the last token is not read
        raise ValueError(
            f"generate may make rows of {request.most} tokens, and the cache has room for {cache.kv.max_length}: make it with a "
            "larger max_length, or give a smaller max_new_tokens"
        )
    return request


def digest(of: Asked, cache: RingCache, options: Mapping[str, object]) -> str:
    """Of all that ranks must have alike, but the prompt."""
    plain = {name: x for name, x in options.items() if x is None or isinstance(x, int | float | str | bool)}
    configs = [x.to_diff_dict() for x in (options.get("generation_config"), cache.settings) if isinstance(x, GenerationConfig)]
    mask = b"" if of.mask is None else of.mask.to("cpu", torch.uint8).numpy().tobytes()
    settings_hash = sha256(f"{cache.seen} {sorted(plain.items(), key=str)} {configs}".encode() + mask)
    return f"settings {settings_hash.hexdigest()[:16]}, {of.most} tokens a row"


def _check_settings(settings: Settings, cache: RingCache) -> None:
    for name, reason in _INSTEAD.items():
        value = _first(settings, name)
        if not (value is None or value is False):
            raise NotImplementedError(f"{name} cannot be given to generate over a ring: {reason}")
    if _first(settings, "guidance_scale") not in (None, 1):
        raise NotImplementedError(
            "guidance_scale runs a second sequence through the model, which the ring's cache is not of; leave it out"
        )
    if _first(settings, "use_cache") is False:
        raise ValueError("generate over a ring needs its cache, and use_cache=False leaves it unused; leave use_cache out")
    criteria = settings[0].get("stopping_criteria")
    if any(type(each).__name__ == "MaxTimeCriteria" for each in (criteria if isinstance(criteria, list) else ())):
        raise NotImplementedError(f"MaxTimeCriteria cannot be given to generate over a ring: {_CLOCKS}")
    if _first(settings, "prompt_lookup_num_tokens"):
        cache.check_croppable()


def _prompt_of(arguments: Sequence[object], options: Mapping[str, object]) -> Tensor:
    prompts = [x for x in (*arguments, options.get("inputs"), options.get("input_ids")) if x is not None]
    if len(arguments) > 1 or len(prompts) != 1 or not isinstance(prompts[0], Tensor) or prompts[0].ndim != 2:
        raise ValueError(
            "generate over a ring needs one prompt, input_ids [batch, seq], whole and the same on every rank, and all else by name"
        )
    for name, value in options.items():
        if isinstance(value, Tensor) and value.ndim > 1 and name not in _TENSORS:
            raise NotImplementedError(
                f"{name} cannot be given to generate over a ring, where the prompt is tokens alone; leave {NAMES[0]} out to "
                "generate on each rank by itself"
            )
    return prompts[0]


def _check_mask(prompt: Tensor, mask: object, settings: Settings) -> None:
    if mask is None:
        pad, end = (_first(settings, name) for name in ("pad_token_id", "eos_token_id"))
        if isinstance(pad, int) and pad != end and bool((prompt == pad).any()):
            raise ValueError(
                f"the prompt has the padding's token {pad}: give its attention_mask [batch, seq], of 1 where there is none"
            )
    elif not isinstance(mask, Tensor) or mask.shape != prompt.shape or not bool(mask[:, -1].all()):
        raise ValueError(
            f"attention_mask must be that of all of input_ids {list(prompt.shape)}, with padding on the left alone; got "
            f"{list(mask.shape) if isinstance(mask, Tensor) else mask}"
        )


def _most(length: int, settings: Settings) -> int:
    new, most = _first(settings, "max_new_tokens"), _first(settings, "max_length")
    if isinstance(new, int):
        return length + new
    return most if isinstance(most, int) else length + _DEFAULT_NEW


def _first(settings: Settings, name: str) -> object:
    return next((value for each in settings if (value := each.get(name)) is not None), None)
