"""The forward that is under way: a context variable, because keyword arguments do not reach every layer and mask."""

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar, Token
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ring_attn.integrations.transformers.generation.cache import RingCache
from ring_attn.integrations.transformers.sequence import Sequence
from ring_attn.ring import Ring

Items: TypeAlias = int | Tensor | None  # how many labels a loss is the mean of


class Sharded:
    """What the model's hooks need to know of a sharded batch. ``whole``: the integers that it was made of, and
    fingerprints of the floats; ``entries``: what was
    made of them, by name. No dataclass: FSDP takes those apart."""

    def __init__(
        self, owner: object, sequences: dict[str, Sequence], items: Items, whole: dict[str, Tensor], entries: dict[str, Tensor]
    ) -> None:
        self.owner, self.sequences, self.items, self.whole = owner, sequences, items, whole
        self.entries = {name: (tensor, _version(tensor)) for name, tensor in entries.items()}

    def changed(self, name: str, given: Tensor) -> Tensor | None:
        """bool ``[]``, whether ``given`` is another entry than was made; a copy of it, on any device, is not. None for the entry
        itself as it was."""
        sharded, version = self.entries[name]
        if given is sharded and _version(sharded) == version:
            return None
        if given is sharded or given.shape != sharded.shape:
            return torch.ones((), dtype=torch.bool)
        return given.ne(sharded.to(given.device)).any()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Call:
    """One forward of a model. ``sharded`` is None where its inputs are whole; ``part``: which half of an encoder-decoder runs;
    ``attended``: the attentions that ran on the ring, by part; ``cache``: what keeps the keys of a sharded prompt, or
    has those that new tokens see."""

    def __init__(
        self,
        ring: Ring,
        previous: str,
        sharded: Sharded | None,
        whole_encoder: bool = False,
        head_groups: int = 1,
        cache: RingCache | None = None,
    ) -> None:
        self.ring, self.previous, self.sharded, self.whole_encoder = ring, previous, sharded, whole_encoder
        self.head_groups, self.cache = head_groups, cache
        self.part, self.attended = "decoder", Counter[str]()

    @property
    def decoding(self) -> bool:
        """Whether it runs on new tokens, which attend through the cache."""
        return self.cache is not None and self.sharded is None

    def count(self) -> None:
        self.attended[self.part] += 1


CALL: ContextVar[Call | None] = ContextVar("ring_attn_call", default=None)


class Entered(NamedTuple):
    """A forward of the model or of its base model under way, and what the loss needs once it is done. ``begun`` is None where it is
    part of another: the base model's inside the whole model's."""

    module: nn.Module
    begun: tuple[Call, Token[Call | None], Token[Callable[[], None] | None]] | None = None
    labels: Tensor | None = None
    items: Items = None
    hidden: Tensor | None = None
