"""Which kernel computes: the user's word, or the best that this machine and this request allow."""

from types import ModuleType

import jax

from jax_core.block import Problem
from jax_core.choices import preference
from jax_core.config import BwdParams, FwdParams, RingAttentionConfig, check_platform
from jax_core.kernels import cudnn, pallas, triton, xla

_KERNELS: dict[str, ModuleType] = {"cuda": cudnn, "triton": triton, "pallas": pallas, "xla": xla}

Choice = tuple[ModuleType, FwdParams, BwdParams]


def choose_kernel(platform: str | None, cfg: RingAttentionConfig | None, problem: Problem) -> Choice:
    """The kernel and its parameters: those of ``cfg``, completed with the kernel's own. A named kernel runs or the error says why
    it cannot; "auto" (or None) takes the first that can, which ends at xla."""
    given = cfg or RingAttentionConfig()
    named = _named(platform, given)
    backend = problem.backend or jax.default_backend()
    check_backend(given, backend)
    if named == "auto":
        return _first_that_can(given, problem, backend)
    if named not in ("xla", "pallas") and backend != jax.default_backend():
        raise NotImplementedError(f'platform="{named}": the arrays are on "{backend}"; use platform="xla" or "auto"')
    choice, reason = _try(_KERNELS[named], given, problem)
    if reason is not None:
        raise NotImplementedError(f'platform="{named}": {reason}')
    return choice


def _first_that_can(given: RingAttentionConfig, problem: Problem, backend: str) -> Choice:
    reasons = {}
    for name in preference(problem, backend):
        choice, reasons[name] = _try(_KERNELS[name], given, problem)
        if reasons[name] is None:
            return choice
    raise NotImplementedError("no platform can: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items()))


def _try(kernel: ModuleType, given: RingAttentionConfig, problem: Problem) -> tuple[Choice, str | None]:
    forward, backward = kernel.default_params(problem)
    forward, backward = given.fwd_params.completed(forward), given.bwd_params.completed(backward)
    return (kernel, forward, backward), kernel.unsupported(problem, forward, backward)


def _named(platform: str | None, cfg: RingAttentionConfig) -> str:
    if platform is None or platform == cfg.platform:
        return cfg.platform
    check_platform(platform)
    if cfg.platform != "auto" and platform != "auto":
        raise ValueError(f'platform="{platform}" and cfg.platform="{cfg.platform}" differ; give one of them')
    return platform if cfg.platform == "auto" else cfg.platform


def check_backend(cfg: RingAttentionConfig, backend: str) -> None:
    if cfg.backend != "any" and cfg.backend != backend:
        raise ValueError(f'cfg is for backend "{cfg.backend}", but this program runs on "{backend}"; use "any"')
