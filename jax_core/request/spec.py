"""Checks a call and turns it into the static description of one attention.

Only shapes and dtypes are read, so the same checks serve JAX arrays and torch tensors.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np

from jax_core.config import RingAttentionConfig
from jax_core.kernels.contract import Problem, Scores, config_of
from jax_core.masks.builders import Built, build_mask
from jax_core.masks.functions import Predicate, from_mask_mod
from jax_core.masks.layout import check_layout
from jax_core.masks.static import Mask, both, check_reach, make_mask, shifted
from jax_core.operands import EIGHTHS, Operands, is_placed
from jax_core.options import ALONE, Options, Placement
from jax_core.request import hardware
from jax_core.request.checks import check_operands
from jax_core.request.dispatch import Choice, choose
from jax_core.request.features import features
from jax_core.strategies.contract import RingSpec

_BY_INDEX = frozenset("bias mask dropout_prob".split())  # features that go by a key's index among all keys


def make_spec(options: Options, operands: Operands, place: Placement = ALONE) -> tuple[RingSpec, Operands]:
    """Checks everything and returns the static spec, with the operands completed: the ids of a side that was left out, and the
    arrays of the mask functions. ``operands`` are local shards."""
    problem, operands = make_problem(options, operands, place)
    axes = place.axis_name if isinstance(place.axis_name, tuple) and len(place.axis_name) > 1 else ()
    choice = choose(options, problem, axes)
    by_document = _goes_by_document(choice, problem)
    if not _may_send_rows(problem, by_document or getattr(choice.kernel, "CONTINUES", False)):
        problem = replace(problem, shared_eighths=EIGHTHS)
    spec = RingSpec(
        problem=problem,
        strategy=choice.strategy,
        kernel=choice.kernel,
        fwd_config=config_of(problem, choice.fwd_params),
        bwd_config=config_of(problem, choice.bwd_params),
        axis_name=place.axis_name,
        lse_gradient=options.lse_gradient,
        by_document=by_document,
        padding=options.padding,
    )
    return spec, operands


def _may_send_rows(problem: Problem, in_rows: bool) -> bool:
    """Whether a part of a shard may stand for it. ``in_rows``: the kernel's sums of gradients are arrays like the operands. What
    goes by a key's index among all keys needs whole shards, and so do plans."""
    by_index = any(predicate.over == "index" for predicate in problem.scores.predicates)
    return in_rows and not by_index and not problem.features & _BY_INDEX and isinstance(problem.layout, str)


def _goes_by_document(choice: Choice, problem: Problem) -> bool:
    kernel = choice.kernel
    return problem.documents > 0 and kernel is not None and kernel.takes_documents(choice.strategy.kernel_problem(problem))


def make_problem(options: Options, operands: Operands, place: Placement = ALONE) -> tuple[Problem, Operands]:
    """The same without a choice of strategy and kernel: what is asked of them."""
    check_layout(options.layout, place.size)
    if options.cfg is not None and not isinstance(options.cfg, RingAttentionConfig):
        raise ValueError(f"cfg must be a jax_core.RingAttentionConfig or None, got {type(options.cfg).__name__}")
    operands = broadcast_ids(operands)
    check_operands(operands, options.layout, place.size)
    mask, predicates, arrays = _masks(options, operands, place)
    scores = Scores(
        mask=mask,
        scale=_scale(options, operands.query.shape[-1]),
        softcap=_softcap(options),
        dropout_prob=_dropout_prob(options, operands),
        predicates=predicates,
        precision=options.precision,
        logits_dtype=options.logits_dtype,
    )
    problem = _problem(options, operands, place, scores)
    return problem, operands._replace(predicate_arrays=operands.predicate_arrays + arrays)


def _problem(options: Options, operands: Operands, place: Placement, scores: Scores) -> Problem:
    query, key, value = operands[:3]
    backend = place.backend or jax.default_backend()
    return Problem(
        scores=scores,
        dtype=str(query.dtype).removeprefix("torch."),
        batch=query.shape[0],
        q_length=query.shape[1],
        k_length=key.shape[1],
        heads=query.shape[2],
        kv_heads=key.shape[2],
        dim=query.shape[3],
        value_dim=value.shape[3],
        layout=options.layout,
        size=place.size,
        sizes=place.sizes or (place.size,),
        features=features(options, scores, operands),
        backend=backend,
        capability=hardware.capability(backend) if place.capability is None else place.capability,
        generation=hardware.generation(backend) if place.generation is None else place.generation,
        documents=0 if operands.documents is None else operands.documents.shape[1] - (not is_placed(operands.documents)),
        placed=is_placed(operands.documents),
        shared_eighths=options.shared_eighths if is_placed(operands.documents) else EIGHTHS,
    )


