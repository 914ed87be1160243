"""The forward that is under way: a context variable, because keyword arguments do not reach every layer and mask."""

from contextvars import ContextVar
from typing import Any

from ring_attn.integrations.transformers.sequence import Sequence
from ring_attn.ring import Ring


class Sharded:
    """What the model's hooks need to know of a sharded batch. No dataclass: FSDP takes those apart."""

    def __init__(self, owner: object, sequences: dict[str, Sequence], items: Any) -> None:
        self.owner, self.sequences, self.items = owner, sequences, items


class Call:
    """One forward of a model. ``sharded`` is None where its inputs are whole; ``part``: which half of an encoder-decoder runs."""

    def __init__(self, ring: Ring, previous: str, sharded: Sharded | None) -> None:
        self.ring, self.previous, self.sharded = ring, previous, sharded
        self.part, self.attended = "decoder", 0


CALL: ContextVar[Call | None] = ContextVar("ring_attn_call", default=None)
