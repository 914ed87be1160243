"""What a program is compiled for: everything static. Of the shapes only heads per K/V head and head dims are."""

from dataclasses import dataclass

from jax_core.kernels.cute.tiles import BackwardTile, ForwardTile
from jax_core.masks.static import Mask


@dataclass(frozen=True)
class Listed:
    """A mask that is evaluated pair by pair, in the blocks of a list that are partly visible.

    ``arrays``: the names of the arrays that it reads, in order. ``static``: does ``mask`` hide anything? The other fields: 1 if all
    batch entries (heads) share a row of the arrays, 0 if each has its own.
    """

    mask: Mask
    static: bool
    arrays: tuple[str, ...]
    list_batch: int
    segment_batch: int = 1
    position_batch: int = 1
    bits_batch: int = 1
    bits_heads: int = 1


@dataclass(frozen=True)
class Settings:
    """``local``: a window of ``left`` and ``right`` (None: no bound), counted from the diagonal. ``group``: heads per K/V head."""

    dtype: str
    dim: int
    value_dim: int
    group: int
    scale: float
    tile: ForwardTile | BackwardTile
    causal: bool = False
    local: bool = False
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    listed: Listed | None = None
    deterministic: bool = False


@dataclass(frozen=True)
class ConvertSettings:
    """``of``: whose gradient, "query" or "key" (or value)."""

    of: str
    dtype: str
    dim: int
    scale: float
    tile: BackwardTile


OfProgram = Settings | ConvertSettings
