"""transformers' ``generate`` over a ring: the prompt on shards, then one token after another, the same on all ranks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ring_attn.generation.loop import check_same
from ring_attn.integrations.transformers.generation.cache import RingCache
from ring_attn.sharding.reduction import of_rank_0
from torch_bridge.job.mesh import ProcessRing

_INSTEAD = {
    "max_time": "the clocks of the ranks would end it at different tokens; give max_new_tokens",
    "assistant_model": "each rank would draft by itself, and drafts may differ; prompt_lookup_num_tokens drafts from the prompt",
    "inputs_embeds": "give the prompt as input_ids",
    "position_ids": "they are counted from attention_mask, padding being on the left; leave them out",
    "negative_prompt_ids": "it runs a second sequence through the model; leave it out",
    "token_healing": "it changes the prompt after the cache has it; leave it out",
}
_TENSORS = ("inputs", "input_ids", "attention_mask")


class Prefill(Protocol):
    """Runs the model on a whole batch, sharded."""

    def __call__(self, batch: dict[str, Tensor], cache: RingCache) -> object: ...


def generate_on_ring(
    generate: Callable[..., Any],
    prefill: Prefill,
    cache: RingCache,
    takes_positions: bool,
    arguments: tuple[object, ...],
    options: dict[str, object],
) -> Any:
    """What ``generate(*arguments, **options)`` returns with this cache among its options, on all ranks the same. Its prompt goes
    through the model on shards (``prefill``), all but the last token: that is the first to be decoded, which gives its logits to
    every rank."""
    prompt, mask = _prompt_of(arguments, options), _mask_of(options)
    ring = cache.kv.ring.processes
    check_same(ring, prompt, f"cached {cache.seen}")
    if cache.seen >= prompt.shape[1]:
        raise ValueError(
            f"input_ids must be all tokens so far and at least one new; the cache holds {cache.seen}, and {prompt.shape[1]} came"
        )
    _check_room(cache, prompt.shape[1], options)
    with torch.no_grad(), cache.generated(prompt.shape[1]), _random_numbers_of_rank_0(ring, prompt.device):
        if not cache.seen and prompt.shape[1] > 1:
            prefill(_all_but_the_last(prompt, mask, takes_positions), cache)
        return generate(*arguments, **options)


def _prompt_of(arguments: tuple[object, ...], options: Mapping[str, object]) -> Tensor:
    given = [x for x in (*arguments[:1], options.get("inputs"), options.get("input_ids")) if x is not None]
    if len(given) != 1 or not isinstance(given[0], Tensor) or given[0].ndim != 2:
        raise ValueError("generate over a ring needs one prompt, input_ids [batch, seq], whole and the same on every rank")
    config = options.get("generation_config")
    for name, reason in _INSTEAD.items():
        if options.get(name, getattr(config, name, None)) not in (None, False):
            raise NotImplementedError(f"{name} cannot be given to generate over a ring: {reason}")
    for name, value in options.items():
        if isinstance(value, Tensor) and value.ndim and name not in _TENSORS:
            raise NotImplementedError(
                f"{name} cannot be given to generate over a ring, where the prompt is tokens alone; leave past_key_values out to "
                "generate on each rank by itself"
            )
    return given[0]


def _check_room(cache: RingCache, length: int, options: Mapping[str, object]) -> None:
    """Before the first token, so that none is lost."""
    for settings in (options, *(vars(x) for x in (options.get("generation_config"), cache.settings) if x is not None)):
        new, most = settings.get("max_new_tokens"), settings.get("max_length")
        rows = length + new if isinstance(new, int) else most
        if isinstance(rows, int):
            break
    else:
        return
    if rows - 1 > cache.kv.max_length:  # the last token is not read
        raise ValueError(
            f"generate may make rows of {rows} tokens, and the cache has room for {cache.kv.max_length}: make it with a larger "
            "max_length, or give a smaller max_new_tokens"
        )


def _mask_of(options: Mapping[str, object]) -> Tensor | None:
    mask = options.get("attention_mask")
    return mask if isinstance(mask, Tensor) else None


def _all_but_the_last(prompt: Tensor, mask: Tensor | None, takes_positions: bool) -> dict[str, Tensor]:
    """The batch of the prompt, with positions as transformers' generate counts them."""
    batch = {"input_ids": prompt[:, :-1]}
    if mask is not None and not bool((mask != 0).all()):
        batch["attention_mask"] = mask[:, :-1]
        if takes_positions:
            batch["position_ids"] = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)[:, :-1]
    return batch


@contextmanager
def _random_numbers_of_rank_0(ring: ProcessRing, device: torch.device) -> Iterator[None]:
    """All ranks draw what the ring's first would, and go on from their own state afterwards."""
    if ring.size == 1:
        yield
        return
    on_device = device.type == "cuda"
    with torch.random.fork_rng([device] if on_device else [], enabled=ring.rank > 0):
        torch.set_rng_state(of_rank_0(torch.get_rng_state().to(device), ring, "random numbers").cpu())
        if on_device:
            torch.cuda.set_rng_state(of_rank_0(torch.cuda.get_rng_state(device).to(device), ring, "random numbers").cpu(), device)
        yield
