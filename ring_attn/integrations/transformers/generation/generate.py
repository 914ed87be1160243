"""transformers' ``generate`` over a ring: the prompt on shards, then one token after another, the same on all ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from ring_attn.generation.loop import check_same
from ring_attn.integrations.transformers.generation.asked import Asked, asked, digest
from ring_attn.integrations.transformers.generation.cache import NAMES, RingCache
from ring_attn.sharding.reduction import of_rank_0
from torch_bridge.call.error_propagation import propagating
from torch_bridge.mesh.rings import ProcessRing


class Prefill(Protocol):
    """Runs the model on a whole batch, sharded."""

    def __call__(self, batch: dict[str, Tensor], cache: RingCache) -> object: ...


class Names(Protocol):
    """Of what a model takes."""

    @property
    def cache_name(self) -> str: ...

    @property
    def takes_positions(self) -> bool: ...


def generate_on_ring(
    generate: Callable[..., Any],
    prefill: Prefill,
    cache: RingCache,
    names: Names,
    arguments: tuple[object, ...],
    options: dict[str, object],
) -> Any:
    """What ``generate(*arguments, **options)`` returns with this cache, on all ranks the same. Its prompt goes through the model on
    shards (``prefill``), all but the last token: that is the first to be decoded, which gives its logits to every rank."""
    ring, device = cache.kv.ring.processes, cache.device
    with propagating(ring, device):
        request = asked(cache, arguments, options)
    check_same(ring, request.prompt.to(device), digest(request, cache, options))
    options = {name: x for name, x in options.items() if name not in NAMES} | {names.cache_name: cache}
    with torch.no_grad(), cache.generated(request.prompt), _random_numbers_of_rank_0(ring, device):
        if not cache.seen and request.prompt.shape[1] > 1:
            prefill(_all_but_the_last(request, names.takes_positions, device), cache)
        result = generate(*arguments, **options)
        cache.end_at(result if isinstance(result, Tensor) else result.sequences)
        return result


def _all_but_the_last(request: Asked, takes_positions: bool, device: torch.device) -> dict[str, Tensor]:
    """The batch of the prompt, with positions as transformers' generate counts them."""
    batch = {"input_ids": request.prompt[:, :-1].to(device)}
    if request.padded and request.mask is not None:
        mask = request.mask.to(device)
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
