"""What arguments of other attention functions are in :func:`jax_core.ring_attention`, where the name differs; beside
:data:`jax_core.keywords.SAME`."""

from jax_core.keywords import ATTN_MASK, BOTH_SIDES, ENABLE_GQA, PLATFORM

_LENGTHS = (
    "which segment ids say here: negative ids are padding, as in "
    "q_segment_ids=jnp.where(jnp.arange(length) < lengths[:, None], 0, -1), and likewise kv_segment_ids"
)
_PACKED = "which segment ids say here: q_segment_ids and kv_segment_ids, [batch, length], hold the number of each token's sequence"
_NO_WEIGHTS = "which cannot be done: attention weights are never computed as a whole"

OTHERS = {
    # jax.nn.dot_product_attention
    "query_seq_lengths": _LENGTHS,
    "key_value_seq_lengths": _LENGTHS,
    "implementation": PLATFORM,
    "logits_dtype": "which is not needed: scores are float32 or wider",
    # flax
    "dropout_rng": 'which is called dropout_seed here and takes integers: jax.random.bits(rng, (2,), "uint32")',
    "broadcast_dropout": "which cannot be done: each batch entry and head has its own pattern",
    "dtype": "which is that of the arrays here: cast them",
    "module": _NO_WEIGHTS,
    # torch's scaled_dot_product_attention
    "attn_mask": ATTN_MASK,
    "enable_gqa": ENABLE_GQA,
    # flash-attn
    "softcap": "which is called logits_soft_cap here; None is none",
    "return_attn_probs": _NO_WEIGHTS + ". The log-sum-exp comes with return_lse",
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "max_seqlen_q": "which is not needed: lengths are those of the arrays",
    "max_seqlen_k": "which is not needed: lengths are those of the arrays",
    # one name for two
    "qkv_format": "which cannot be chosen: arrays are [batch, seq, heads, dim]",
    "segment_ids": BOTH_SIDES.format("segment_ids"),
    "position_ids": BOTH_SIDES.format("position_ids"),
    "attention_mask": "mask",
}
