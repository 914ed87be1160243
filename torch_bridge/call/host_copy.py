"""A tensor of a GPU that waits in pinned host memory."""

from functools import cache

import torch
from torch import Tensor


class HostCopy:
    """Leaves the device at once, on a stream beside what computes, and is brought back by :meth:`fetch`. The device's memory is
    free for others when the copy has been made."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._back: tuple[Tensor, torch.cuda.Event] | None = None
        side = _side_stream(tensor.device)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(side)

    def fetch(self) -> None:
        """Starts to bring it back, after the copy that took it away."""
        if self._back is None:
            side = _side_stream(self._device)
            with torch.cuda.stream(side):
                back = self._host.to(self._device, non_blocking=True)
            self._back = back, side.record_event()

    def on_device(self) -> Tensor:
        """The tensor, which the current stream waits for."""
        self.fetch()
        assert self._back is not None
        (back, arrived), self._back = self._back, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        back.record_stream(current)
        return back


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
