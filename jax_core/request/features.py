"""What a request asks for beyond plain attention, by name; and the refusal of what a kernel or strategy does not declare.

A feature is a field of the static mask or the scores that is not at its default, an array that was given, an option that is set, a
dtype, or a layout. All are found by iterating over the fields, so a new field is a feature that is refused until a kernel and a
strategy list it in their ``CAPABILITIES``.
"""

from dataclasses import MISSING, fields

from jax_core.kernels.contract import Scores
from jax_core.masks import layout
from jax_core.masks.static import Mask
from jax_core.operands import Operands, is_placed
from jax_core.options import Options

# Options that the request turns into something else: the mask, the scores, arrays, or the choice of strategy and kernel.
_TURNED = frozenset(
    "causal bottom_right sliding_window chunk_size logits_soft_cap softmax_scale dropout_prob precision logits_dtype "
    "mask_mod mask_builder predicates layout platform strategy cfg padding shared_eighths".split()
)
# Arrays that are not features: the three that every call has, and those that the library itself adds.
_ALWAYS = ("query", "key", "value", "rank", "documents", "predicate_arrays")
_IDS = ("q_segment_ids", "kv_segment_ids", "q_position_ids", "kv_position_ids")

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_WORDS = {
    "causal": "causal=True",
    "left": "a sliding window",
    "right": "a sliding window that looks ahead",
    "chunk": "chunk_size",
    "keys": "keys of which some are missing",
    "apart": "as many keys as queries, at other positions",
    "any_position": "position ids",
    "softcap": "logits_soft_cap",
    "dropout_prob": "dropout",
    "predicates": "mask functions",
    "precision": "a precision of its products",
    "softmax_aux": "sinks",
    "bias": "a bias",
    "mask": "a boolean mask",
    "q_segment_ids": "segment ids",
    "kv_segment_ids": "segment ids",
    "q_position_ids": "position ids",
    "kv_position_ids": "position ids",
    "wide_ids": "ids of 64 bits (cast them to int32)",
    "alibi_slopes": "ALiBi slopes",
    "plan": "a planned layout (layout=balance(...))",
    "lse_gradient": "a gradient of the LSE (return_lse=True)",
    "second_derivative": "a second derivative",
    "fused_backward": "fused_backward=True",
    "deterministic": "deterministic=True",
}


def features(options: Options, scores: Scores, operands: Operands) -> frozenset[str]:
    """The names of all features that this request asks for."""
    asked = {field.name for field in fields(options) if field.name not in _TURNED and getattr(options, field.name)}
    asked |= of_scores(scores) | _arrays(scores, operands)
    return frozenset(asked | {layout.feature(options.layout), str(operands.query.dtype).removeprefix("torch.")})


def of_scores(scores: Scores) -> set[str]:
    return _changed(scores) | _changed(scores.mask)


def _changed(data: Scores | Mask) -> set[str]:
    """The fields of a dataclass that are not at their default."""
    return {field.name for field in fields(data) if field.default is not MISSING and getattr(data, field.name) != field.default}


def _arrays(scores: Scores, operands: Operands) -> set[str]:
    there = {name for name, array in operands._asdict().items() if name not in _ALWAYS and array is not None}
    if not scores.dropout_prob:  # then nothing reads the seed, nor, without predicates, the origin
        there -= {"dropout_seed", "origin"} if not scores.predicates else {"dropout_seed"}
    wide = any(name in there and getattr(operands, name).dtype.itemsize == 8 for name in _IDS)
    # Documents say the same as ids.
    document_ids = set() if operands.documents is None else set(_IDS if is_placed(operands.documents) else _IDS[:2])
    return there | document_ids | ({"wide_ids"} if wide else set())


def refusal(asked: frozenset[str], handled: frozenset[str]) -> str | None:
    """Names, in words, what of ``asked`` is not ``handled``; None if all is."""
    dtypes = ", ".join(name for name in _DTYPES if name in handled)
    words = {f"{name} (it takes {dtypes})" if name in _DTYPES else _WORDS.get(name, name) for name in asked - handled}
    return f"it does not handle {', '.join(sorted(words))}" if words else None
