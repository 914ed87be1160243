"""transformers' mask functions as options of :func:`ring_attn.ring_attention`.

A mask function is a predicate on (batch, head, query index, key index), most often a conjunction of known ones. Those that the
static masks express become ``causal``, ``sliding_window`` and ``chunk_size``; any other becomes a ``mask_mod``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

from torch import Tensor

from ring_attn.integrations.transformers.versions import captured, origin

Predicate = Callable[..., Tensor]


@dataclass(frozen=True)
class Rule:
    """What a mask function asks for: all of it must hold. ``left`` and ``right`` do not count the query itself."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    counts_from_first: bool = False  # chunks count from each entry's first token that is not padding
    predicates: tuple[Predicate, ...] = ()

    def all_predicates(self) -> Predicate:
        """Their conjunction."""
        return self.predicates[0] if len(self.predicates) == 1 else _all_of(self.predicates)


def translate(mask_function: Predicate) -> Rule:
    """The rule that holds where the mask function does. Windows and chunks that no length can fill are refused with ValueError."""
    rule = Rule()
    for part in _conjuncts(mask_function):
        rule = _joined(rule, part)
    if rule.chunk is not None and not rule.causal:
        raise NotImplementedError("chunks without a causal mask: transformers makes none, and chunk_size is causal")
    return rule


def _conjuncts(function: Predicate) -> Iterator[Predicate]:
    if origin(function) != "and_masks":
        yield function
        return
    for part in captured(function)["mask_functions"]:
        yield from _conjuncts(part)


def _joined(rule: Rule, part: Predicate) -> Rule:
    match origin(part):
        case "causal_mask_function":
            return replace(rule, causal=True)
        case "bidirectional_mask_function":
            return rule
        case "sliding_window_overlay":  # its window counts the query itself
            return replace(rule, left=_smaller(rule.left, captured(part)["sliding_window"] - 1))
        case "sliding_window_bidirectional_overlay":
            window = captured(part)["sliding_window"]
            return replace(rule, left=_smaller(rule.left, window), right=_smaller(rule.right, window))
        case "chunked_overlay" if rule.chunk is None:
            held = captured(part)
            return replace(rule, chunk=held["chunk_size"], counts_from_first="left_padding" in held)
        case _:
            return replace(rule, predicates=(*rule.predicates, part))


def _all_of(predicates: tuple[Predicate, ...]) -> Predicate:
    def all_of(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return reduce(and_, (predicate(batch, head, query, key) for predicate in predicates))

    all_of.__qualname__ = " and ".join(predicate.__qualname__ for predicate in predicates)
    return all_of


def _smaller(one: int | None, other: int) -> int:
    return other if one is None else min(one, other)
