"""Which kernel computes: the user's word, or the best that this machine and this request allow."""

from types import ModuleType

import jax

from jax_core.block import Scores
from jax_core.config import BwdParams, FwdParams, RingAttentionConfig, check_platform
from jax_core.kernels import xla

_KERNELS: dict[str, ModuleType] = {"xla": xla}
_MISSING = {
    "triton": "the Triton kernels (GPU) are not part of this release",
    "cuda": "the cuDNN kernel (GPU) is not part of this release",
    "pallas": "the Pallas kernels (TPU) are not part of this release",
}


def choose_kernel(
    platform: str | None, cfg: RingAttentionConfig | None, scores: Scores, fused_backward: bool = False
) -> tuple[ModuleType, tuple[FwdParams, BwdParams]]:
    """The kernel and its parameters: those of ``cfg``, or the kernel's own without one. A named kernel runs or the error says why
    it cannot; "auto" (or None) takes the first that can, which ends at xla."""
    given = cfg or RingAttentionConfig()
    named = _named(platform, given)
    _check_backend(given)
    if named in _MISSING:
        raise NotImplementedError(f'platform="{named}": {_MISSING[named]}; use platform="xla" or "auto"')
    kernel = _KERNELS["xla" if named == "auto" else named]
    params = kernel.default_params() if cfg is None else (cfg.fwd_params, cfg.bwd_params)
    for part in params:
        _check_supported(kernel, named, scores, part)
    if fused_backward and not kernel.FUSED_BACKWARD:
        raise NotImplementedError(f'platform="{named}" makes dQ and dK/dV in separate sweeps; leave fused_backward False')
    return kernel, params


def _named(platform: str | None, cfg: RingAttentionConfig) -> str:
    if platform is None or platform == cfg.platform:
        return cfg.platform
    check_platform(platform)
    if cfg.platform != "auto" and platform != "auto":
        raise ValueError(f'platform="{platform}" and cfg.platform="{cfg.platform}" differ; give one of them')
    return platform if cfg.platform == "auto" else cfg.platform


def _check_backend(cfg: RingAttentionConfig) -> None:
    if cfg.backend != "any" and cfg.backend != jax.default_backend():
        raise ValueError(f'cfg is for backend "{cfg.backend}", but this program runs on "{jax.default_backend()}"; use "any"')


def _check_supported(kernel: ModuleType, named: str, scores: Scores, params: FwdParams) -> None:
    reason = kernel.unsupported(scores, params)
    if reason is not None:
        raise NotImplementedError(f'platform="{named}": {reason}')
