"""What stays out of the graphs of torch.compile, and what they hold as a constant (torch_bridge/tracing.py)."""

import torch
from torch._dynamo.testing import CompileCounter

from torch_bridge.tracing import constant, untraced


def of_many(*x: torch.Tensor) -> torch.Tensor:
    return x[0].sin()


def inside(x: torch.Tensor) -> torch.Tensor:
    return x.relu() + 1


def around(x: torch.Tensor) -> torch.Tensor:
    return inside(x)


def test_functions_are_counted_apart():
    """The compiler gives up on a code that it has compiled eight times: one function's arguments are not another's."""
    torch._dynamo.reset()
    apart, partly = untraced(of_many), untraced(around, recursive=False)
    x = torch.randn(3)
    for count in range(1, 11):
        compiled = torch.compile(lambda x, count=count: apart(*[x * 2] * count) + 1, backend="eager")
        torch.testing.assert_close(compiled(x), (x * 2).sin() + 1)
    counter = CompileCounter()
    torch.testing.assert_close(torch.compile(lambda x: partly(x * 2) + 1, backend=counter)(x), (x * 2).relu() + 2)
    assert counter.frame_count == 3  # before it, what it calls, after it


def test_a_constant_is_asked_for_once():
    torch._dynamo.reset()
    asked = []

    @constant
    def number(name: str) -> int:
        asked.append(name)
        return len(name)

    compiled = torch.compile(lambda x: x * number("abc"), backend="eager", fullgraph=True)
    for _ in range(3):
        assert compiled(torch.ones(2)).tolist() == [3, 3]
    assert asked == ["abc"]
