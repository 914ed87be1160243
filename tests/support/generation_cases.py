"""Sequences that go through a KVCache, as a prompt and then a few tokens at a time, beside the oracle's attention over the whole.

Used in one process, and in every process of a ring.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor, nn

from jax_core.testing.oracle import reference_attention
from ring_attn import Ring
from ring_attn.generation import KVCache

BATCH, HEADS, KV_HEADS, DIM = 3, 4, 2, 8


def odd_pairs_of_odd_heads(batch, head, q_pos, k_pos):
    return ((q_pos + k_pos + batch) % 3 != 0) | (head % 2 == 0) | (q_pos == k_pos)


@dataclass(frozen=True)
class Sequences:
    """``lengths`` of the prompts; ``steps``: how many new tokens come at a time; ``names`` of further arrays."""

    lengths: tuple[int, ...] = (22, 22, 22)
    steps: tuple[int, ...] = (1, 1, 1)
    options: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    documents: bool = False

    @property
    def whole(self) -> int:
        return max(self.lengths) + sum(self.steps)


SEQUENCES = {
    "sinks, soft cap, lengths": Sequences((22, 3, 15), (1, 1, 1), {"softcap": 3.0}, ("sinks",)),
    # More new tokens than a window holds, so that slots are taken again; several at once see one another causally.
    "window, lengths": Sequences((22, 3, 15), (1, 4, 1, 2, 1, 4, 1, 1, 1, 1, 1, 1, 1), {"sliding_window": (6, 0)}),
    "chunk, slopes": Sequences((22, 22, 22), (1, 3), {"chunk_size": 9}, ("alibi_slopes",)),
    "documents, function": Sequences((22, 9, 22), (1, 2), {"mask_mod": odd_pairs_of_odd_heads}, (), True),
    "no prompt": Sequences((0, 0, 0), (2, 1), {"sliding_window": (1, 0)}),
}


def make_arrays(case: Sequences) -> dict[str, Tensor]:
    """Whole and in natural order; entry ``b`` ends at ``lengths[b]`` and its new tokens, the rest is never used."""
    generator = torch.Generator().manual_seed(2)
    shapes = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    made = {name: torch.randn(BATCH, case.whole, heads, DIM, generator=generator).double() for name, heads in shapes.items()}
    parameters = {
        "sinks": torch.randn(HEADS, generator=generator).double(),
        "alibi_slopes": torch.linspace(0.1, 0.4, HEADS).double(),
    }
    return made | {name: parameters[name] for name in case.names}


def segments_of(case: Sequences) -> np.ndarray:
    """Two documents where the case has them: new tokens belong to the second."""
    index = np.arange(case.whole)[None]
    ends = np.array(case.lengths)[:, None]
    ids = (index >= ends // 2).astype(np.int32) if case.documents else np.zeros((BATCH, case.whole), np.int32)
    return np.where(index < ends + sum(case.steps), ids, -1)


def oracle(case: Sequences, arrays: dict[str, Tensor]) -> np.ndarray:
    names = {"softcap": "logits_soft_cap", "sinks": "softmax_aux"}
    operands = {names.get(name, name): x.numpy() for name, x in arrays.items() if name not in "qkv"}
    options = {names.get(name, name): value for name, value in case.options.items()}
    ids = segments_of(case)
    with jax.enable_x64(True):
        qkv = (arrays[name].numpy() for name in "qkv")
        found = reference_attention(*qkv, **operands, **options, causal=True, q_segment_ids=ids, kv_segment_ids=ids)
        return np.asarray(found.out)


def run(case: Sequences, ring: Ring, arrays: dict[str, Tensor]) -> tuple[KVCache, list[Tensor]]:
    """The cache, and what its steps returned, each ``[batch, tokens, heads, dim]``."""
    lengths, longest = torch.tensor(case.lengths), max(case.lengths)
    options = {**case.options, **{name: arrays[name] for name in case.names}}
    cache = KVCache(ring, max_length=case.whole, at_once=4)
    segments = torch.from_numpy(segments_of(case)[:, :longest]).clamp_min(0) if case.documents else None
    with cache.prompt(torch.zeros(BATCH, longest, dtype=torch.int64), lengths, segments) as part:
        if longest:
            cache.attend(0, *(ring.shard(ring.pad(arrays[name][:, :longest])) for name in "qkv"), **options)
            assert part.position_ids.shape == part.input_ids.shape == part.segment_ids.shape
    found = []
    for tokens in case.steps:
        place = cache.positions(tokens)
        new = (arrays[name][torch.arange(BATCH)[:, None], place] for name in "qkv")
        found.append(cache.attend(0, *new, **options))
    return cache, found


def check(case: Sequences, ring: Ring) -> KVCache:
    """Every step's attention is the oracle's over the grown sequence. Returns the cache."""
    arrays = make_arrays(case)
    cache, found = run(case, ring, arrays)
    wanted = oracle(case, arrays)
    for entry, length in enumerate(case.lengths):
        new = wanted[entry, length : length + sum(case.steps)]
        np.testing.assert_allclose(torch.cat(found, 1)[entry], new, atol=1e-12, err_msg=f"entry {entry}")
    return cache


class SmallModel(nn.Module):
    """Tokens and positions to logits, through ``cache.attend`` in two layers, the second with a window."""

    def __init__(self, window: int = 9, vocabulary: int = 64, positions: int = 4096, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * DIM
        self.options = ({"softcap": 5.0}, {"sliding_window": (window, 0)})
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.inner = nn.ModuleList(nn.Linear(width, (HEADS + 2 * KV_HEADS) * DIM) for _ in self.options)
        self.outer = nn.ModuleList(nn.Linear(width, width) for _ in self.options)
        self.sinks, self.head = nn.Parameter(torch.randn(HEADS)), nn.Linear(width, vocabulary)
        self.to(dtype)

    def forward(self, tokens: Tensor, positions: Tensor, cache: Any) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for number, (inner, outer) in enumerate(zip(self.inner, self.outer, strict=True)):
            qkv = (part.unflatten(-1, (-1, DIM)) for part in inner(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1))
            x = x + outer(cache.attend(number, *qkv, sinks=self.sinks, **self.options[number]).flatten(2))
        return self.head(x) * 3


def prompts(batch: int = 3, length: int = 37, vocabulary: int = 64) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))
