"""A small byte-level Transformer. Its attention is passed in, so the same model runs on a ring and in one process."""

from collections.abc import Callable
from pathlib import Path
from sysconfig import get_paths

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ring_attn.generation import KVCache

AttentionFactory = Callable[[], nn.Module]


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, attention: nn.Module):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = attention
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, **options) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False, **options)[0]
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    """Bytes ``[batch, seq]`` and their positions ``[batch, seq]`` to logits ``[batch, seq, 256]``.

    Everything except attention works on each position separately, so the model works on any subset of the positions. ``cache``: a
    ring_attn.generation.KVCache for its attention; while it takes in a prompt there are no logits, because nobody reads them.
    """

    def __init__(self, width: int, layers: int, positions: int, attention: AttentionFactory):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, attention()) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, input_ids: Tensor, position_ids: Tensor, cache: KVCache | None = None) -> Tensor:
        x = self.bytes(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x) if cache is None else block(x, cache=cache)
        return x if cache is not None and cache.prefilling else self.head(self.norm(x))


class SdpaAttention(nn.MultiheadAttention):
    """torch's causal attention over the whole sequence, as the reference. Same parameters as nn.MultiheadAttention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs) -> tuple[Tensor, None]:  # type: ignore[override]
        projected = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in projected)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2)), None


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy summed over the labels other than -100, so that the sums of a ring's shards can be added up."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def standard_library_text(least: int) -> Tensor:
    """The source of Python's standard library as at least ``least`` bytes (int64): real text that every machine has."""
    folder = Path(get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < least:
        raise SystemExit(f"{folder} holds {len(text)} bytes of Python source; the demo needs {least}: choose a smaller --context")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def window(text: Tensor, step: int, length: int) -> Tensor:
    """The ``[1, length]`` bytes to train on at ``step``, the same on every process."""
    start = torch.randint(len(text) - length + 1, (), generator=torch.Generator().manual_seed(step)).item()
    return text[int(start) : int(start) + length].unsqueeze(0)
