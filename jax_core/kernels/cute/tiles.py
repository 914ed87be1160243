"""Tiles of flash-attn-4's kernels, by generation of GPUs and head dim: what its own interface chooses, as data, so that nothing has
to be imported to know it. docs/contributing/a-kernel.md says what else a further generation needs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple


@dataclass(frozen=True)
class ForwardTile:
    """``tile_m`` queries x ``tile_n`` keys; the weights in registers or in shared memory. ``capability``: of the generation of GPUs
    whose class takes it."""

    capability: ClassVar[int] = 90
    tile_m: int
    tile_n: int
    weights_in_registers: bool = True


@dataclass(frozen=True)
class BackwardTile:
    """The arguments of flash-attn-4's backward class with the same names. ``multiple``: head dims are padded to it in the float32
    accumulators."""

    capability: ClassVar[int] = 90
    tile_m: int
    tile_n: int
    Q_stage: int = 2
    dO_stage: int = 2
    PdS_stage: int = 2
    SdP_swapAB: bool = True
    dKV_swapAB: bool = False
    dQ_swapAB: bool = False
    AtomLayoutNdKV: int = 2
    AtomLayoutMdQ: int = 1
    dQ_single_wg: bool = False

    @property
    def multiple(self) -> int:
        return 64 if self.dKV_swapAB else 32

    def padded(self, dim: int) -> int:
        return -(-dim // self.multiple) * self.multiple


def _hopper_forward(dim: int, value_dim: int, diagonal: bool, listed: bool) -> ForwardTile:
    """``diagonal``: causal or a window; ``listed``: with lists of blocks, whose query blocks are 128 long."""
    widest = max(dim, value_dim)
    if widest <= 64:
        return ForwardTile(128 if listed else 192, 128)
    if widest <= 96:
        return ForwardTile(128 if listed else 192, 128 if listed or diagonal else 144, weights_in_registers=False)
    if widest <= 128:
        return ForwardTile(128, 128)
    if widest <= 192:
        return ForwardTile(128, 128 if value_dim <= 128 else 112)
    return ForwardTile(128, 80)


def _hopper_backward(dim: int, value_dim: int, diagonal: bool, listed: bool) -> BackwardTile:
    """One for a whole ring: the layout of the gradient of the queries depends on ``tile_m``."""
    widest = max(dim, value_dim)
    if widest <= 64:
        return BackwardTile(128, 128, AtomLayoutMdQ=2)
    if widest <= 96:
        return BackwardTile(64, 128, dQ_single_wg=True)
    if widest <= 128:
        longer = dim > 96 and not (diagonal or listed)
        return BackwardTile(80 if longer else 64, 128, dQ_swapAB=longer)
    if widest <= 192:
        return BackwardTile(64, 96, dO_stage=2 if value_dim <= 128 else 1, PdS_stage=1, SdP_swapAB=False, dKV_swapAB=True)
    if listed:
        return BackwardTile(64, 64, Q_stage=1, dO_stage=1, PdS_stage=1, SdP_swapAB=False, AtomLayoutNdKV=1)
    return BackwardTile(64, 48, dO_stage=1, PdS_stage=1, SdP_swapAB=False, dKV_swapAB=True, AtomLayoutNdKV=1)


class Tiles(NamedTuple):
    """Of a generation: functions of ``(dim, value_dim, diagonal, listed)``."""

    forward: Callable[[int, int, bool, bool], ForwardTile]
    backward: Callable[[int, int, bool, bool], BackwardTile]


# By compute capability: a row here, and a class in programs.py.
TILES: Mapping[int, Tiles] = MappingProxyType({90: Tiles(_hopper_forward, _hopper_backward)})
