"""What needs no GPU of the memory that ranks read of each other. On GPUs: tests/gpu/decoding_worker.py."""

import gc
import weakref
from types import SimpleNamespace

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


class Group:
    group_name = "0"


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other)


def test_a_stream_waits_for_the_one_that_decoded_before(monkeypatch):
    group, first, second = Group(), Stream(), Stream()
    ring = SimpleNamespace(groups=(group,), size=2)
    monkeypatch.setattr(module, "_made", made := {})
    made[group] = PeerMemory(torch.zeros(4), ring)
    for stream in (first, first, second, second, first):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, stream=stream: stream)
        follow_the_last(ring, torch.device("cuda", 0))
    assert first.waited_for == [second] and second.waited_for == [first]
    follow_the_last(ring, torch.device("cpu"))
    made[group] = None  # NCCL gathers
    follow_the_last(ring, torch.device("cuda", 0))
