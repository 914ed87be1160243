"""One rank of the tests of ``sdpa`` and its manager. Run by tests/ring_attn/test_sdpa.py under torch.distributed.run.

What the ranks compute from their shards must be the shards of what torch's own function gives on the whole sequence, forward and
backward.
"""

import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ring_attn import Ring, context_parallel_sdpa, sdpa, sync_gradients
from tests.support.healthy import gloo_world
from torch_bridge.call import sanity_checks

LENGTH = 16
ZIGZAG = Ring(layout="zigzag")


def noise(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual, expected, name):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}: {text}")


def own(tensor, ring, dim):
    return ring.shard(tensor.detach(), dim=dim).requires_grad_(tensor.requires_grad)


def check_function(ring):
    hidden = noise(2, 1, 1, LENGTH, seed=4) > 0.5
    added = noise(2, LENGTH, LENGTH, seed=5).masked_fill(noise(2, LENGTH, LENGTH, seed=6) > 0.5, float("-inf")).requires_grad_()
    for name, mask, options in [
        ("causal, grouped", None, {"is_causal": True, "enable_gqa": True, "scale": 0.3}),
        ("padding", ~hidden, {"enable_gqa": True}),
        ("float mask", added, {}),
        ("bool mask", noise(LENGTH, LENGTH, seed=7) > 0, {}),
    ]:
        kv_heads = 1 if options else 2
        shapes = ((2, 3, 2, LENGTH, 4), *((2, 1, kv_heads, LENGTH, dim) for dim in (4, 5)))
        whole = [noise(*shape, seed=10 + place).requires_grad_() for place, shape in enumerate(shapes)]
        upstream = noise(2, 3, 2, LENGTH, 5, seed=20)
        given = mask if mask is None else mask.reshape(2, 1, 1, 1, LENGTH) if name == "padding" else mask
        out = F.scaled_dot_product_attention(*whole, attn_mask=given, **options)
        out.backward(upstream)
        shards = [own(x, ring, -2) for x in whole]
        rows = given if given is None or given.shape[-2] == 1 else own(given, ring, -2)
        ours = sdpa(*shards, rows, ring=ring, **options)
        ours.backward(own(upstream, ring, -2))
        close(ours.detach(), own(out, ring, -2).detach(), name)
        for shard, x in zip(shards, whole, strict=True):
            close(shard.grad, ring.shard(x.grad, dim=-2), name)
        if rows is added or (rows is not None and rows.requires_grad):
            close(rows.grad, ring.shard(added.grad, dim=-2), name)


