"""Second derivatives and forward mode are refused by every road that torch has; first derivatives by the same roads are right."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd import functional as AF
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

import ring_attn
from ring_attn import RingAttention, flash, ring_attention

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),  # what forward mode loads
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # Dynamo's
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning"),  # where it goes on
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
]
ONCE, FORWARD = "ring_attention can be differentiated once", "ring_attention has no forward-mode derivative"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V, W = normal(1, 6, 4, 4), normal(1, 6, 2, 4, seed=1), normal(1, 6, 2, 4, seed=2), normal(1, 6, 4, 4, seed=3)
MODULE = RingAttention(16, 4, batch_first=True, mesh="local", dtype=torch.float64)
STARTS = torch.tensor([0, 2, 6], dtype=torch.int32)


def attention(q: Tensor) -> Tensor:
    return ring_attention(q, K, V, mesh="local", causal=True)


def module(q: Tensor) -> Tensor:
    return MODULE(*[q.flatten(2)] * 3)[0]


def packed(q: Tensor) -> Tensor:
    return flash.flash_attn_varlen_func(q[0], K[0], V[0], STARTS, STARTS, 4, 4, causal=True)


def sdpa(q: Tensor) -> Tensor:
    return ring_attn.sdpa(*(x.transpose(1, 2) for x in (q, K, V)), enable_gqa=True, mesh="local")


FACES: dict[str, Callable[[Tensor], Tensor]] = {
    "ring_attention": attention,
    "with its LSE": lambda q: torch.cat([x.flatten() for x in ring_attention(q, K, V, mesh="local", return_lse=True)]),
    "under checkpoint": lambda q: checkpoint(attention, q, use_reentrant=False),
    "RingAttention": module,
    "sdpa": sdpa,
    "flash": lambda q: flash.flash_attn_func(q, K, V, causal=True),
    "packed": packed,
    "a mask function": lambda q: ring_attention(q, K, V, mesh="local", mask_mod=lambda batch, head, i, j: i >= j),
    "compiled to the same operators": lambda q: torch.compile(attention, backend="eager", fullgraph=True)(q),
}


def energy(face: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda q: face(q).sin().sum()


def leaf(x: Tensor = Q) -> Tensor:
    return x.clone().requires_grad_()


def by_grad(f: Any) -> Any:
    q = leaf()
    (dq,) = torch.autograd.grad(f(q), q, create_graph=True)
    return torch.autograd.grad(dq.square().sum(), q)


def by_backward(f: Any) -> Any:
    """The penalty beside the loss, so that something is left if it is left out."""
    q = leaf()
    value = f(q)
    (dq,) = torch.autograd.grad(value, q, create_graph=True)
    (value + dq.square().sum()).backward()


def by_backward_with_create_graph(f: Any) -> Any:
    q = leaf()
    f(q).backward(create_graph=True)
    return torch.autograd.grad(q.grad.square().sum(), q)


def by_a_view(f: Any) -> Any:
    q = leaf()
    (dq,) = torch.autograd.grad(f(q.view_as(q)), q, create_graph=True)
    return torch.autograd.grad(dq.square().sum(), q)


def of_the_cotangent(f: Any) -> Any:
    """The gradients are linear in it."""
    q, scale = leaf(), torch.ones((), dtype=torch.float64, requires_grad=True)
    (dq,) = torch.autograd.grad(f(q), q, scale, create_graph=True)
    return torch.autograd.grad(dq.square().sum(), scale)


def maml(f: Any) -> Any:
    q = leaf()
    (dq,) = torch.autograd.grad(f(q), q, create_graph=True)
    return torch.autograd.grad(f(q - 0.1 * dq), q)


def upstream(f: Any) -> Any:
    """By a parameter that is further up."""
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    (dscale,) = torch.autograd.grad(f(Q * scale), scale, create_graph=True)
    return torch.autograd.grad(dscale.square(), scale)


SECOND = {
    "grad": by_grad,
    "grad of a view": by_a_view,
    "backward": by_backward,
    "backward(create_graph=True)": by_backward_with_create_graph,
    "the cotangent's": of_the_cotangent,
    "MAML": maml,
    "a parameter's": upstream,
    "hessian": lambda f: AF.hessian(f, Q),
    "hvp": lambda f: AF.hvp(f, Q, Q),
    "vhp": lambda f: AF.vhp(f, Q, Q),
    "jvp": lambda f: AF.jvp(f, Q, Q),  # made of two backwards
    "jacobian": lambda f: AF.hessian(f, Q, vectorize=True),
    "gradgradcheck": lambda f: torch.autograd.gradgradcheck(f, leaf()),
}
SECOND_BY_FUNC = {
    "grad of grad": lambda f: grad(lambda q: grad(f)(q).sum())(Q),
    "jacrev of jacrev": lambda f: jacrev(jacrev(f))(Q),
    "vjp of vjp": lambda f: vjp(lambda q: vjp(f, q)[1](torch.ones((), dtype=torch.float64))[0], Q)[1](Q),
    "autograd of grad": lambda f: torch.autograd.grad(grad(f)(q := leaf()).square().sum(), q),
    "autograd of vmap of grad": lambda f: torch.autograd.grad(vmap(grad(f))((q := leaf())[None]).square().sum(), q),
}


def by_dual_numbers(f: Any, enabled: bool) -> Any:
    with torch.set_grad_enabled(enabled), forward_ad.dual_level():
        return f(forward_ad.make_dual(leaf() if enabled else Q, Q))


def of_a_dual_cotangent(f: Any) -> Any:
    q = leaf()
    value = f(q)
    with forward_ad.dual_level():
        return torch.autograd.grad(value, q, forward_ad.make_dual(torch.ones_like(value), torch.ones_like(value)))


FORWARD_MODE = {
    "dual numbers": partial(by_dual_numbers, enabled=True),
    "dual numbers under no_grad": partial(by_dual_numbers, enabled=False),
    "a dual cotangent": of_a_dual_cotangent,
    "jacobian(strategy=forward-mode)": lambda f: AF.jacobian(f, Q, vectorize=True, strategy="forward-mode"),
    "hessian(outer_jacobian_strategy=forward-mode)": lambda f: AF.hessian(
        f, Q, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "gradcheck(check_forward_ad=True)": lambda f: torch.autograd.gradcheck(f, leaf(), check_forward_ad=True),
}
FORWARD_MODE_BY_FUNC = {
    "jvp": lambda f: jvp(f, (Q,), (Q,)),
    "linearize": lambda f: linearize(f, Q)[1](Q),
    "jacfwd": lambda f: jacfwd(f)(Q),
    "hessian": lambda f: hessian(f)(Q),
    "jvp of grad": lambda f: jvp(grad(f), (Q,), (Q,)),
}
SOME = ("grad", "backward", "the cotangent's", "hvp")  # of each face; all of them of one


@pytest.mark.parametrize("road", SECOND | SECOND_BY_FUNC)
def test_second_derivatives_by_every_road(road: str):
    for _ in range(2):  # the second call is one that was made before
        with pytest.raises(NotImplementedError, match=ONCE):
            (SECOND | SECOND_BY_FUNC)[road](energy(attention))


@pytest.mark.parametrize("road", FORWARD_MODE | FORWARD_MODE_BY_FUNC)
def test_forward_mode_by_every_road(road: str):
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=FORWARD):
            (FORWARD_MODE | FORWARD_MODE_BY_FUNC)[road](energy(attention))


@pytest.mark.parametrize("face", FACES)
def test_every_face_refuses(face: str):
    for road in SOME:
        with pytest.raises(NotImplementedError, match=ONCE):
            SECOND[road](energy(FACES[face]))
    for road in ("dual numbers", "dual numbers under no_grad"):
        if face != "compiled to the same operators":  # which Dynamo does not leave
            # Of a checkpoint's own function torch 2.11 says so itself.
            with pytest.raises(RuntimeError, match=f"{FORWARD}|implement the jvp function"):
                FORWARD_MODE[road](energy(FACES[face]))


@pytest.mark.parametrize("face", FACES)
def test_gradients_that_may_be_differentiated_are_the_same(face: str):
    q = leaf()
    (plain,) = torch.autograd.grad(energy(FACES[face])(q), q)
    (again,) = torch.autograd.grad(energy(FACES[face])(q), q, create_graph=True)
    assert torch.equal(plain, again) and again.requires_grad and not plain.requires_grad


def test_what_does_not_depend_on_attention_is_left_alone():
    """A loss with ``create_graph=True`` whose second derivative leads past attention."""
    q, other = leaf(), leaf(W)
    (dother,) = torch.autograd.grad((attention(q).sum() + other.pow(3).sum()), other, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(dother.sum(), other)[0], 6 * other)
    (dq,) = torch.autograd.grad(attention(q).sin().sum(), q, create_graph=True)
    assert not dq.detach().requires_grad  # first-order MAML


# --------------------------------------------------------------------------------------------------------------- compiled


def compiled(function: Any, backend: str, **more: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, **more)


# What AOTAutograd, which inductor is made of, says of a second backward of any operator; the second where its gradients lead
# nowhere, which autograd.grad tells unless ``allow_unused`` is given.
TWICE = "does not currently support double backward|appears to not have been used"
THROUGH_FUNCTIONAL = ("hessian", "hvp", "vhp", "jvp", "jacobian")


@pytest.mark.wide
@pytest.mark.parametrize("road", SECOND)
def test_a_compiled_loss(road: str):
    with pytest.raises(NotImplementedError, match=ONCE):
        SECOND[road](compiled(energy(attention), "eager", fullgraph=True))
    with pytest.raises((NotImplementedError, RuntimeError), match=f"{ONCE}|{TWICE}"):
        SECOND[road](compiled(energy(attention), "aot_eager", fullgraph=True))


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("road", THROUGH_FUNCTIONAL)
def test_functional_of_a_compiled_loss(road: str, backend: str):
    """It was 0, in silence, where the operands were views, as ``functional`` makes them."""
    f = energy(attention)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=ONCE):
            SECOND[road](compiled(f, backend, fullgraph=True))
        with pytest.raises(NotImplementedError, match=ONCE):
            compiled(lambda: SECOND[road](f), backend)()


def test_functional_of_what_is_compiled_and_differentiated_once():
    f = energy(attention)
    right = AF.jacobian(f, Q)
    torch.testing.assert_close(AF.jacobian(compiled(f, "aot_eager"), Q), right)
    torch.testing.assert_close(AF.vjp(compiled(f, "aot_eager"), Q)[1], right)
    frozen = torch.no_grad()(compiled(attention, "aot_eager"))  # a graph without gradients
    found = AF.hessian(lambda x: (x**3 * frozen(Q).sum()).sum(), Q[0, 0, 0])
    torch.testing.assert_close(found, torch.diag(6 * Q[0, 0, 0] * attention(Q).sum()))


@pytest.mark.wide
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("road", ["dual numbers", "dual numbers under no_grad"])
def test_dual_numbers_in_a_compiled_loss(backend: str, road: str):
    with pytest.raises(NotImplementedError, match=FORWARD):
        FORWARD_MODE[road](compiled(energy(attention), backend))


def test_torch_func_within_a_compiled_function():
    """Its gradient was 0, in silence: the operators of a graph have no derivatives for it. The graph breaks there."""
    f = energy(attention)
    torch.testing.assert_close(compiled(lambda q: grad(f)(q), "aot_eager")(Q), grad(f)(Q))
    torch.testing.assert_close(compiled(lambda q: vmap(grad(f))(q[None]), "aot_eager")(Q)[0], grad(f)(Q))
    with pytest.raises(NotImplementedError, match=ONCE):
        compiled(lambda q: grad(lambda q: grad(f)(q).sum())(q), "aot_eager")(Q)
    with pytest.raises((NotImplementedError, RuntimeError), match=FORWARD):
        compiled(lambda q: jvp(f, (q,), (q,)), "aot_eager")(Q)
    for transform in (grad, jacfwd):
        with pytest.raises(Exception, match=r"`apply` .* should not be traced|no forward-mode"):  # torch's Unsupported
            compiled(lambda q: transform(f)(q), "aot_eager", fullgraph=True)(Q)  # noqa: B023


def test_an_operator_by_itself_has_its_gradient():
    """As in an exported graph."""

    class Model(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attention(q * 2)

    q = leaf()
    program = torch.export.export(Model(), (Q,)).module()
    found = torch.autograd.grad(program(q).sin().sum(), q)
    torch.testing.assert_close(found, torch.autograd.grad(Model()(q).sin().sum(), q), rtol=1e-13, atol=1e-13)
    with pytest.raises(NotImplementedError, match=ONCE):
        by_grad(lambda q: program(q).sin().sum())
