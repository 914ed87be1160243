"""Block sizes and launch settings, under the reference design's names."""

from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Literal, Self, get_args

Platform = Literal["triton", "pallas", "cuda", "cudnn", "xla", "auto"]
Backend = Literal["gpu", "tpu", "cpu", "any"]
PLATFORMS: tuple[str, ...] = get_args(Platform)
_ALIASES = {"cudnn": "cuda"}
BACKENDS: tuple[str, ...] = get_args(Backend)


@dataclass(frozen=True)
class FwdParams:
    """A kernel's tile: ``q_blocksize`` x ``kv_blocksize`` positions. ``num_stages`` and ``num_warps`` belong to kernels that
    have them; None leaves each to the kernel, a number given to a kernel without them is an error."""

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_stages: int | None = None
    num_warps: int | None = None

    def __post_init__(self):
        for name in ("q_blocksize", "kv_blocksize", "num_stages", "num_warps"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{type(self).__name__}.{name} must be a positive int or None, got {value!r}")
            object.__setattr__(self, name, int(value))  # NumPy's integers are no other tile

    def completed(self, defaults: Self) -> Self:
        """These parameters, with ``defaults`` where they say None."""
        return replace(defaults, **{name: value for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True)
class BwdParams(FwdParams):
    """The same for the backward kernel. Triton's dK/dV sweep takes such tiles, its dQ sweep their transpose: ``kv_blocksize``
    queries x ``q_blocksize`` keys, so that the longer side stands still in both."""


@dataclass(frozen=True)
class RingAttentionConfig:
    """Settings of one ring attention; giving none leaves the block sizes to the kernel.

    ``platform``: which kernel; "cudnn" is another name of "cuda". ``backend``: the hardware that the numbers were chosen for
    (anything but "any" is checked against the hardware that runs).
    """

    fwd_params: FwdParams = field(default_factory=FwdParams)
    bwd_params: BwdParams = field(default_factory=BwdParams)
    platform: Platform = "auto"
    backend: Backend = "any"

    def __post_init__(self):
        if not isinstance(self.fwd_params, FwdParams) or not isinstance(self.bwd_params, BwdParams):
            raise ValueError(
                f"fwd_params must be FwdParams and bwd_params BwdParams, got {type(self.fwd_params).__name__} and "
                f"{type(self.bwd_params).__name__}"
            )
        object.__setattr__(self, "platform", checked_platform(self.platform))  # frozen to everyone else
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {self.backend!r}")


def checked_platform(platform: str) -> str:
    """The platform's one name; ValueError where there is none such."""
    if platform not in PLATFORMS:
        raise ValueError(f"platform must be one of {', '.join(PLATFORMS)} or None; got {platform!r}")
    return _ALIASES.get(platform, platform)
