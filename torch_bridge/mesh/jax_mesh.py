"""A ring's processes as a mesh of JAX devices, and their shards as one global JAX array. Its functions import JAX."""

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from torch_bridge.mesh.rings import ProcessRing

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax
    import numpy as np


def jax_platform(device: "torch.device") -> str:
    """JAX's name for the platform of a torch device."""
    return "cpu" if device.type == "cpu" else "gpu"


@cache  # a process uses only a few rings, and every call needs one of them
def jax_mesh(ring: ProcessRing, platform: str | None = None) -> "jax.sharding.Mesh":
    """A mesh with the ring's axes over the devices of its processes, in ring order.

    ``platform``: "cpu" or "gpu" if JAX has both (default: JAX's own default). Starts JAX's backend: call
    ``runtime.start`` before. Raises RuntimeError if JAX does not see a device of every process of the ring.
    """
    import jax
    import numpy as np

    if ring.size == 1:
        return jax.sharding.Mesh(np.array(jax.local_devices(backend=platform)[:1]).reshape(ring.sizes), ring.axes)
    devices = {device.process_index: device for device in jax.devices(platform)}
    missing = [rank for rank in ring.ranks if rank not in devices]
    if missing:
        raise RuntimeError(
            f"JAX must see a device of every process of the {ring}, but has none of ranks {missing}; "
            "call torch_bridge.runtime.start() on all ranks before any other use of JAX"
        )
    return jax.sharding.Mesh(np.array([devices[rank] for rank in ring.ranks]).reshape(ring.sizes), ring.axes)


@cache  # as jax_mesh; building a sharding costs more than the rest of to_global
def sharding(ring: ProcessRing, platform: str | None = None) -> "jax.sharding.NamedSharding":
    """A sharding that splits dimension 0 over the ring and no other dimension."""
    import jax

    return jax.sharding.NamedSharding(jax_mesh(ring, platform), jax.sharding.PartitionSpec(ring.axis_name))


def to_global(ring: ProcessRing, local: "jax.Array") -> "jax.Array":
    """The ring's shards as one array ``[size * d0, ...]``, in which block ``i`` of rows is the shard of ring rank ``i``; zero copy.

    ``local``: this process's shard ``[d0, ...]``, of the same shape on every member. A ring of one gets ``local`` itself.
    """
    return joiner(ring, local.platform())(local)


@cache
def joiner(ring: ProcessRing, platform: str) -> "Callable[[jax.Array], jax.Array]":
    """:func:`to_global` for a given ring and platform, with its mesh and sharding already built."""
    return _Joiner(ring.size, sharding(ring, platform)) if ring.size > 1 else _itself


def _itself(local: "jax.Array") -> "jax.Array":
    return local


class _Joiner:
    """Makes global arrays. The first one of each shape and dtype goes through JAX's checks, which take longer than everything else.
    Later ones use JAX's constructor directly, if this version's constructor accepts these arguments."""

    def __init__(self, size: int, over: "jax.sharding.NamedSharding") -> None:
        self._size, self._sharding = size, over
        self._known: dict[tuple[tuple[int, ...], np.dtype], jax.core.ShapedArray] = {}

    def __call__(self, local: "jax.Array") -> "jax.Array":
        aval = self._known.get((local.shape, local.dtype))
        return self._checked(local) if aval is None else self._constructed(local, aval)

    def _checked(self, local: "jax.Array") -> "jax.Array":
        import jax

        if local.ndim == 0:
            raise ValueError("to_global splits dimension 0, got a scalar; reshape it to [1]")
        shape = (self._size * local.shape[0], *local.shape[1:])
        array = jax.make_array_from_single_device_arrays(shape, self._sharding, [local])
        with suppress(TypeError):
            self._constructed(local, array.aval)
            self._known[local.shape, local.dtype] = array.aval
        return array

    def _constructed(self, local: "jax.Array", aval: "jax.core.ShapedArray") -> "jax.Array":
        constructor: Any = type(local)
        return constructor(aval, self._sharding, [local], committed=True, _skip_checks=True)


def to_local(array: "jax.Array") -> "jax.Array":
    """This process's shard ``[d0, ...]`` of an array that :func:`to_global` made or a ring program returned; zero copy."""
    return array.addressable_data(0)
