"""Block sizes and launch settings, with the reference design's names."""

from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Literal, Self, get_args

Platform = Literal["triton", "pallas", "cute", "cuda", "cudnn", "xla", "auto"]
Backend = Literal["gpu", "tpu", "cpu", "any"]
PLATFORMS: tuple[str, ...] = get_args(Platform)
_ALIASES = {"cudnn": "cuda"}
BACKENDS: tuple[str, ...] = get_args(Backend)


@dataclass(frozen=True)
class FwdParams:
    """A kernel's tile: ``q_blocksize`` x ``kv_blocksize`` positions. Only some kernels have ``num_stages`` and ``num_warps``; a
    number given to a kernel without them is an error. None leaves any of them to the kernel."""

    q_blocksize: int | None = None
    kv_blocksize: int | None = None
    num_stages: int | None = None
    num_warps: int | None = None

    def __post_init__(self) -> None:
        for name in ("q_blocksize", "kv_blocksize", "num_stages", "num_warps"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{type(self).__name__}.{name} must be a positive int or None, got {value!r}")
            object.__setattr__(self, name, int(value))  # NumPy integers must not make a different tile

    def completed(self, defaults: Self) -> Self:
        """These parameters, with ``defaults`` in place of None."""
        return replace(defaults, **{name: value for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True)
class BwdParams(FwdParams):
    """The same for the backward kernel. Triton's dK/dV sweep uses these tiles, its dQ sweep their transpose: ``kv_blocksize``
    queries x ``q_blocksize`` keys, so that the longer side stays in place in both."""


@dataclass(frozen=True)
class RingAttentionConfig:
    """Settings of one ring attention. A pass without numbers has those that were measured on this device, if there are any (the
    user's cache, then what is shipped), or else the kernel's choice; a pass with some of them is completed by the kernel.

    ``platform``: which kernel; "cudnn" is an alias of "cuda". ``backend``: the hardware that the numbers were chosen for
    (anything but "any" is checked against the actual hardware). ``autotune``: where nothing was measured yet, search when the
    program is made, which compiles and times the kernel's candidates, and keep what was found (docs/contributing/tuning.md).
    """

    fwd_params: FwdParams = field(default_factory=FwdParams)
    bwd_params: BwdParams = field(default_factory=BwdParams)
    platform: Platform = "auto"
    backend: Backend = "any"
    autotune: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.fwd_params, FwdParams) or not isinstance(self.bwd_params, BwdParams):
            raise ValueError(
                f"fwd_params must be FwdParams and bwd_params BwdParams, got {type(self.fwd_params).__name__} and "
                f"{type(self.bwd_params).__name__}"
            )
        object.__setattr__(self, "platform", checked_platform(self.platform))  # the dataclass is frozen
        if self.backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {self.backend!r}")
        if not isinstance(self.autotune, bool):
            raise ValueError(f"autotune must be True or False, got {self.autotune!r}")


def checked_platform(platform: str) -> str:
    """The platform's canonical name; ValueError if there is no such platform."""
    if platform not in PLATFORMS:
        raise ValueError(f"platform must be one of {', '.join(PLATFORMS)} or None; got {platform!r}")
    return _ALIASES.get(platform, platform)
