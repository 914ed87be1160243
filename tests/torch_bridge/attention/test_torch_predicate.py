"""Predicates of torch as mask functions for JAX: the same values, one program for equal predicates, and refusals in words."""

import jax
import numpy as np
import pytest
import torch

from torch_bridge.attention.torch_predicate import Lengths, traced

BATCH, LENGTH = 2, 10
LENGTHS = Lengths(BATCH, LENGTH, LENGTH)
GROUPS = torch.tensor([[-1, 0, 0, -1, -1, 1, 1, 1, -1, -1], [0, 0, -1, -1, 1, 1, -1, 2, 2, 2]])


def groups(b, h, q, k):
    mine, other = GROUPS[b, q], GROUPS[b][k]
    return (mine == other) & (mine >= 0)


def arithmetic(b, h, q, k):
    near = torch.where(k < LENGTH, abs(q - k), 0) <= 3
    return near & ((q + 2 * k) % 3 != b) | ((k - 4) // 3 == (q - 4) // 3) & ~(h == 1)


def built_inside(b, h, q, k):
    """What does not depend on the integers is computed in torch, by any operator; and an integer result is true where not 0."""
    starts = (GROUPS >= 0).cumsum(-1)
    return starts[b, q].clamp(max=3) - torch.minimum(starts[b, k], starts[b, q].new_full((), 3))


PREDICATES = [groups, arithmetic, built_inside]


@pytest.mark.parametrize("predicate", PREDICATES, ids=lambda predicate: predicate.__name__)
def test_values_are_those_of_torch(predicate):
    mask_mod = jax.jit(traced(predicate, LENGTHS))
    for b, h, q, k in np.ndindex(BATCH, 2, LENGTH, LENGTH):
        where = [torch.tensor(x) for x in (b, h, q, k)]
        assert bool(mask_mod(b, h, q, k)) == bool(predicate(*where)), (b, h, q, k)


def same_group(table):
    return lambda b, h, q, k: table[b, q] == table[b, k]


def test_equal_predicates_over_other_values_are_equal():
    """So a batch with other groups runs the same program, though its function is a new one."""
    one, other = (traced(same_group(table), LENGTHS) for table in (GROUPS, GROUPS + 1))
    assert one == other and hash(one) == hash(other)
    assert one != traced(lambda b, h, q, k: GROUPS[b, q] != GROUPS[b, k], LENGTHS)
    assert one != traced(same_group(torch.cat([GROUPS, GROUPS])), LENGTHS)


def branching(b, h, q, k):
    return q >= 0 if q > k else k >= 0


def unknown(b, h, q, k):
    return torch.erfinv(q.float()) > k


@pytest.mark.parametrize(
    ("predicate", "words"),
    [
        (same_group(GROUPS[:, :5]), r"dim 1 of a tensor \[2, 5\] by position, but the whole sequence has 10"),
        (lambda b, h, q, k: GROUPS[:1][b, q] == 0, r"dim 0 of a tensor \[1, 10\]"),
        (branching, "without Python that branches"),
        (unknown, "aten.erfinv.default, which is not translated"),
        (lambda b, h, q, k: True, "must return one boolean tensor"),
    ],
)
def test_what_cannot_be_translated_is_refused_by_name(predicate, words):
    with pytest.raises(NotImplementedError, match=words):
        traced(predicate, LENGTHS)
