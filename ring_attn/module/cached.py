"""``RingAttention`` with a cache: self-attention whose keys and values are kept."""

from typing import TYPE_CHECKING

from torch import Tensor

from ring_attn.functional import AttentionOptions
from ring_attn.generation.cache import KVCache

if TYPE_CHECKING:
    from ring_attn.module.attention import RingAttention


def attend_with_cache(
    module: "RingAttention",
    cache: KVCache,
    itself: bool,
    *qkv: Tensor,
    causal: bool,
    **given: Tensor | None,
) -> Tensor:
    """Attention of ``module``, a ``RingAttention``, to what the cache keeps: ``qkv``, each ``[batch, new tokens, heads,
    dim]``. ``itself``: whether queries, keys and values come from
    one tensor; ``given``: the call's masks and ids. Raises ValueError for what a cache does not take."""
    masks = [name for name, x in given.items() if x is not None]
    where = module.mesh, module.mesh_dim, module.layout
    reasons = {
        "query, key and value must be one tensor (for cross attention use cache.write and cache.attend)": not itself,
        "the attention must be causal": not causal,
        f"masks and ids are the cache's own, given to cache.prompt; got {', '.join(masks)}": masks,
        "there is no dropout in generation: call model.eval()": module.training and module.dropout,
        "the keys of add_bias_kv are not kept": module.bias_k is not None,
        "a mask_builder does not know new tokens; give a mask_mod": module.mask_builder is not None,
        f"module and cache must have one ring, got {where} and {cache.ring}": where != tuple(cache.ring.arguments().values()),
    }
    wrong = [reason for reason, holds in reasons.items() if holds]
    if wrong:
        raise ValueError(f"with cache=, {wrong[0]}")
    of_prompt: AttentionOptions = dict(strategy=module.strategy, deterministic=module.deterministic)
    return cache.attend(
        cache.layer_of(module),
        *qkv,
        scale=module.scale,
        softcap=module.softcap,
        sinks=module._all_sinks(),
        alibi_slopes=module.alibi_slopes,
        sliding_window=module.sliding_window,
        chunk_size=module.chunk_size,
        mask_mod=module.mask_mod,
        platform=module.platform,
        cfg=module.cfg,
        **(of_prompt if cache.prefilling else {}),
    )
