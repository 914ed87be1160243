"""A module in tiles of tokens, against the module as it is."""

import copy
import gc
import pickle
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ring_attn import tiled

TOKENS, WIDTH, INNER = 23, 8, 24


class Gated(nn.Module):
    """A dense MLP; ``calls``: how many tokens each call had."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.dropout, self.calls = nn.Dropout(dropout), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x.shape[:-1].numel())
        return self.dropout(self.down(nn.functional.silu(self.gate(x)) * self.up(x)))


class Experts(nn.Module):
    """Their routing is given, the ids as integers, and comes back beside the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor, ids: Tensor, scale: float, weights: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.reshape(-1, WIDTH)
        found = torch.stack([flat @ self.weight[expert] for expert in range(2)])  # the third one gets no token
        chosen = found[ids[:, 0], torch.arange(len(flat))]
        return (scale * chosen * weights).view_as(x), weights * flat.sum(-1, keepdim=True), ids


def case(make: Any = Gated, dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    return make().to(dtype), torch.randn(2, tokens, WIDTH, dtype=dtype, requires_grad=True)


def in_tiles(size: int = 16, **options: Any) -> tuple[Any, Tensor]:
    return case(lambda: tiled(Gated(**options), size))


def gradients(module: nn.Module, x: Tensor, run: Any = None) -> list[Tensor]:
    out = (run or module)(x)
    x.grad = None
    module.zero_grad()
    out.float().square().sum().backward()
    return [out.detach(), *(x.grad for x in (x, *module.parameters()) if x.grad is not None)]


@pytest.mark.parametrize("size", [1, 7, 45, 46, 1000])
@pytest.mark.parametrize("flat", [False, True], ids=["batch", "tokens"])
def test_results_and_gradients_are_the_plain_ones(size, flat):
    module, x = case()
    x = (x.flatten(0, 1) if flat else x).detach().requires_grad_()
    plain = gradients(module, x)
    ours = gradients(tiled(module, size), x)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)
    if size >= 46:
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_arguments_and_results_with_a_row_for_each_token():
    def step(module: nn.Module) -> list[Tensor | None]:
        x, weights = whole.detach().requires_grad_(), (whole[..., 0].flatten()[:, None] ** 2).detach().requires_grad_()
        out, logits, same = module(x, ids, 0.5, weights=weights)
        (out.sum() + logits.square().sum()).backward()
        assert same is ids or torch.equal(same, ids)
        return [out, logits, x.grad, weights.grad, module.weight.grad]

    module, whole = case(Experts)
    ids = torch.randint(2, (2 * TOKENS, 1))
    plain = step(module)
    module.weight.grad = None
    torch.testing.assert_close(step(tiled(module, 7)), plain, rtol=1e-12, atol=1e-14)


def test_sums_over_tiles_are_float32():
    """The errors of gradients in bfloat16, of 512 tiles, are those of one product; summed in bfloat16 they are several times as
    large."""
    module, x = case(dtype=torch.bfloat16, tokens=2048)
    exact, wide = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
    want, plain = gradients(exact, wide), gradients(module, x)
    ours = gradients(tiled(module, 8), x)
    for own, usual, true in zip(ours, plain, want, strict=True):
        assert own.dtype == torch.bfloat16
        assert (own.double() - true).norm() <= 1.5 * (usual.double() - true).norm() + 1e-6 * true.norm()


def test_the_inputs_alone_are_held():
    module, x = case()
    held = []
    with saved_tensors_hooks(lambda x: held.append(x.numel()) or x, lambda x: x):
        tiled(module, 4)(x)
    assert held == [x.numel()]


WAYS = {
    "bare": lambda run, x: run(x),
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}


@pytest.mark.parametrize(("way", "times"), [("bare", 2), ("checkpoint", 2), ("reentrant", 3)])
def test_how_often_a_tile_is_computed(way, times):
    """Within a checkpoint as often as without tiles, where nothing after the module needs its result."""
    module, x = in_tiles()
    gradients(module, x)  # and what is tried once
    module.calls.clear()
    found = gradients(module, x, lambda x: WAYS[way](lambda x: x + module(x), x))
    assert module.calls == times * [16, 16, 14]
    plain, _ = case()
    torch.testing.assert_close(found, gradients(plain, x, lambda x: x + plain(x)), rtol=1e-12, atol=1e-14)


