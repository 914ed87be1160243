"""The loss of hidden states a chunk at a time, against the loss of the whole logits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ring_attn import chunked_cross_entropy, cross_entropy, shard_batch
from ring_attn.training import chunked_loss

TOKENS, WIDTH, VOCABULARY = 23, 8, 31


class Capped(nn.Module):
    """A head that does more than a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, VOCABULARY), nn.Parameter(torch.tensor(1.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return 5 * torch.tanh(self.scale * self.linear(hidden) / 5)


def case(
    dtype: torch.dtype = torch.float64, tokens: int = TOKENS, head: nn.Module | None = None
) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    head = (head or nn.Linear(WIDTH, VOCABULARY)).to(dtype)
    labels = torch.randint(VOCABULARY, (2, tokens))
    labels[0, 3:9] = -100
    return head, torch.randn(2, tokens, WIDTH, dtype=dtype, requires_grad=True), labels


def gradients(loss: Tensor, head: nn.Module, hidden: Tensor) -> list[Tensor]:
    wanted = [x for x in (hidden, *head.parameters()) if x.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, wanted)]


@pytest.mark.parametrize("chunk", [1, 7, 46, 1000])
@pytest.mark.parametrize("options", [{}, {"num_items": 5}, {"label_smoothing": 0.1}, {"ignore_index": 3}], ids=str)
@pytest.mark.parametrize("make", [lambda: None, Capped], ids=["linear", "capped"])
def test_it_is_the_loss_of_the_whole_logits(chunk, options, make):
    head, hidden, labels = case(head=make())
    labels = labels.where(labels >= 0, options.get("ignore_index", -100))
    plain = cross_entropy(head(hidden), labels, mesh="local", **options)
    ours = chunked_cross_entropy(head, hidden, labels, chunk_size=chunk, mesh="local", **options)
    torch.testing.assert_close(gradients(3 * ours, head, hidden), gradients(3 * plain, head, hidden), rtol=1e-11, atol=1e-13)


def test_a_batch_knows_its_count():
    head, hidden, _ = case()
    batch = shard_batch(torch.randint(VOCABULARY, (2, TOKENS)), mesh="local")
    torch.testing.assert_close(chunked_cross_entropy(head, hidden, batch), cross_entropy(head(hidden), batch))
    assert chunked_loss._where(head, hidden, batch) is None and chunked_loss._where(head, hidden, batch=batch) is None
    assert chunked_loss._where(head, hidden, batch.labels) is not None


def test_sums_over_chunks_are_float32():
    """The errors of gradients in bfloat16, of 512 chunks, are those of one product and one rounding more; summed in bfloat16, too,
    those of the head are several times as large."""
    head, hidden, labels = case(torch.bfloat16, tokens=2048)
    exact_head = nn.Linear(WIDTH, VOCABULARY).double()
    exact_head.load_state_dict(head.state_dict())
    exact_hidden = hidden.detach().double().requires_grad_()
    exact = gradients(cross_entropy(exact_head(exact_hidden), labels, mesh="local"), exact_head, exact_hidden)
    plain = gradients(cross_entropy(head(hidden), labels, mesh="local"), head, hidden)
    ours = gradients(chunked_cross_entropy(head, hidden, labels, chunk_size=8, mesh="local"), head, hidden)
    for limit, own, usual, want in zip((1.1, 1.5, 1.5, 1.5), ours, plain, exact, strict=True):
        assert (own.double() - want).norm() <= limit * (usual.double() - want).norm() + 1e-6 * want.norm()


class Largest(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.numel, self.dtype = 0, dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            counts = isinstance(x, Tensor) and self.dtype in (None, x.dtype)
            self.numel = max(self.numel, x.numel() if counts else 0)
        return out


def test_logits_never_exist_as_a_whole():
    head, hidden, labels = case(tokens=640)
    with Largest() as plain:
        cross_entropy(head(hidden), labels, mesh="local").backward()
    with Largest() as ours:
        chunked_cross_entropy(head, hidden, labels, chunk_size=16, mesh="local").backward()
    assert plain.numel == labels.numel() * VOCABULARY
    assert ours.numel == hidden.numel()


def test_what_needs_no_gradient_gets_none():
    head, hidden, labels = case()
    head.weight.requires_grad_(False)
    plain = gradients(cross_entropy(head(hidden), labels, mesh="local"), head, hidden)
    torch.testing.assert_close(gradients(chunked_cross_entropy(head, hidden, labels, mesh="local"), head, hidden), plain)
    data = hidden.detach()
    torch.testing.assert_close(gradients(chunked_cross_entropy(head, data, labels, mesh="local"), head, data)[1], plain[2])
    head.bias.requires_grad_(False)
    assert not chunked_cross_entropy(head, data, labels, mesh="local").requires_grad
    with torch.no_grad():
        torch.testing.assert_close(chunked_cross_entropy(head, hidden, labels, chunk_size=5, mesh="local"), plain[0])


def test_a_tied_head_adds_to_the_embedding():
    found = []
    for loss_of in (lambda head, *given, **where: cross_entropy(head(given[0]), given[1], **where), chunked_cross_entropy):
        head, _, labels = case()
        hidden = nn.functional.embedding(labels.clamp(min=0), head.weight)
        loss_of(head, hidden, labels, mesh="local").backward()
        found.append(head.weight.grad)
    torch.testing.assert_close(*found)


def test_hooks_of_parameters_run_once():
    head, hidden, labels = case()
    hidden.register_hook(lambda gradient: 3 * gradient)
    head.weight.register_hook(lambda gradient: gradient / 2)
    plain = gradients(cross_entropy(head(hidden), labels, mesh="local"), head, hidden)
    ours = gradients(chunked_cross_entropy(head, hidden, labels, chunk_size=7, mesh="local"), head, hidden)
    torch.testing.assert_close(ours, plain)


def test_a_parameter_that_the_head_does_not_use_gets_no_gradient():
    """An optimizer leaves it as it is; of zeros it would make weight decay."""
    head, hidden, labels = case()
    head.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    chunked_cross_entropy(head, hidden, labels, chunk_size=7, mesh="local").backward()
    assert head.unused.grad is None and head.weight.grad is not None


def test_the_backward_makes_no_wide_tensor():
    """Of the head's size: its gradient goes from float32 to the parameter's dtype as it is multiplied."""
    head, hidden, labels = case(torch.bfloat16)
    loss = chunked_cross_entropy(head, hidden, labels, chunk_size=7, mesh="local")
    with Largest(torch.float32) as seen:
        (2 * loss).backward()
    assert seen.numel <= 1


def test_no_label_and_no_token():
    head, hidden, labels = case()
    loss = chunked_cross_entropy(head, hidden, labels.fill_(-100), mesh="local")
    assert [x.abs().sum().item() for x in gradients(loss, head, hidden)] == [0, 0, 0, 0]
    assert chunked_cross_entropy(head, hidden[:, :0], labels[:, :0], mesh="local").item() == 0


def test_it_can_be_compiled_and_mapped():
    head, hidden, labels = case()
    call = lambda hidden: chunked_cross_entropy(head, hidden, labels, chunk_size=16, num_items=9, mesh="local")  # noqa: E731
    torch.testing.assert_close(torch.compile(call, backend="aot_eager")(hidden), call(hidden))
    (expected,) = torch.autograd.grad(call(hidden), hidden)
    torch.testing.assert_close(torch.func.grad(call)(hidden.detach()), expected)


def test_what_it_cannot_do_is_refused():
    head, hidden, labels = case()
    loss = chunked_cross_entropy(head, hidden, labels, mesh="local")
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="chunk_size must be a positive int"):
            chunked_cross_entropy(head, hidden, labels, chunk_size=wrong, mesh="local")
    with pytest.raises(ValueError, match="hidden must be"):
        chunked_cross_entropy(head, hidden[:, 1:], labels, mesh="local")
    with pytest.raises(ValueError, match=r"head must be an nn\.Module"):
        chunked_cross_entropy(head.forward, hidden, labels, mesh="local")
    scale = torch.ones(VOCABULARY, dtype=torch.float64, requires_grad=True)
    head.register_forward_hook(lambda module, given, logits: logits * scale)
    with pytest.raises(ValueError, match=r"a tensor \[31\] that needs a gradient and is none of its parameters"):
        chunked_cross_entropy(head, hidden, labels, mesh="local")
    for wrong in (-1, torch.tensor([1, 2])):
        with pytest.raises(ValueError, match="num_items must"):
            chunked_cross_entropy(head, hidden, labels, num_items=wrong, mesh="local")
    with pytest.raises(ValueError, match="labels must hold integers"):
        chunked_cross_entropy(head, hidden, labels.float(), mesh="local")
