"""ring_attention under torch.func: grad, vjp, functional_call and vmap, alone and in one another, against a loop."""

import pytest
import torch
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from ring_attn import RingAttention, ring_attention

ENTRIES = 3


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V = normal(2, 6, 4, 8), normal(2, 6, 2, 8, seed=1), normal(2, 6, 2, 5, seed=2)
MAPPED = normal(ENTRIES, 2, 6, 4, 8, seed=3), normal(2, ENTRIES, 6, 2, 8, seed=4), normal(2, 6, 2, ENTRIES, 5, seed=5)
DIMS = 0, 1, 3


def score(q, k, v, **options):
    return ring_attention(q, k, v, mesh="local", causal=True, **options).sin().sum()


def gradients(function, *inputs):
    inputs = [x.detach().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*inputs), inputs)


def of_each(function, *inputs, dims):
    """What vmap should give: the function of every entry, stacked."""
    results = [
        function(*(x if dim is None else x.select(dim, number) for x, dim in zip(inputs, dims, strict=True)))
        for number in range(ENTRIES)
    ]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results)
    return tuple(map(torch.stack, zip(*results, strict=True)))


def assert_maps(function, *inputs, dims):
    """vmap, vmap of grad, and grad of vmap."""
    places = tuple(range(len(inputs)))
    mapped = vmap(function, in_dims=dims)
    torch.testing.assert_close(mapped(*inputs), of_each(function, *inputs, dims=dims))
    each = vmap(grad(function, argnums=places), in_dims=dims)
    torch.testing.assert_close(each(*inputs), of_each(lambda *x: gradients(function, *x), *inputs, dims=dims))
    total = grad(lambda *x: mapped(*x).sum(), argnums=places)
    torch.testing.assert_close(total(*inputs), gradients(lambda *x: of_each(function, *x, dims=dims).sum(), *inputs))


def test_grad_and_vjp():
    torch.testing.assert_close(grad(score, argnums=(0, 1, 2))(Q, K, V), gradients(score, Q, K, V))
    (out, lse), pull = vjp(lambda *x: ring_attention(*x, mesh="local", return_lse=True), Q, K, V)
    expected = gradients(lambda *x: sum(y.sum() for y in ring_attention(*x, mesh="local", return_lse=True)), Q, K, V)
    torch.testing.assert_close(pull((torch.ones_like(out), torch.ones_like(lse))), expected)


OPTIONS = {
    "nothing": {},
    "bias and mask": dict(bias=normal(4, 6, 6, seed=6), mask=normal(2, 1, 6, 6, seed=7) > -1),
    "ids": dict(q_segment_ids=torch.arange(6) // 3, q_position_ids=torch.arange(12).view(2, 6)),
    "dropout": dict(dropout_p=0.5, dropout_seed=3),
    "a mask function of the batch": dict(mask_mod=lambda batch, head, q, k: q - k < 2 + batch),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_vmap(case):
    assert_maps(lambda q, k, v: score(q, k, v, **OPTIONS[case]), *MAPPED, dims=DIMS)


def test_vmap_over_queries_alone():
    assert_maps(score, MAPPED[0], K, V, dims=(0, None, None))


OTHERS = {
    "sinks": normal(4, seed=8),
    "bias": normal(4, 6, 6, seed=9),
    "bias of one batch entry": normal(1, 1, 6, 6, seed=9),
    "bias of each batch entry": normal(2, 4, 6, 6, seed=9),
    "alibi_slopes": normal(4, seed=10).abs(),
}


@pytest.mark.parametrize("case", OTHERS)
def test_vmap_over_further_operands(case):
    """Shared by all entries, where each still has its own gradient, and mapped."""
    name, other = case.split()[0], OTHERS[case]

    def function(q, x):
        return score(q, K, V, **{name: x})

    assert_maps(function, MAPPED[0], other, dims=(0, None))
    assert_maps(function, MAPPED[0], torch.stack([other, 2 * other, other / 2], -1), dims=(0, other.dim()))


def test_vmap_over_long_ids():
    ids = torch.arange(ENTRIES * 6).view(ENTRIES, 6) // 4

    def function(q, ids):
        return score(q, K, V, q_segment_ids=ids)

    torch.testing.assert_close(vmap(function)(MAPPED[0], ids), of_each(function, MAPPED[0], ids, dims=(0, 0)))
    with pytest.raises(ValueError, match="q_segment_ids must fit in int32"):
        vmap(function)(MAPPED[0], ids + 2**32)


def test_drawn_dropout_follows_vmaps_randomness():
    q = MAPPED[0][:1].expand(ENTRIES, -1, -1, -1, -1)

    def mapped(randomness):
        torch.manual_seed(0)
        return vmap(lambda q: ring_attention(q, K, V, mesh="local", dropout_p=0.5), randomness=randomness)(q)

    same, different = mapped("same"), mapped("different")
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])
    with pytest.raises(RuntimeError, match="randomness"):
        mapped("error")


def test_functional_call_and_a_gradient_for_each_sample():
    module = RingAttention(16, 4, batch_first=True, mesh="local", sinks=True, num_kv_heads=2, dtype=torch.float64)
    parameters, samples = dict(module.named_parameters()), normal(ENTRIES, 2, 6, 16, seed=11)

    def loss(parameters, x):
        return functional_call(module, parameters, (x, x, x))[0].sin().sum()

    each = vmap(grad(loss), in_dims=(None, 0))(parameters, samples)
    ensemble = {name: torch.stack([x, 1.5 * x, 0.5 * x]).detach() for name, x in parameters.items()}
    losses = vmap(loss, in_dims=(0, None))(ensemble, samples[0])
    for number in range(ENTRIES):
        x = samples[number]
        expected = torch.autograd.grad(module(x, x, x)[0].sin().sum(), list(parameters.values()))
        torch.testing.assert_close([each[name][number] for name in parameters], list(expected))
        torch.testing.assert_close(losses[number], loss({name: x[number] for name, x in ensemble.items()}, samples[0]))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # what torch.func.jvp loads
def test_what_has_no_derivative_is_refused():
    def function(q):
        return score(q, K, V)

    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        jvp(function, (Q,), (Q,))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        hessian(function)(Q)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        grad(lambda q: grad(function)(q).sum())(Q)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        jacrev(jacrev(function))(Q)
