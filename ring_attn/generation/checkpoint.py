"""A KVCache as tensors that torch's distributed checkpoint saves and loads, also on a ring of another size.

Each tensor of a layer is a DTensor over the ring, split along the slots. Where a slot lies means nothing, because its position is
stored beside it: a ring of another size takes other parts of the same slots, and continues as after a prompt.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ring_attn.generation.cache import KVCache
from ring_attn.generation.layer import Held
from ring_attn.ring import Ring
from ring_attn.sharding.reduction import local_part
from torch_bridge.job.mesh import Ring as ProcessRing

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SLOTS = 1  # the dimension


def state_dict(cache: KVCache) -> dict[str, Tensor]:
    """All that generation needs to go on, without empty slots: DTensors over the ring, and plain tensors that every rank holds; on
    a ring of one all are plain. Views of the cache where they can be: save them before the next step.

    Raises ValueError for a cache without layers, and while it has its prompt."""
    if not cache.layers or cache.prefilling:
        raise ValueError("a cache is saved once the model has run on the prompts, which fills its layers; this one is not filled")
    ring, some = cache.ring.processes, next(iter(cache.layers.values())).held
    nothing = some.segments.new_zeros(0)
    state = {
        "lengths": nothing.long() if cache.lengths is None else cache.lengths + cache.appended,
        "segments": nothing if cache.segments is None else cache.segments,
    }
    for number, layer in cache.layers.items():
        state |= {f"layers.{number}.{name}": _spread(x.contiguous(), ring) for name, x in layer.used()._asdict().items()}
        reach = -1 if layer.reach is None else layer.reach
        state[f"layers.{number}.kind"] = torch.tensor([reach, layer.written, layer.appended])
    return state


def from_state_dict(state: dict[str, Any], ring: Ring, max_length: int, at_once: int = 8) -> KVCache:
    """The cache of which ``state`` was made, on ``ring``, over which its DTensors are spread."""
    cache = KVCache(ring, max_length, at_once)
    if state["lengths"].numel():
        cache.lengths, cache.segments = state["lengths"], state["segments"]
        cache.longest = int(cache.lengths.max())
    if cache.longest > max_length:
        raise ValueError(
            f"the saved cache has {cache.longest} tokens in an entry; max_length must be at least that, got {max_length}"
        )
    for number in layer_numbers(state):
        parts = Held(*(state[f"layers.{number}.{name}"] for name in Held._fields))
        slots = -(-parts.key.shape[_SLOTS] // ring.size)  # the last ranks may have fewer
        held = Held(*map(local_part, parts)).padded(slots)
        reach, written, _ = state[f"layers.{number}.kind"].tolist()
        if written:
            cache.write(number, held.key, held.value, held.segments)
        else:
            cache.keep(number, *held, reach=reach if 0 <= reach < max_length else None)
    return cache


def save(cache: KVCache, path: str | PathLike) -> None:
    """Writes the cache into a folder, by torch's distributed checkpoint: every rank of the ring calls it, and writes its own slots.
    With several rings, as under data parallelism, each has a folder of its own."""
    from torch.distributed.checkpoint import save as write

    ring = cache.ring.processes
    with _without_a_warning_of_one_process():
        write(state_dict(cache), checkpoint_id=path, **_among(ring))


def load(
    path: str | PathLike, ring: Ring, max_length: int, *, at_once: int = 8, device: torch.device | str | None = None
) -> KVCache:
    """The cache that :func:`save` wrote, on a ring of any size: every rank of the ring calls it, and reads its own slots. The next
    token goes to :func:`decode`. ``device``: of the tensors, torch's default if None."""
    from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata
    from torch.distributed.checkpoint import load as read

    processes, device = ring.processes, torch.get_default_device() if device is None else torch.device(device)
    state: dict[str, Tensor] = {}
    for name, saved in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        assert isinstance(saved, TensorStorageMetadata)
        spread = name.startswith("layers.") and not name.endswith(".kind")
        place = torch.device("cpu") if name.endswith(".kind") else device
        state[name] = _empty(tuple(saved.size), saved.properties.dtype, place, processes if spread else None)
    with _without_a_warning_of_one_process():
        read(state, checkpoint_id=path, **_among(processes))
    return from_state_dict(state, ring, max_length, at_once)


@contextmanager
def _without_a_warning_of_one_process() -> Iterator[None]:
    """Torch warns of what ``no_dist`` asks for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def layer_numbers(state: dict[str, Any]) -> list[int]:
    return sorted(int(name.split(".")[1]) for name in state if name.endswith(".kind"))


def _spread(x: Tensor, ring: ProcessRing) -> Tensor:
    if ring.size == 1:
        return x
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(x, _device_mesh(ring, x.device), [Shard(_SLOTS)], run_check=False)


def _among(ring: ProcessRing) -> dict[str, Any]:
    """Who takes part, for torch's distributed checkpoint."""
    return {"no_dist": True} if ring.size == 1 else {"process_group": ring.group}


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, ring: ProcessRing | None) -> Tensor:
    if ring is None or ring.size == 1:
        return torch.zeros(shape, dtype=dtype, device=device)
    from torch.distributed.tensor import Shard, zeros

    return zeros(shape, dtype=dtype, device_mesh=_device_mesh(ring, device), placements=[Shard(_SLOTS)])


def _device_mesh(ring: ProcessRing, device: torch.device) -> "DeviceMesh":
    from torch.distributed.device_mesh import DeviceMesh

    assert ring.group is not None
    return DeviceMesh.from_group(ring.group, device.type)
