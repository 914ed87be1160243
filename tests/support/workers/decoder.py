"""A tiny decoder, and its gradients as one process with torch's attention computes them."""

import copy
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from ring_attn import Ring, ShardedBatch

VOCABULARY, WIDTH, HEADS, KV_HEADS, LAYERS = 32, 16, 4, 2, 2
HEAD_DIM = WIDTH // HEADS
ROWS, LENGTH = 4, 16  # the global batch
IGNORED = -100


class Attention(nn.Module):
    """Causal attention on as many heads as its projections give: all of them, or this rank's under tensor parallelism."""

    def __init__(self, ring: Ring | None) -> None:
        super().__init__()
        self.ring = ring
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        if self.ring is None:
            q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
        else:
            out = self.ring.attention(q, k, v, causal=True)
        return self.out(out.flatten(2))


class Block(nn.Module):
    def __init__(self, ring: Ring | None) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(ring)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """Tokens ``[batch, shard]`` to logits. As a pipeline's stage it may lack embeddings, and takes hidden states, or the head."""

    def __init__(self, ring: Ring | None) -> None:
        super().__init__()
        self.ring = ring
        self.tokens: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.places: nn.Module | None = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleDict({str(layer): Block(ring) for layer in range(LAYERS)})
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.places is not None:
            x = self.tokens(x) + self.places(self.positions())
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def positions(self) -> Tensor:
        return torch.arange(LENGTH) if self.ring is None else self.ring.positions(LENGTH)


@cache
def initial() -> Decoder:
    torch.manual_seed(0)
    return Decoder(None).double()


def decoder(ring: Ring | None) -> Decoder:
    model = copy.deepcopy(initial())
    for module in model.modules():
        if isinstance(module, (Decoder, Attention)):
            module.ring = ring
    return model


def tokens() -> tuple[Tensor, Tensor]:
    """The global batch and its labels, of which every row and every shard has another number."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[torch.rand(ROWS, LENGTH, generator=generator) < torch.linspace(0, 0.6, ROWS)[:, None]] = IGNORED
    return input_ids, labels


def rows(ring: Ring, part: int = 0, parts: int = 1) -> ShardedBatch:
    """This rank's shard of every ``parts``-th row."""
    input_ids, labels = (whole[part::parts] for whole in tokens())
    return ring.shard_batch(input_ids, labels, shift_labels=False)


def number_of_labels() -> int:
    return int((tokens()[1] != IGNORED).sum())


def summed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def whole_step(model: Decoder) -> Tensor:
    """The loss of one process over the whole batch; its gradients are in the model."""
    input_ids, labels = tokens()
    model.zero_grad()
    loss = summed(model(input_ids), labels) / number_of_labels()
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by the names that the plain model has."""
    return {_plain(name): whole(parameter.grad) for name, parameter in model.named_parameters()}


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {_plain(name): whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain(name: str) -> str:
    return name.replace("module.", "").replace("_checkpoint_wrapped_", "")


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], names: set[str] | None = None) -> None:
    """``names``: those that must be there, where it is not all."""
    assert set(found) == (set(expected) if names is None else names), sorted(found)
    for name, tensor in found.items():
        assert expected[name].abs().max() > 0, name
        rtol, atol = (1e-9, 1e-11) if tensor.dtype == torch.float64 else (1e-4, 1e-6)
        torch.testing.assert_close(
            tensor.double(), expected[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
