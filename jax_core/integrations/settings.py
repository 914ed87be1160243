"""What a layer's attention is told once, when the model is built."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypedDict, Unpack

from jax import Array
from jax.lax import Precision
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from jax_core.api.attention import ring_attention
from jax_core.options import AxisName, Settings


class Dropout(TypedDict, total=False):
    """Of a call; nothing where nothing is dropped."""

    dropout_prob: float
    dropout_seed: Array


class Arrays(TypedDict, total=False):
    """What no layer of a library knows by a name of its own."""

    softmax_aux: ArrayLike | None
    q_segment_ids: ArrayLike | None
    kv_segment_ids: ArrayLike | None
    q_position_ids: ArrayLike | None
    kv_position_ids: ArrayLike | None
    alibi_slopes: ArrayLike | None


class WithBias(Arrays, total=False):
    bias: ArrayLike | None


class OfCall(WithBias, Dropout, total=False):
    mask: ArrayLike | None
    causal: bool
    precision: Precision | str | None


@dataclass(frozen=True, kw_only=True)
class RingSettings(Settings):
    """The arguments of :func:`jax_core.ring_attention` that are no arrays: hashable, and equal where they are, so that ``jax.jit``
    finds its programs again."""

    mesh: Mesh | None = None
    axis_name: AxisName = None
    in_specs: Sequence[PartitionSpec | None] | None = None

    def __post_init__(self) -> None:
        for name in ("axis_name", "in_specs", "sliding_window"):
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))  # the dataclass is frozen

    @property
    def sharded(self) -> bool:
        """Whether the sequence is split over devices."""
        return self.mesh is not None or self.axis_name is not None

    def attend(self, query: Array, key: Array, value: Array, /, **more: Unpack[OfCall]) -> Array:
        """:func:`jax_core.ring_attention` with these settings and ``more`` arguments, which come first."""
        settings = {field.name: getattr(self, field.name) for field in fields(RingSettings)}
        settings.update(more)
        return ring_attention(query, key, value, **settings)
