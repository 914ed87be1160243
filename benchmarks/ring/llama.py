"""A Llama's layers around any attention, for benchmarks of generation."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v), each [entries, tokens, heads, dim]


class Stack(nn.Module):
    """The attention part of a Llama: ``x [entries, tokens, heads * dim]`` to the same; with an MLP of the width ``mlp`` in
    each layer, and the last token's logits of a ``vocabulary``, where these are no 0."""

    def __init__(self, layers: int, heads: tuple[int, int, int], mlp: int = 0, vocabulary: int = 0) -> None:
        super().__init__()
        query, kv, self.dim = heads
        width = query * self.dim
        self.sizes = [query * self.dim, kv * self.dim, kv * self.dim]
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.inner = nn.ModuleList(nn.Linear(width, sum(self.sizes), bias=False) for _ in range(layers))
        self.outer = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.mlps = nn.ModuleList(Mlp(width, mlp) if mlp else nn.Identity() for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False) if vocabulary else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        frequencies = 500000 ** (-torch.arange(0, self.dim, 2, device=x.device) / self.dim)
        angle = positions[..., None, None] * frequencies
        turn = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        parts = zip(self.norms, self.inner, self.outer, self.mlps, strict=True)
        for layer, (norm, inner, outer, mlp) in enumerate(parts):
            q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in inner(norm(x)).split(self.sizes, -1))
            x = mlp(x + outer(attend(layer, rotated(q, *turn), rotated(k, *turn), v).flatten(2)))
        return self.head(x[:, -1:])


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