def test_nothing_of_a_checkpoint_is_held():
    """What it gives back until the backward has no other owner."""
    module, x = in_tiles()
    seen = []
    out = checkpoint(lambda x: module(seen.append(weakref.ref(y := 2 * x)) or y), x, use_reentrant=False)
    gc.disable()
    try:
        assert seen[0]() is None and out.requires_grad
    finally:
        gc.enable()


def test_dropout_is_drawn_again_alike():
    module, x = case(lambda: tiled(nn.Dropout(0.5), 4))
    out, state = module(x), torch.get_rng_state()
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach() / x.detach())
    assert 0.3 < (x.grad == 0).float().mean() < 0.7
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("around", [False, True], ids=["forward", "forward and backward"])
def test_autocast(around):
    def step(module: nn.Module) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            out = x + module(x)
            if around:
                return [out, *torch.autograd.grad(out.sum(), [x, *module.parameters()])]
        return [out, *torch.autograd.grad(out.sum(), [x, *module.parameters()])]

    module, x = case(dtype=torch.float32)
    plain = step(module)
    torch.testing.assert_close(step(tiled(module, 16)), plain, rtol=2e-2, atol=1e-2)


def test_what_needs_no_gradient_gets_none():
    module, x = in_tiles()
    module.unused = nn.Parameter(torch.ones(3))
    module.gate.weight.requires_grad_(False)
    module(x.detach()).sum().backward()
    assert module.unused.grad is None and module.gate.weight.grad is None and module.up.weight.grad is not None
    module.requires_grad_(False).zero_grad()
    assert not module(x.detach()).requires_grad
    module(x).sum().backward()
    assert x.grad is not None and module.down.weight.grad is None
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            torch.testing.assert_close(module(x), case()[0](x))


def test_hooks_run_once():
    module, x = in_tiles()
    seen = []
    module.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    module.down.weight.register_hook(lambda gradient: seen.append("weight") or gradient / 2)
    module(x).sum().backward()
    assert sorted(map(str, seen)) == sorted([str(x.shape), "backward", "weight"])
    plain, y = case()
    plain(y).sum().backward()
    torch.testing.assert_close(module.down.weight.grad, plain.down.weight.grad / 2)


def test_copies_and_the_way_back():
    module, x = in_tiles()
    expected = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with torch.no_grad():
            module.down.weight.mul_(2)
            torch.testing.assert_close(other(x), expected)
            module.down.weight.div_(2)
        other.calls.clear()
        other(x)
        assert other.calls[-3:] == [16, 16, 14]
    assert list(module.state_dict()) == list(Gated().state_dict())
    del module.forward
    module.calls.clear()
    module(x)
    assert module.calls == [46]


def test_function_transforms():
    module, x = in_tiles()
    (expected,) = torch.autograd.grad(module(x).square().sum(), x)
    torch.testing.assert_close(torch.func.grad(lambda x: module(x).square().sum())(x.detach()), expected)


class Neighbours(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.cumsum(-2))


def test_what_cannot_be_in_tiles_is_refused():
    module, x = in_tiles()
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(module(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="compile what is inside of the module"):
        torch.compile(module, backend="eager")(x)
    with pytest.raises(ValueError, match="this Gated is in tiles already"):
        tiled(module)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="tile_size must be a positive int"):
            tiled(Gated(), wrong)
    with pytest.raises(ValueError, match=r"tiled must be given an nn\.Module"):
        tiled(torch.relu, 4)
    with pytest.raises(NotImplementedError, match="Neighbours cannot be computed in tiles: what it makes of a token depends"):
        tiled(case(Neighbours)[0], 16)(x)
    with pytest.raises(NotImplementedError, match=r"given a tensor \[3, 2\] that has no row for each of 46 tokens"):
        tiled(case(Experts)[0], 16)(x, torch.ones(3, 2), 1.0)
    module, _ = case()
    scale = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)
    module.up.register_forward_pre_hook(lambda module, given: (given[0] * scale,))
    with pytest.raises(NotImplementedError, match=r"a tensor \[8\] that needs a gradient and is none of its parameters"):
        tiled(module, 16)(x)

    class Summing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(1)

    with pytest.raises(NotImplementedError, match="does not return tensors with a row for each token"):
        tiled(Summing(), 16)(x)
