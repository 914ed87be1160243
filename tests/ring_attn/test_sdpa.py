"""``sdpa`` and ``context_parallel_sdpa`` against torch's function: one process here, two in workers/sdpa_worker.py."""

import pytest
import torch
import torch.nn.functional as F
from launch import torchrun
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

import ring_attn.torch_sdpa.manager
from ring_attn import context_parallel_sdpa, sdpa

L, S, D = 10, 12, 4


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some(*shape, seed=0):
    """A bool mask in which the first row sees nothing."""
    mask = noise(*shape, seed=seed) > 0
    mask[..., 0, :] = False
    return mask


SHAPES = {
    "4-D": ((2, 3, L, D), (2, 3, S, D), (2, 3, S, 5)),
    "5-D": ((2, 2, 3, L, D), (2, 2, 3, S, D), (2, 2, 3, S, D)),
    "3-D": ((3, L, D), (3, S, D), (3, S, D)),
    "2-D": ((L, D), (S, D), (S, D)),
    "one head of keys": ((2, 3, L, D), (2, 1, S, D), (2, 1, S, D)),
    "one head of queries": ((2, 1, L, D), (2, 3, S, D), (2, 1, S, D)),
    "broadcast batches": ((2, 1, 3, L, D), (1, 2, 3, S, D), (2, 2, 3, S, D)),
    "grouped": ((2, 4, L, D), (2, 2, S, D), (2, 2, S, D)),
    "grouped unequally": ((2, 4, L, D), (2, 2, S, D), (2, 1, S, D)),
}
CASES = [
    ("4-D", {}),
    ("4-D", {"is_causal": True, "scale": 0.3}),
    ("4-D", {"attn_mask": some(L, S)}),
    ("4-D", {"attn_mask": some(2, 1, L, S)}),
    ("4-D", {"attn_mask": noise(2, 1, 1, S) > 0}),
    ("4-D", {"attn_mask": noise(3, L, S).requires_grad_()}),
    ("4-D", {"attn_mask": noise(2, 3, 1, S).masked_fill(noise(2, 3, 1, S, seed=1) > 0, float("-inf")).requires_grad_()}),
    ("5-D", {"attn_mask": noise(2, 1, 3, L, 1).requires_grad_()}),
    ("5-D", {"attn_mask": noise(2, 2, 1, 1, S) > 0}),
    ("3-D", {"attn_mask": some(3, L, S)}),
    ("3-D", {"is_causal": True}),
    ("2-D", {"attn_mask": some(L, S)}),
    ("one head of keys", {}),
    ("one head of queries", {}),
    ("broadcast batches", {"attn_mask": some(L, S)}),
    ("grouped", {"enable_gqa": True, "is_causal": True}),
    ("grouped unequally", {"enable_gqa": True}),
]


def run(function, shapes, options):
    tensors = [noise(*shape, seed=10 + place).requires_grad_() for place, shape in enumerate(shapes)]
    mask = options.get("attn_mask")
    mask = mask if mask is None else mask.detach().clone().requires_grad_(mask.requires_grad)
    out = function(*tensors, **{**options, "attn_mask": mask})
    out.backward(noise(*out.shape, seed=20))
    return [out.detach(), *(x.grad for x in tensors), *([mask.grad] if mask is not None and mask.requires_grad else [])]


