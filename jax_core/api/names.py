"""What arguments of other attention functions are in :func:`jax_core.ring_attention`, where the name differs."""

_LENGTHS = (
    "which segment ids say here: negative ids are padding, as in "
    "q_segment_ids=jnp.where(jnp.arange(length) < lengths[:, None], 0, -1), and likewise kv_segment_ids"
)
_PACKED = "which segment ids say here: q_segment_ids and kv_segment_ids, [batch, length], hold the number of each token's sequence"
_BOTH = "of which each side has its own here: q_{0} and kv_{0}; one is enough where queries and keys have equal length"
_NO_WEIGHTS = "which cannot be done: attention weights are never computed as a whole"
_NO_FLAG = "which is not needed: fewer heads of keys and values are seen from the shapes"

OTHERS = {
    # jax.nn.dot_product_attention
    "is_causal": "causal",
    "scale": "softmax_scale",
    "query_seq_lengths": _LENGTHS,
    "key_value_seq_lengths": _LENGTHS,
    "local_window_size": "sliding_window",
    "implementation": 'which is called platform here: "xla", "triton", "cudnn", "pallas" or "auto"',
    "return_residual": "return_lse",
    "logits_dtype": "which is not needed: scores are float32 or wider",
    # flax
    "dropout_rate": "dropout_prob",
    "dropout_rng": 'which is called dropout_seed here and takes integers: jax.random.bits(rng, (2,), "uint32")',
    "broadcast_dropout": "which cannot be done: each batch entry and head has its own pattern",
    "dtype": "which is that of the arrays here: cast them",
    "module": _NO_WEIGHTS,
    # torch's scaled_dot_product_attention
    "attn_mask": "which is called mask here where it is bool, and bias where it is float",
    "dropout_p": "dropout_prob",
    "enable_gqa": _NO_FLAG,
    # flash-attn
    "q": "query",
    "k": "key",
    "v": "value",
    "window_size": "sliding_window",
    "softcap": "which is called logits_soft_cap here; None is none",
    "return_attn_probs": _NO_WEIGHTS + ". The log-sum-exp comes with return_lse",
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "max_seqlen_q": "which is not needed: lengths are those of the arrays",
    "max_seqlen_k": "which is not needed: lengths are those of the arrays",
    "learnable_sink": "softmax_aux",
    "s_aux": "softmax_aux",
    # ring_attn.ring_attention, and one name for two
    "sinks": "softmax_aux",
    "mesh_dim": "axis_name",
    "qkv_format": "which cannot be chosen: arrays are [batch, seq, heads, dim]",
    "segment_ids": _BOTH.format("segment_ids"),
    "position_ids": _BOTH.format("position_ids"),
    "attention_mask": "mask",
}
