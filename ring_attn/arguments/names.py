"""What arguments of other attention functions and modules are in this library's, where the name differs; beside
:data:`jax_core.keywords.SAME`."""

from jax_core.keywords import ATTN_MASK, BOTH_SIDES, ENABLE_GQA, PLATFORM

_LENGTHS = (
    "which segment ids say here: negative ids are padding, as in "
    "q_segment_ids=torch.where(torch.arange(length) < lengths[:, None], 0, -1), and likewise kv_segment_ids"
)
_PACKED = "which segment ids say here: q_segment_ids and kv_segment_ids, [batch, seq], hold the number of each token's sequence"
_PADDING = "which segment ids say here: q_segment_ids and kv_segment_ids, [batch, seq], are negative on padding"
_NO_WEIGHTS = "which cannot be done: no process ever has the attention weights. The log-sum-exp comes with return_lse"
_GROUP = "which is called mesh here: it takes a ProcessGroup too"


# Other names for what both the function and the module take.
_COMMON = {
    "implementation": PLATFORM,
    "backend": PLATFORM,
    "group": _GROUP,
    "process_group": _GROUP,
}

OF_FUNCTION = _COMMON | {
    # scaled_dot_product_attention
    "attn_mask": ATTN_MASK,
    "enable_gqa": ENABLE_GQA,
    # flash-attn
    "return_attn_probs": _NO_WEIGHTS,
    "cu_seqlens": "of which each side has its own here: cu_seqlens_q and cu_seqlens_k",
    "max_seqlen": "of which each side has its own here: max_seqlen_q and max_seqlen_k",
    # jax.nn.dot_product_attention and flax
    "query_seq_lengths": _LENGTHS,
    "key_value_seq_lengths": _LENGTHS,
    # FlexAttention and transformers
    "score_mod": "which cannot be traced here: a bias adds to the scores, a mask_mod masks them, softcap caps them",
    "block_mask": "which cannot be read here: give the predicate that it was made of as mask_mod",
    "attention_mask": _PADDING,
    "key_padding_mask": _PADDING,
    "segment_ids": BOTH_SIDES.format("segment_ids"),
    "position_ids": BOTH_SIDES.format("position_ids"),
}

OF_MODULE = _COMMON | {
    "enable_gqa": "which num_kv_heads says here",
    "qkv_format": "which batch_first says here, as in nn.MultiheadAttention",
    "use_alibi": "which is called alibi_slopes here, and takes the slopes",
}

_OF_CONSTRUCTOR = "which the module's constructor takes"
OF_FORWARD = {
    "mask": "which is called attn_mask here, where True means may not attend, as in nn.MultiheadAttention",
    "bias": "which is called attn_mask here where it is float",
    "causal": "which is called is_causal here; or give causal=True to the constructor",
    "attention_mask": "which is called key_padding_mask here, where True means padding, as in nn.MultiheadAttention",
    "segment_ids": BOTH_SIDES.format("segment_ids"),
    "position_ids": BOTH_SIDES.format("position_ids"),
    "cu_seqlens": _PACKED,
} | dict.fromkeys(("sliding_window", "softcap", "scale", "mask_mod", "mesh", "layout"), _OF_CONSTRUCTOR)
