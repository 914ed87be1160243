"""What a caller may ask for, as data; ``request`` checks it. Importing this module loads no JAX."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from jax_core.config import RingAttentionConfig
from jax_core.masks.layout import Layout
from jax_core.masks.static import Window
from jax_core.operands import EIGHTHS

if TYPE_CHECKING:
    from jax import Array
    from jax.lax import Precision
    from jax.typing import ArrayLike

    from jax_core.masks.functions import Predicate

AxisName = str | tuple[str, ...] | None
Visible: TypeAlias = "ArrayLike"  # booleans
MaskMod = Callable[..., Visible]  # (batch, head, q_pos, k_pos) -> bool, on traced int32 scalars


class SlicedMask(Protocol):
    """A mask of one head, over the indices of the whole sequence: NumPy's arrays, splash attention's masks."""

    def __getitem__(self, where: tuple[slice, slice], /) -> Visible: ...


MaskBuilder = Callable[..., SlicedMask]  # (q_len, kv_len, num_heads, head_idx, num_reps)


class MaskInfo(NamedTuple):
    """An attention mask and segment ids in one argument, as the reference design passes them.

    ``attention_mask``: bool, as ``mask``. ``sequence_axis_name``: the mesh axis of the sequence, if ``axis_name`` is not given.
    """

    attention_mask: "Array | None" = None
    q_segment_ids: "Array | None" = None
    kv_segment_ids: "Array | None" = None
    sequence_axis_name: AxisName = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The static arguments of ``ring_attention`` that a layer is told once, of the same names; hashable if the mask functions are.
    The one list of them: layers of flax and equinox inherit it, and tests compare every signature and table with it."""

    causal: bool = False
    bottom_right: bool = False  # the last query is at the last key's position, not the first at the first's
    sliding_window: Window = None
    chunk_size: int | None = None
    logits_soft_cap: float | None = None
    softmax_scale: float | None = None
    layout: Layout = "contiguous"
    mask_mod: MaskMod | None = None
    mask_builder: MaskBuilder | None = None
    platform: str | None = None
    strategy: str = "auto"
    cfg: RingAttentionConfig | None = None
    fused_backward: bool = False
    deterministic: bool = False
    precision: "str | Precision | None" = None


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """What a call asks for: its settings, and what is each call's own."""

    dropout_prob: float = 0.0
    padding: bool = True  # False: no document number is negative, no row is without a document
    shared_eighths: int = EIGHTHS  # the first ones of a shard, which hold all of a placement's documents that several ranks have
    lse_gradient: bool = True  # False: the LSE has no cotangent, and one passed anyway is ignored
    predicates: "tuple[Predicate, ...]" = ()  # mask functions already traced, whose arrays are among the operands
    logits_dtype: str | None = None


@dataclass(frozen=True)
class Placement:
    """Where local shards are: the ring's mesh axis or axes, its size and that of each axis, over how many devices heads are split,
    the mesh axes that values vary over, and the hardware (None: JAX's default), with the generation of its GPUs or TPUs as in
    ``Problem`` (None: that of the devices here)."""

    axis_name: AxisName = None
    size: int = 1
    sizes: tuple[int, ...] = ()
    head_shards: int = 1
    axes: frozenset = frozenset()
    backend: str | None = None
    capability: int | None = None
    generation: str | None = None


ALONE = Placement()
