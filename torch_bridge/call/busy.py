"""What runs in torch's backward between two ring calls, and may take minutes at its first call: this rank is busy in it, where it
would count as one that does not come (:mod:`torch_bridge.failures.deadlock`)."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch_bridge.failures import peers


@contextmanager
def busy() -> Iterator[None]:
    """In all that is within."""
    key = peers.mark_busy()
    try:
        yield
    finally:
        peers.mark_idle(key)
