"""What keeps the keys and values of a long prompt and attends to them: this library's cache over a ring, torch's SDPA on one GPU,
and the floor of a ring."""

from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.ring.llama import Stack
from ring_attn import Ring
from ring_attn.generation import KVCache

NEW = 4096  # tokens that a cache has room for; a system that has generated as many begins again
SDPA: dict[str, SDPBackend | None] = {
    "sdpa": None,
    "sdpa, flash": SDPBackend.FLASH_ATTENTION,
    "sdpa, cuDNN": SDPBackend.CUDNN_ATTENTION,
}


class System(Protocol):
    """What keeps keys and values and attends to them."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def fill(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep these, of the whole prompt."""

    def prefill(self, stack: Stack, x: Tensor) -> "System":
        """A new system, after ``stack`` has run on the whole prompt's inputs ``x [1, tokens, width]``."""

    def position(self) -> Tensor:
        """Of the next token, ``[1, 1]``."""

    @property
    def nbytes(self) -> int: ...


class Ours:
    def __init__(self, ring: Ring, entries: int, tokens: int) -> None:
        self.ring, self.entries, self.tokens = ring, entries, tokens
        self.cache = KVCache(ring, max_length=tokens + NEW)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = self.cache.layers.get(layer)
        if kept is not None and kept.appended == NEW:
            kept.appended = 0
        return self.cache.attend(layer, q, k, v)

    def fill(self, layer: int, k: Tensor, v: Tensor) -> None:
        if self.cache.lengths is None:
            with self.cache.prompt(torch.zeros(self.entries, self.tokens, dtype=torch.int64, device=k.device)) as part:
                self.positions, self.segments = part.position_ids, torch.zeros_like(part.position_ids)
        self.cache.keep(layer, self.ring.shard(k), self.ring.shard(v), self.positions, self.segments)

    def prefill(self, stack: Stack, x: Tensor) -> "Ours":
        new = Ours(self.ring, self.entries, self.tokens)
        with new.cache.prompt(torch.zeros(self.entries, self.tokens, dtype=torch.int64, device=x.device)) as part:
            stack(self.ring.shard(x), part.position_ids, new.attend)
        return new

    def position(self) -> Tensor:
        return torch.full((self.entries, 1), self.tokens, device=self.cache.layers[0].contents.key.device)

    def again(self) -> None:
        """Begins anew where the room is taken."""
        counts = self.cache.counts()
        if max(counts.values(), default=0) >= NEW - 1:
            self.cache.set_counts(dict.fromkeys(counts, 0))

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes


class Sdpa:
    """torch's attention of one GPU, ``[entries, heads, tokens, dim]`` as it wants them."""

    def __init__(self, backend: SDPBackend | None, tokens: int) -> None:
        self.backend, self.tokens = backend, tokens
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.appended: dict[int, int] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if layer not in self.kept:  # the prompt
            self._keep(layer, k, v)
            return self._attention(q, k, v, is_causal=True)
        place = self.tokens + self.appended[layer] % NEW
        self.appended[layer] += 1
        for kept, new in zip(self.kept[layer], (k, v), strict=True):
            kept[:, :, place : place + 1] = new
        return self._attention(q, *(kept[:, :, : place + 1] for kept in self.kept[layer]))

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        with nullcontext() if self.backend is None else sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)

    def _keep(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.kept[layer] = tuple(F.pad(x, (0, 0, 0, NEW)) for x in (k, v))  # type: ignore[assignment]  # two of them
        self.appended[layer] = 0

    def fill(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._keep(layer, k.transpose(1, 2), v.transpose(1, 2))

    def prefill(self, stack: Stack, x: Tensor) -> "Sdpa":
        new = Sdpa(self.backend, self.tokens)
        stack(x, torch.arange(self.tokens, device=x.device)[None], new.attend)
        return new

    def position(self) -> Tensor:
        return torch.full((len(self.kept[0][0]), 1), self.tokens, device=self.kept[0][0].device)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for pair in self.kept.values() for x in pair)


class Floor(Sdpa):
    """A rank's keys by torch's flash attention, and one collective."""

    def __init__(self, ring: Ring, tokens: int) -> None:
        super().__init__(None, tokens)
        self.ring = ring

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        key, value = self.kept[layer]
        entries, _, heads, dim = q.shape
        groups = q.view(entries, key.shape[1], -1, dim)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(groups, key, value)[:2]
        part = torch.cat([out.float(), lse[..., None]], -1)
        parts = part.new_empty(self.ring.size, *part.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), part, group=self.ring.processes.group)
        weights = parts[..., dim:].softmax(0)
        return (parts[..., :dim] * weights).sum(0).to(q.dtype).view(entries, 1, heads, dim)

    def fill(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.kept[layer] = self.ring.shard(k).transpose(1, 2).contiguous(), self.ring.shard(v).transpose(1, 2).contiguous()

    def prefill(self, stack: Stack, x: Tensor) -> "Floor":
        raise NotImplementedError("it has no attention for prompts")
