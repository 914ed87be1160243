"""What a caller may ask for, as data; ``spec`` checks it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax_core.config import RingAttentionConfig
from jax_core.masks.functions import Predicate


class MaskInfo(NamedTuple):
    """An attention mask and segment ids in one argument, as the reference design passes them.

    ``attention_mask``: bool, as ``mask``. ``sequence_axis_name``: the mesh axis of the sequence, where ``axis_name`` is not given.
    """

    attention_mask: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    sequence_axis_name: str | tuple[str, ...] | None = None


@dataclass(frozen=True)
class Options:
    """The static arguments of ``ring_attention``, under its names; hashable when the mask functions are."""

    causal: bool = False
    sliding_window: int | tuple[int | None, int | None] | None = None
    chunk_size: int | None = None
    logits_soft_cap: float | None = None
    softmax_scale: float | None = None
    dropout_prob: float = 0.0
    layout: str = "contiguous"
    mask_mod: Callable | None = None
    mask_builder: Callable | None = None
    platform: str | None = None
    cfg: RingAttentionConfig | None = None
    predicates: tuple[Predicate, ...] = ()  # mask functions traced already, whose arrays are among the operands
    fused_backward: bool = False
    lse_gradient: bool = True  # False: the LSE has no cotangent, and one that comes is not looked at
    precision: Any = None
    logits_dtype: str | None = None
    strategy: str = "auto"


@dataclass(frozen=True)
class Placement:
    """Where local shards lie: the ring's mesh axis and size, over how many devices heads are split, the mesh axes that values
    vary over, on which hardware (None: JAX's default), and whether the ranks are known to be a ring of TPUs (torus.py)."""

    axis_name: str | tuple[str, ...] | None = None
    size: int = 1
    head_shards: int = 1
    axes: frozenset = frozenset()
    backend: str | None = None
    torus: bool = False


ALONE = Placement()
