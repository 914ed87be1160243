"""The one table from transformers' layer types to options of :func:`ring_attn.ring_attention`."""

from typing import Any

# What the mask of a layer of each type may ask for, beside padding, documents and predicates.
OPTIONS = {
    "full_attention": ("causal",),
    "sliding_attention": ("causal", "sliding_window"),
    "chunked_attention": ("causal", "chunk_size"),
}
_RECURRENT = "it carries a state along the sequence, which the ring does not pass from rank to rank yet"
_SELECTED = "it attends to keys that an indexer selects among those it has, which would be this rank's only"
REFUSED = {
    "linear_attention": _RECURRENT,
    "mamba": _RECURRENT,
    "conv": "it convolves along the sequence, over the ends of the shards",
    "hybrid": _RECURRENT,
    "hybrid_sliding": _RECURRENT,
    "indexed_attention": _SELECTED,
    "deepseek_sparse_attention": _SELECTED,
    "minimax_m3_sparse": _SELECTED,
    "compressed_sparse_attention": "it attends to keys compressed along the sequence, over the ends of the shards",
    "heavily_compressed_attention": "it attends to keys compressed along the sequence, over the ends of the shards",
}
LEGACY = {"attention": "full_attention"}


def check_layer_types(config: Any) -> None:
    """NotImplementedError that names the first layer whose type is not in the table, and why."""
    for number, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if LEGACY.get(kind, kind) not in OPTIONS:
            reason = REFUSED.get(kind, f"its masks are not known here; known are {', '.join(OPTIONS)}")
            raise NotImplementedError(
                f"layer {number} of {type(config).__name__} is of type {kind!r}, which cannot be sharded over a ring: {reason}"
            )
