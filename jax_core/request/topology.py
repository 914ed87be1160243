"""Do the devices of a mesh axis form a ring in the TPU topology?"""

from itertools import pairwise

import numpy as np
from jax.sharding import Mesh

# Which sides of a slice have wraparound links (cloud.google.com/tpu/docs): on v4, v5p and Ironwood every side, if all are
# multiples of 4 chips; on v5e and v6e a side of 16.
_CUBES = ("TPU v4", "TPU v5", "TPU v5p", "TPU7x")
_SQUARES = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")


def is_ring(mesh, axes: tuple[str, ...]) -> bool:
    """Whether along ``axes`` every device is linked to the next, and the last to the first. ``mesh``: any mesh; False without TPUs
    or devices, and for devices with two cores (v4, v5p): a kernel that sends runs on only one of them."""
    return isinstance(mesh, Mesh) and are_rings(_lines(mesh, axes))


def are_rings(lines: np.ndarray) -> bool:
    """``lines [lines, devices of a line]``. Links are derived from the devices' coordinates in their slice."""
    if not all(hasattr(device, "coords") and getattr(device, "num_cores", 1) == 1 for device in lines.flat):
        return False
    sides = [max(values) + 1 for values in zip(*(device.coords for device in lines.flat), strict=True)]
    closed = _closed(lines.flat[0].device_kind, sides)
    return all(_linked(one, other, closed) for line in lines for one, other in pairwise([*line, line[0]]))


def _closed(kind: str, sides: list[int]) -> list[int | None]:
    """The length of each side with wraparound links, None for the others."""
    if kind in _CUBES and all(side % 4 == 0 for side in sides):
        return [*sides]
    return [side if kind in _SQUARES and side == 16 else None for side in sides]


def _lines(mesh: Mesh, axes: tuple[str, ...]) -> np.ndarray:
    numbers = [mesh.axis_names.index(axis) for axis in axes]
    moved = np.moveaxis(mesh.devices, numbers, list(range(-len(numbers), 0)))
    return moved.reshape(-1, int(np.prod(moved.shape[moved.ndim - len(numbers) :])))


def _linked(one, other, closed: list[int | None]) -> bool:
    """Cores of one chip, or chips one step apart; never across slices."""
    if one.device_kind not in _CUBES + _SQUARES or getattr(one, "slice_index", 0) != getattr(other, "slice_index", 0):
        return False
    steps = sum(_distance(a, b, side) for a, b, side in zip(one.coords, other.coords, closed, strict=True))
    return steps <= 1 and one != other


def _distance(a: int, b: int, circle: int | None) -> int:
    apart = abs(a - b)
    return apart if circle is None else min(apart, circle - apart)
