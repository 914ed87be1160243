"""Who is told of ring calls, at each that runs: what ``torch.compile`` traces once runs in every forward."""

from collections.abc import Callable
from contextvars import ContextVar

ON_CALL: ContextVar[Callable[[], None] | None] = ContextVar("ring_attn_on_call", default=None)


def tell() -> None:
    if (listener := ON_CALL.get()) is not None:
        listener()