class Model(nn.Module):
    """A model that knows nothing of rings: positions, causal self-attention, attention to a text."""

    def __init__(self, recompute=None):
        super().__init__()
        torch.manual_seed(0)
        self.recompute = recompute
        self.places = nn.Embedding(LENGTH, 8, dtype=torch.float64)
        self.inner, self.text, self.out = (nn.Linear(8, 24, dtype=torch.float64) for _ in range(3))

    def forward(self, x, places, text):
        x = x + self.places(places)
        block = self.block if self.recompute is None else lambda *args: checkpoint(self.block, *args, use_reentrant=self.recompute)
        return self.out(block(block(x, text), text))

    def block(self, x, text):
        q, k, v = (h.unflatten(-1, (2, 4)).transpose(1, 2) for h in self.inner(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        _, k, v = (h.unflatten(-1, (2, 4)).transpose(1, 2) for h in self.text(text).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def gradients(model, loss):
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check_manager(ring):
    """Text that every rank holds whole, also with as many tokens as a shard has, and text that is sharded."""
    for cross, recompute, tokens in [
        ("whole", None, 6),
        ("whole", True, 6),
        ("whole", False, 6),
        (None, None, 8),
        ("sharded", None, 12),
    ]:
        check_model(ring, cross, recompute, noise(2, tokens, 8, seed=2))


def check_model(ring, cross, recompute, text):
    x, weights = noise(2, LENGTH, 8, seed=1), noise(2, LENGTH, 24, seed=3)
    whole_text = text.clone().requires_grad_()
    reference = Model()
    out = reference(x, torch.arange(LENGTH), whole_text)
    expected = gradients(reference, (out * weights).sum())
    model = Model(recompute)
    shared = (ring.shard(text) if cross == "sharded" else text).clone().requires_grad_()
    with context_parallel_sdpa(ring=ring, cross=cross):
        ours = model(ring.shard(x), ring.positions(LENGTH), shared)
    close(ours.detach(), ring.shard(out.detach()), cross)
    gradients(model, (ours * ring.shard(weights)).sum())  # the manager has been left
    sync_gradients(model, ring=ring)
    for name, parameter in model.named_parameters():
        close(parameter.grad, expected[name], f"{cross}, {recompute}, {name}")
    if cross != "sharded":
        dist.all_reduce(shared.grad)
    close(shared.grad, ring.shard(whole_text.grad) if cross == "sharded" else whole_text.grad, cross)


def check_refusals():
    q, text = noise(1, 2, 8, 4, seed=1), noise(1, 2, 6, 4, seed=2)
    for name, words, options, call in [
        ("a local mask", "columns the 16 keys", {}, lambda: F.scaled_dot_product_attention(q, q, q, torch.ones(8, 8).bool())),
        ("a whole mask", "cut the rows", {}, lambda: F.scaled_dot_product_attention(q, q, q, torch.ones(16, 16).bool())),
        ("unknown keys", 'cross="whole"', {}, lambda: F.scaled_dot_product_attention(q, text, text)),
        ("causal", "held whole", {"cross": "whole"}, lambda: F.scaled_dot_product_attention(q, text, text, is_causal=True)),
    ]:
        try:
            with context_parallel_sdpa(**options):
                call()
        except (ValueError, NotImplementedError) as error:
            assert words in str(error), f"{name}: {error}"
        else:
            raise AssertionError(f"{name} was not refused")


def check_own_positions():
    """A model that counts its own positions is warned of, once; one that is given those of the sequence is not."""
    local, table = LENGTH // ZIGZAG.size, torch.randn(64, 4)

    def told(make):
        sanity_checks.warn_once.cache_clear()
        with warnings.catch_warnings(record=True) as caught, context_parallel_sdpa(ring=ZIGZAG):
            warnings.simplefilter("always")
            q = ZIGZAG.shard(noise(1, 2, LENGTH, 4, seed=1), dim=-2) + make().double()
            q = q[..., :4] + q[:, :, :local]
            for _ in range(2):
                F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return [str(warning.message) for warning in caught]

    for make in (lambda: torch.arange(local)[:, None], lambda: torch.arange(0, local)[:, None], lambda: table[:local]):
        (words,) = told(make)
        assert "something was made of the positions 0 to 8" in words, words
    for make in (lambda: ZIGZAG.positions(LENGTH)[:, None], lambda: table[ZIGZAG.positions(LENGTH)], lambda: torch.arange(4)):
        assert not told(make)


def check_compiled():
    """A compiled model is compiled anew for another ring."""
    q = noise(1, 2, LENGTH, 4, seed=3)
    compiled = torch.compile(F.scaled_dot_product_attention, backend="aot_eager")
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    own_part = ZIGZAG.shard(q, dim=-2)
    for ring in (ZIGZAG, Ring("local"), ZIGZAG):
        with context_parallel_sdpa(ring=ring):
            out = compiled(own_part, own_part, own_part, is_causal=True)
        local = F.scaled_dot_product_attention(own_part, own_part, own_part, is_causal=True)
        close(out, local if ring.size == 1 else ZIGZAG.shard(expected, dim=-2), f"compiled, {ring}")


def main():
    with gloo_world("sdpa"):
        for ring in (ZIGZAG, Ring()):
            check_function(ring)
        check_manager(ZIGZAG)
        check_refusals()
        check_own_positions()
        check_compiled()


if __name__ == "__main__":
    main()
