"""A tensor of a GPU that waits in pinned host memory.

The host runs far ahead of the device, so memory that a copy still reads is freed in the order of the stream that computes, not when
the host sees the copy done (``record_stream``): that stream waits for a copy which was begun some copies ago, and then lets go.
"""

from collections import deque
from functools import cache

import torch
from torch import Tensor

_ON_THE_WAY = 3  # copies: a layer's input, its attention's output and LSE


class HostCopy:
    """Leaves the device at once, on a stream beside what computes, and is brought back by :meth:`fetch`. The device's memory is
    free for others once ``_ON_THE_WAY`` more have left, or one is brought back."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._back: tuple[Tensor, torch.cuda.Event] | None = None
        current, side = torch.cuda.current_stream(tensor.device), _side_stream(tensor.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
        if current != torch.cuda.default_stream(tensor.device):
            tensor.record_stream(side)  # it may have been made on another stream than it is used on
        _leaving(tensor.device).append((tensor.detach(), side.record_event()))
        _let_go(tensor.device, _ON_THE_WAY)

    def fetch(self) -> None:
        """Starts to bring it back, once the current stream has come to here."""
        if self._back is None:
            _let_go(self._device, 0)
            side = _side_stream(self._device)
            back = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                back.copy_(self._host, non_blocking=True)
            self._back = back, side.record_event()

    def on_device(self) -> Tensor:
        """The tensor, which the current stream waits for."""
        self.fetch()
        assert self._back is not None
        (back, arrived), self._back = self._back, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        back.record_stream(current)  # nothing, where it was fetched on this stream
        return back

    def __del__(self) -> None:
        if self._back is not None:  # nobody has waited for it, and its memory is free for the current stream now
            torch.cuda.current_stream(self._device).wait_event(self._back[1])


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _leaving(device: torch.device) -> deque[tuple[Tensor, torch.cuda.Event]]:
    """Tensors whose copies may not have been made yet, with what tells that they are."""
    return deque()


def _let_go(device: torch.device, but: int) -> None:
    """Of all that is leaving but the last few: their memory is free behind what the current stream waits for here."""
    leaving = _leaving(device)
    while len(leaving) > but:
        tensor, copied = leaving.popleft()
        torch.cuda.current_stream(device).wait_event(copied)
        del tensor