@pytest.mark.parametrize(("shapes", "options"), CASES, ids=lambda value: value if isinstance(value, str) else "-".join(value))
def test_it_is_torchs_function(shapes, options):
    ours = run(lambda *tensors, **named: sdpa(*tensors, **named, mesh="local"), SHAPES[shapes], options)
    for actual, expected in zip(ours, run(F.scaled_dot_product_attention, SHAPES[shapes], options), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_arguments_by_position_are_torchs():
    q = noise(1, 4, L, D)
    given, named = (q, q[:, :2], q[:, :2], None, 0.0, True), {"scale": 0.2, "enable_gqa": True}
    torch.testing.assert_close(sdpa(*given, **named, mesh="local"), F.scaled_dot_product_attention(*given, **named))
    torch.testing.assert_close(sdpa(*given, *named.values(), mesh="local"), F.scaled_dot_product_attention(*given, **named))
    torch.manual_seed(0)
    dropped = sdpa(q, q, torch.ones_like(q), None, 0.5, mesh="local")
    assert dropped.std() > 0.1 and abs(dropped.mean() - 1) < 0.2


Q = noise(2, 4, L, D)
REFUSED = [
    ((Q, Q, Q), {"attn_mask": torch.ones(L, L, dtype=torch.bool), "is_causal": True}, "not both"),
    ((Q, Q[:, :2], Q[:, :2]), {}, "without enable_gqa=True"),
    ((Q, Q[:, :3], Q[:, :3]), {"enable_gqa": True}, "must divide"),
    ((Q, Q[0], Q[0]), {}, "same number of dims"),
    ((Q, Q, Q[:, :, :3]), {}, "one length"),
    ((Q, noise(3, 4, L, D), Q), {}, "must broadcast"),
    ((Q, Q, Q.float()), {}, "one dtype"),
    ((Q, Q, Q), {"attn_mask": torch.ones(L, L, dtype=torch.int64)}, "must be bool"),
    ((Q, Q, Q), {"attn_mask": torch.ones(L, L - 1, dtype=torch.bool)}, "columns"),
    ((Q[0], Q[0], Q[0]), {"attn_mask": torch.ones(1, 4, L, L, dtype=torch.bool)}, "must broadcast"),
]


@pytest.mark.parametrize(("tensors", "options", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_torch_refuses_is_refused(tensors, options, words):
    with pytest.raises(ValueError, match=words):
        sdpa(*tensors, **options, mesh="local")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x):
        h = self.project(x).view(1, -1, 2, 4).transpose(1, 2)
        return x + imported_by_name(h, h, h, is_causal=True).transpose(1, 2).flatten(2)


@pytest.fixture
def calls(monkeypatch):
    """How often attention was routed."""
    seen = []

    def spy(*tensors, ring, **options):
        seen.append(ring.layout)
        return sdpa(*tensors, ring=ring, **options)

    monkeypatch.setattr(ring_attn.torch_sdpa.manager, "sdpa", spy)
    return seen


def test_it_is_routed_by_any_name_and_while_active_only(calls):
    block, x = Block(), noise(1, L, 8)
    expected = block(x)
    assert calls == []
    with context_parallel_sdpa(mesh="local"), context_parallel_sdpa(mesh="local", layout="zigzag"):
        torch.testing.assert_close(block(x), expected)
    assert calls == ["zigzag"]  # the innermost
    torch.testing.assert_close(context_parallel_sdpa(mesh="local")(block)(x), expected)
    assert len(calls) == 2
    block(x)
    assert len(calls) == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_is_routed_after_the_manager_is_left(reentrant, calls):
    block, x = Block(), noise(1, L, 8).requires_grad_()
    with context_parallel_sdpa(mesh="local"):
        out = checkpoint(block, x, use_reentrant=reentrant)
    assert len(calls) == 1
    out.sum().backward()
    assert len(calls) == 2
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    assert len(calls) == 2


def test_attention_by_other_functions_is_refused():
    x = torch.randn(1, 6, 8)
    heads = torch.randn(1, 2, 6, 8)
    for attend in (
        lambda: nn.MultiheadAttention(8, 2)(x, x, x),
        lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()(x),
        lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads),
    ):
        with context_parallel_sdpa(mesh="local"), torch.no_grad(), pytest.raises(NotImplementedError, match="shard alone"):
            attend()


def test_an_unknown_cross_is_refused():
    with pytest.raises(ValueError, match="cross must be"), context_parallel_sdpa(mesh="local", cross="text"):
        pass


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, of every autograd.Function
def test_a_compiled_model_follows_the_manager(calls):
    torch.compiler.reset()
    block, x = Block(), noise(1, L, 8)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    expected = compiled(x)
    assert calls == []
    for layout in ("contiguous", "zigzag"):
        with context_parallel_sdpa(mesh="local", layout=layout):
            torch.testing.assert_close(compiled(x), expected)
    assert calls == ["contiguous", "zigzag"]  # traced for each
    compiled(x)
    torch.compiler.reset()


@pytest.mark.slow
def test_two_processes_give_what_one_gives():
    assert "sdpa worker: all right" in torchrun("sdpa_worker.py", 2)
