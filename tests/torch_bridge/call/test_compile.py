"""ring_attention under torch.compile and torch.export: one graph for all lengths, a program for each, and a bound on how many."""

import gc
import io
import re
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ring_attn import RingAttention, ring_attention
from torch_bridge.call import programs

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's, of every Function


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def qkv(length, grad=True):
    return [torch.randn(2, length, heads, 8, requires_grad=grad) for heads in (4, 2, 2)]


def in_one_graph(function, **settings):
    """The compiled function, and the counter of its graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, **settings), counter


def assert_same(compiled, plain, inputs):
    ours, theirs = compiled(*inputs), plain(*inputs)
    torch.testing.assert_close(ours, theirs)
    found, expected = (torch.autograd.grad(x.sin().sum(), inputs) for x in (ours, theirs))
    torch.testing.assert_close(found, expected)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)
        self.attention = RingAttention(16, 4, batch_first=True, num_kv_heads=2, sinks=True, causal=True, mesh="local")

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h)[0]
        return x + self.linear(x)


def test_a_model_whose_lengths_change_is_two_graphs():
    model = Block()
    compiled, counter = in_one_graph(model)
    for length in (5, 7, 9):
        x = torch.randn(2, length, 16, requires_grad=True)
        wanted = [x, *model.parameters()]
        ours, theirs = compiled(x), model(x)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), wanted) for out in (ours, theirs)))
    assert counter.frame_count == 2  # the first length, and all others


def test_every_number_may_be_a_symbol():
    """With ``dynamic=True`` torch holds all sizes and floats for variable, those of the options too."""

    def attention(q, k, v):
        return ring_attention(
            q * 2, k, v, mesh="local", sliding_window=(q.shape[1] // 2, 0), scale=q.shape[-1] ** -0.5, dropout_p=0.0
        )

    compiled, _ = in_one_graph(attention, dynamic=True)
    for length in (4, 6):
        assert_same(compiled, attention, qkv(length))


def test_a_marked_length_is_one_graph():
    def attention(q, k, v):
        return ring_attention(q, k, v, causal=True, layout="zigzag", mesh="local")

    compiled, counter = in_one_graph(attention)
    for length in (8, 6):
        inputs = qkv(length)
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 1)
        assert_same(compiled, attention, inputs)
    assert counter.frame_count == 1


def test_drawn_dropout_is_in_the_graph():
    module = RingAttention(16, 4, dropout=0.5, batch_first=True, mesh="local")
    x = torch.randn(2, 6, 16)
    compiled, _ = in_one_graph(lambda x: module(x, x, x)[0])
    results = []
    for run, seed in ((compiled, 3), (module.forward, 3), (compiled, 4)):
        torch.manual_seed(seed)
        results.append(run(x) if run is compiled else run(x, x, x)[0])
    torch.testing.assert_close(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_a_call_that_cannot_be_is_refused_while_tracing():
    compiled, _ = in_one_graph(lambda q, k: ring_attention(q, k, k, mesh="local"))
    with pytest.raises(RuntimeError, match="q heads must be a multiple of k/v heads"):
        compiled(torch.zeros(1, 4, 4, 8), torch.zeros(1, 4, 3, 8))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # of what torch 2.11 loads
@pytest.mark.parametrize("strict", [False, True])
def test_export_runs_equal_also_when_loaded(strict):
    model, x, file = Block().eval(), torch.randn(2, 6, 16), io.BytesIO()
    exported = torch.export.export(model, (x,), strict=strict)
    torch.export.save(exported, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for program in (exported, loaded):
        assert torch.equal(program.module()(x), model(x))


def test_what_another_process_exported_is_not_taken_for_a_call_of_this_one():
    q, k, v = qkv(6, grad=False)
    call = "{'causal': True} on ring of global ranks [7]"
    with pytest.raises(ValueError, match=f"no call of ring_attention in this process is the one .*{re.escape(call)}"):
        torch.ops.ring_attn.forward([q, k, v, *[None] * 10], call)


def test_functions_of_one_name_are_two_calls():
    def of(reach):
        return lambda *sizes: WithinReach(reach)

    class WithinReach:
        def __init__(self, reach):
            self.reach = reach

        def __getitem__(self, where):
            rows, columns = (torch.arange(16)[part].numpy() for part in where)
            return abs(rows[:, None] - columns[None]) <= self.reach

    q, k, v = qkv(6, grad=False)
    near, far = (ring_attention(q, k, v, mesh="local", mask_builder=of(reach)) for reach in (0, 2))
    torch.testing.assert_close(near, v.repeat_interleave(2, 2))
    torch.testing.assert_close(far, ring_attention(q, k, v, mesh="local", sliding_window=2))


def test_programs_are_bounded_and_many_are_said(monkeypatch):
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 3)
    monkeypatch.setattr(programs, "MANY", 2)

    def attention(length):
        x = torch.ones(1, length, 1, 4)
        return ring_attention(x, x, x, mesh="local", scale=0.123)

    def kept():
        return [made.request.specs[0].shape[1] for made in programs._PROGRAMS.values()]

    attention(1)
    first = weakref.ref(next(made.program for made in programs._PROGRAMS.values() if made.request.specs[0].shape[1] == 1))
    with pytest.warns(UserWarning, match="met 2 different lengths .* pad to a few lengths"):
        attention(2)
    for length in (3, 2, 3, 2):  # it is said once, and a known one makes nothing
        attention(length)
    assert kept() == [1, 2, 3] and first() is not None
    attention(4)
    gc.collect()
    assert kept() == [2, 3, 4] and first() is None
    torch.testing.assert_close(attention(1), torch.ones(1, 1, 1, 4))


def test_a_backward_outlives_its_program_among_those_kept(monkeypatch):
    inputs = qkv(5)
    out = ring_attention(*inputs, mesh="local", scale=0.321)
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 1)
    ring_attention(*qkv(3), mesh="local", scale=0.321)
    expected = torch.autograd.grad(ring_attention(*inputs, mesh="local", scale=0.321).sin().sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), inputs), expected)


def test_flops_are_counted_as_torch_counts_its_own():
    q, k, v = (torch.randn(2, 6, heads, dim, requires_grad=True) for heads, dim in ((4, 8), (2, 8), (2, 5)))
    with FlopCounterMode(display=False) as counter:
        ring_attention(q, k, v, mesh="local", causal=True).sum().backward()
    found = {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}
    shapes = (2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 5)
    expected = {
        "ring_attn.forward": sdpa_flop_count(*shapes),
        "ring_attn.backward": sdpa_backward_flop_count((2, 4, 6, 5), *shapes),
    }
    assert found == expected
