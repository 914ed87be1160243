"""Which devices are linked to a ring: chips of TPUs by their coordinates."""

from types import SimpleNamespace
from unittest.mock import Mock

import jax
import numpy as np
import pytest
from attention_cases import ring_mesh
from jax.sharding import Mesh

from jax_core.request.topology import are_rings, is_ring

SNAKE = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (1, 2, 0), (0, 2, 0), (0, 1, 0)]
LINE = [(x, 0, 0) for x in range(16)]


def chips(kind: str, *coords: tuple[int, ...], cores: int = 1, **more) -> list:
    return [SimpleNamespace(device_kind=kind, coords=at, core_on_chip=core, **more) for at in coords for core in range(cores)]


@pytest.mark.parametrize(
    ("lines", "rings"),
    [
        ([chips("TPU v5 lite", *SNAKE)], True),
        ([chips("TPU v5 lite", *sorted(SNAKE))], False),  # row by row: the next row does not begin beside the last one's end
        ([chips("TPU v5 lite", *LINE)], True),  # 16 chips are a circle
        ([chips("TPU v5 lite", *LINE[:8])], False),  # 8 are a line
        ([chips("TPU v6 lite", *LINE)], True),
        ([chips("TPU v5p", *LINE[:4])], False),  # a side of 4 is no circle in a slice that is no cube of them
        ([chips("TPU v5p", *[(x, y, z) for x in range(4)]) for y in range(4) for z in range(4)], True),
        ([chips("TPU v5p", *SNAKE, num_cores=2)], False),
        ([chips("TPU7x", *SNAKE, cores=2)], True),
        ([chips("TPU v5 lite", *SNAKE), chips("TPU v5 lite", *sorted(SNAKE))], False),  # every line has to be one
        ([chips("TPU v5 lite", (0, 0, 0), (0, 0, 0))], False),  # one chip twice
        ([chips("TPU v5 lite", *SNAKE[:3], slice_index=0) + chips("TPU v5 lite", *SNAKE[3:], slice_index=1)], False),
        ([chips("another chip", *SNAKE)], False),
    ],
)
def test_which_devices_are_rings(lines: list, rings: bool):
    assert are_rings(np.array(lines, object)) is rings


def test_cpus_are_no_ring():
    assert not are_rings(np.array([jax.devices()[:4]], object))
    assert not is_ring(ring_mesh(4), ("ring",))


def test_a_mesh_is_read_along_the_axes_that_are_named():
    """A grid of 3 x 16 chips of v5e: the long side is a circle, the short one a line."""
    grid = np.array([chips("TPU v5 lite", *[(x, y, 0) for x in range(16)]) for y in range(3)], object)
    mesh = Mock(spec=Mesh, axis_names=("rows", "columns"), devices=grid)
    assert is_ring(mesh, ("columns",))
    assert not is_ring(mesh, ("rows",))
    assert not is_ring(mesh, ("rows", "columns"))
    mesh = Mock(spec=Mesh, axis_names=("columns", "rows"), devices=grid[:2].T)
    assert is_ring(mesh, ("rows",))  # two neighbours are linked both ways


def test_a_mesh_without_devices_is_no_ring():
    assert not is_ring(ring_mesh(2).abstract_mesh, ("ring",))
