"""``generate``: a prompt goes through the model once, on shards; then one token after another."""

from hashlib import sha256

import torch
from torch import Tensor

from ring_attn.generation.cache import KVCache
from ring_attn.generation.sampling import GREEDY, Sampler
from ring_attn.generation.step import DecodingStep, Model
from ring_attn.sharding.reduction import agree, of_rank_0
from torch_bridge.mesh.rings import ProcessRing


@torch.no_grad()
def generate(
    model: Model,
    prompts: Tensor,
    cache: KVCache,
    max_new_tokens: int,
    *,
    lengths: Tensor | None = None,
    sampler: Sampler = GREEDY,
    stop: int | None = None,
    cuda_graph: bool = True,
) -> Tensor:
    """New tokens ``[batch, max_new_tokens]``, int64, the same on every rank.

    Args:
        model: ``(input_ids [batch, tokens], position_ids [batch, tokens], cache) -> logits [batch, tokens, vocabulary]``, whose
            attention is ``cache.attend`` (or a :class:`ring_attn.RingAttention` called with ``cache=``). On the prompts
            (``cache.prefilling``) its result is not read: it may leave out the logits and return None.
        prompts: integers ``[batch, seq]``, whole, the same on every rank, padded on the right; at least one token each.
        cache: a new :class:`KVCache` with room for ``seq + max_new_tokens`` tokens.
        lengths: of the prompts, ``[batch]``; None: none is padded.
        sampler: rank 0 of the ring chooses the tokens and broadcasts them: logits may differ in their last bits between machines.
        stop: the token that ends an entry; from there on the entry repeats it, and when all have ended fewer tokens come back.
        cuda_graph: on a GPU the steps after the first one are a CUDA graph, if the model's step can be captured; a warning says why
            not. The model then has to do the same for each token, on the device alone.

    The last token of each prompt is the first one to be decoded: its logits are then on every rank. Raises ValueError for a prompt
    without tokens, and where ranks were given different prompts.
    """
    lengths = torch.full(prompts.shape[:1], prompts.shape[1]) if lengths is None else lengths.cpu()
    ring = cache.ring.processes
    _check(ring, prompts, lengths, max_new_tokens)
    before = (lengths - 1).to(prompts.device)
    with cache.prompt(prompts[:, : int(lengths.max()) - 1], before) as part:
        if part.input_ids.shape[1]:
            model(part.input_ids, part.position_ids, cache)
    token = prompts.gather(1, before[:, None])[:, 0].long()
    return decode(model, token, cache, max_new_tokens, sampler=sampler, stop=stop, cuda_graph=cuda_graph)


@torch.no_grad()
def decode(
    model: Model,
    token: Tensor,
    cache: KVCache,
    max_new_tokens: int,
    *,
    sampler: Sampler = GREEDY,
    stop: int | None = None,
    cuda_graph: bool = True,
) -> Tensor:
    """The part of :func:`generate` after the prompts: ``token [batch]``, the same on every rank, is the next one to go through the
    model, as where a cache was loaded or forked. Returns the tokens after it."""
    ring, generator = cache.ring.processes, sampler.generator(token.device)
    ended, tokens = torch.zeros_like(token, dtype=torch.bool), []
    step = DecodingStep(model, cache, cuda_graph)
    try:
        for _ in range(max_new_tokens):
            token = of_rank_0(sampler(_logits(step(token), len(token)), generator), ring, "tokens")
            if stop is not None:
                token = token.masked_fill(ended, stop)
                ended |= token == stop
            tokens.append(token)
            if stop is not None and bool(ended.all()):
                break
    finally:
        step.close()
    return torch.stack(tokens, 1) if tokens else token.new_zeros(len(token), 0)


def _logits(logits: Tensor | None, batch: int) -> Tensor:
    if logits is None or logits.shape[:2] != (batch, 1):
        got = "None" if logits is None else str(list(logits.shape))
        raise ValueError(f"the model must return logits [batch, 1, vocabulary] of new tokens, got {got}")
    return logits[:, -1]


def _check(ring: ProcessRing, prompts: Tensor, lengths: Tensor, max_new_tokens: int) -> None:
    if prompts.dim() != 2 or not prompts.numel() or int(lengths.min()) < 1 or max_new_tokens < 0:
        raise ValueError(
            f"prompts must be [batch, seq] with a token each, and max_new_tokens not negative; got {list(prompts.shape)} with "
            f"lengths {lengths.tolist()}, and {max_new_tokens}"
        )
    check_same(ring, prompts, f"lengths {lengths.tolist()}, {max_new_tokens} new tokens")


def check_same(ring: ProcessRing, prompts: Tensor, settings: str) -> None:
    """ValueError on all ranks where they were given different prompts or settings. Collective."""
    if ring.size > 1:
        same = f"{sha256(prompts.cpu().numpy().tobytes()).hexdigest()[:16]}, {list(prompts.shape)}, {settings}"
        must = "generate needs the same whole prompts and settings on every rank of the ring"
        agree(ring, prompts.device, f"generate from prompts (hash, shape, settings) {same}", must)
