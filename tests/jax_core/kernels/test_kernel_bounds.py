"""What tests/support/kernel_bounds.py finds, with TRITON_INTERPRET=1."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def copied(source, target, count, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.store(target + at, tl.load(source + at, mask=at < count))


@triton.jit
def added(source, target, count, block: tl.constexpr):
    at = tl.arange(0, block)
    tl.atomic_add(target + at, tl.load(source + at), mask=at < count)


def apart(size):
    return torch.zeros(10_000)[5_000 : 5_000 + size]


@pytest.mark.parametrize("kernel", [copied, added])
@pytest.mark.parametrize("rows", [1, 3])
def test_memory_of_arguments_may_be_touched(kernel, rows):
    wide = torch.ones(rows, 9, 8).transpose(0, 1)[2:]
    kernel[(1,)](wide, apart(8), 8, block=8)
    kernel[(1,)](wide, wide[3:4], 8, block=8)
    kernel[(1,)](wide[3:4], wide, 8, block=8)


@pytest.mark.parametrize(
    ("kernel", "of_source", "of_target", "words"),
    [
        (copied, 7, 8, "reads outside its arguments: byte 28 of 28 of the nearest; of 8 elements 1"),
        (copied, 8, 6, "writes outside its arguments: byte 24 of 24 of the nearest; of 8 elements 2"),
        (added, 8, 5, "adds outside its arguments: byte 20 of 20 of the nearest; of 8 elements 3"),
    ],
)
def test_what_lies_outside_is_told(kernel, of_source, of_target, words):
    with pytest.raises(Exception, match=words):
        kernel[(1,)](apart(of_source), apart(of_target), 8, block=8)
