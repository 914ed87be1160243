"""What needs no GPU of the memory that ranks read of each other. On GPUs: tests/gpu/decoding_worker.py."""

import gc
import weakref

import torch
import torch.distributed as dist

from torch_bridge.attention import peer_memory as module
from torch_bridge.attention.peer_memory import PeerMemory, follow_the_last, peer_memory
from torch_bridge.mesh.rings import resolve


def test_it_does_not_keep_its_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    memory = torch.full((12,), 7.0)
    peers = PeerMemory(memory, resolve(dist.group.WORLD))
    peers._ranks = 3
    parts = peers.parts(torch.Size((1, 2)))
    assert parts.shape == (3, 1, 2) and parts.data_ptr() == memory.data_ptr()
    assert peer_memory(resolve(dist.group.WORLD), 4, torch.device("cpu")) is None
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is None


class Stream:
    def __init__(self, number: int) -> None:
        self.device, self.waited_for = torch.device("cuda", number), list[Stream]()

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other)


def test_a_stream_waits_for_the_one_that_decoded_before(monkeypatch):
    """On its device, whatever the ring."""
    first, second, elsewhere = Stream(0), Stream(0), Stream(1)
    monkeypatch.setattr(module, "_last", {})
    for stream in (first, first, second, elsewhere, second, first):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, stream=stream: stream)
        follow_the_last(torch.device("cuda"))
    follow_the_last(torch.device("cpu"))
    assert first.waited_for == [second] and second.waited_for == [first] and not elsewhere.waited_for
