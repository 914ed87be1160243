"""The one table from transformers' layer types to options of :func:`ring_attn.ring_attention`."""

# What the mask of a layer of each type may ask for, beside padding, documents and predicates.
OPTIONS = {
    "full_attention": ("causal",),
    "sliding_attention": ("causal", "sliding_window"),
    "chunked_attention": ("causal", "chunk_size"),
}
# Of families whose layers with a state are known (layers/states.py): those layers, those that attend as well, and those of neither.
STATES = ("linear_attention", "conv")
BOTH = ("hybrid",)
NEITHER = ("moe", "mlp")
_STATE = "it carries a state along the sequence, and how its layers do so is not known here"
_SELECTED = "it attends to keys that an indexer selects among those it has, which would be this rank's only"
REFUSED = {
    **dict.fromkeys((*STATES, *BOTH), _STATE),
    "mamba": _STATE,
    "hybrid_sliding": _STATE,
    "indexed_attention": _SELECTED,
    "deepseek_sparse_attention": _SELECTED,
    "minimax_m3_sparse": _SELECTED,
    "compressed_sparse_attention": "it attends to keys compressed along the sequence, over the ends of the shards",
    "heavily_compressed_attention": "it attends to keys compressed along the sequence, over the ends of the shards",
}
LEGACY = {"attention": "full_attention"}


def types_of(config: object) -> list[str]:
    """The type of each layer, in the words of newer versions."""
    return [LEGACY.get(kind, kind) for kind in getattr(config, "layer_types", None) or ()]


def check_layer_types(config: object, states: bool = False) -> None:
    """NotImplementedError that names the first layer whose type is not in the table, and why. ``states``: whether the family's
    layers with a state are known."""
    known = (*OPTIONS, *STATES, *BOTH, *NEITHER) if states else tuple(OPTIONS)
    for number, kind in enumerate(types_of(config)):
        if kind not in known:
            reason = REFUSED.get(kind, f"its masks are not known here; known are {', '.join(known)}")
            raise NotImplementedError(
                f"layer {number} of {type(config).__name__} is of type {kind!r}, which cannot be sharded over a ring: {reason}"
            )