def broadcast_ids(operands: Operands) -> Operands:
    """Ids given for one side serve the other too if queries and keys have equal length."""
    pairs = (("q_segment_ids", "kv_segment_ids"), ("q_position_ids", "kv_position_ids"))
    for q_name, k_name in pairs:
        q_ids, k_ids = getattr(operands, q_name), getattr(operands, k_name)
        if (q_ids is None) == (k_ids is None):
            continue
        if operands.query.shape[1] != operands.key.shape[1]:
            raise ValueError(
                f"{q_name} and {k_name} must come together when queries and keys differ in length "
                f"({operands.query.shape[1]} and {operands.key.shape[1]}); only {k_name if q_ids is None else q_name} came"
            )
        ids = k_ids if q_ids is None else q_ids
        operands = operands._replace(**{q_name: ids, k_name: ids})
    return operands


def _masks(options: Options, operands: Operands, place: Placement) -> tuple[Mask, tuple[Predicate, ...], tuple]:
    """The static mask, and the mask functions with their arrays."""
    for name in ("mask_mod", "mask_builder"):
        if getattr(options, name) is not None and not callable(getattr(options, name)):
            raise ValueError(f"{name} must be a function, got {getattr(options, name)!r}")
    mask = make_mask(options.causal, options.sliding_window, options.chunk_size)
    if options.bottom_right:
        mask = _from_the_last_key(mask, options, operands, place)
    functions = [] if options.mask_mod is None else [from_mask_mod(options.mask_mod, place.axes)]
    if options.mask_builder is not None:
        # A builder's mask goes by the index in the sequence.
        static = operands.q_position_ids is None and not is_placed(operands.documents)
        built = _built(options.mask_builder, operands, place, static)
        joined = both(mask, built.mask)
        if joined is None:
            joined, built = mask, _built(options.mask_builder, operands, place, static=False)
        mask = joined
        functions += [] if built.predicate is None else [(built.predicate, built.arrays)]
    if operands.q_position_ids is not None or is_placed(operands.documents):
        check_reach(options.sliding_window, options.chunk_size)
        mask = replace(mask, any_position=True)
    return mask, options.predicates + tuple(predicate for predicate, _ in functions), tuple(arrays for _, arrays in functions)


def _from_the_last_key(mask: Mask, options: Options, operands: Operands, place: Placement) -> Mask:
    """The mask for queries of which the last is at the last key's position."""
    if operands.q_position_ids is not None or is_placed(operands.documents):
        raise ValueError("bottom_right says where the queries are, and so do q_position_ids; give one of the two")
    by = (operands.key.shape[1] - operands.query.shape[1]) * place.size
    functions = options.mask_mod is not None or any(predicate.over == "position" for predicate in options.predicates)
    if by and (mask.chunk is not None or functions or operands.alibi_slopes is not None):
        raise NotImplementedError(
            "bottom_right moves a causal mask and a sliding window; for chunk_size, mask_mod and alibi_slopes pass q_position_ids "
            f"(those of the layout plus {by}) and kv_position_ids instead"
        )
    return shifted(mask, by) if by else mask


def _built(mask_builder: Callable, operands: Operands, place: Placement, static: bool) -> Built:
    lengths = operands.query.shape[1] * place.size, operands.key.shape[1] * place.size
    heads, group = operands.query.shape[2], operands.query.shape[2] // operands.key.shape[2]
    return build_mask(mask_builder, *lengths, heads * place.head_shards, group, static)


def _scale(options: Options, dim: int) -> float:
    if options.softmax_scale is None:
        return 1 / math.sqrt(dim)
    return _number("softmax_scale", options.softmax_scale)


def _softcap(options: Options) -> float | None:
    if options.logits_soft_cap is None:
        return None
    cap = _number("logits_soft_cap", options.logits_soft_cap)
    if cap <= 0:
        raise ValueError(f"logits_soft_cap must be positive, or None for no cap; got {cap}")
    return cap


def _dropout_prob(options: Options, operands: Operands) -> float:
    prob = _number("dropout_prob", options.dropout_prob)
    if not 0 <= prob < 1:
        raise ValueError(f"dropout_prob must be in [0, 1), got {prob}")
    if prob and operands.dropout_seed is None:
        raise ValueError("dropout_prob > 0 needs a dropout_seed: an int, the same on all ranks; give a new one each step")
    return prob


def _number(name: str, value: float) -> float:
    try:
        number = float(value)
    except Exception as error:
        raise ValueError(f"{name} must be a Python number (it is compiled into the program), got {type(value).__name__}") from error
    if not np.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}")
    return number
