"""Which strategy and kernel compute a request: those that the user names, or the best that the hardware and the request allow."""

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

import jax

from jax_core.config import BwdParams, FwdParams, RingAttentionConfig, checked_platform
from jax_core.kernels import cudnn, cute, tpu, triton, xla
from jax_core.kernels.contract import Kernel, Problem
from jax_core.request.features import refusal
from jax_core.request.measured import preferred_kernels, preferred_strategies
from jax_core.request.options import Options
from jax_core.strategies import decode, empty, fused_ring, ring
from jax_core.strategies.contract import Strategy
from jax_core.tune import lookup

KERNELS: Mapping[str, Kernel] = MappingProxyType({"cute": cute, "cuda": cudnn, "triton": triton, "pallas": tpu, "xla": xla})
STRATEGIES: Mapping[str, Strategy] = MappingProxyType({"ring": ring, "fused": fused_ring, "decode": decode})
SHARED_QUERIES = frozenset({"decode"})  # strategies whose queries are the same on all ranks
_NO_PARAMS = FwdParams(), BwdParams()
_PER_PROCESS = ("cute", "cuda", "triton")  # these query this process's own GPU


class Choice(NamedTuple):
    """``kernel``: None if the strategy has its own."""

    strategy: Strategy
    kernel: Kernel | None
    fwd_params: FwdParams
    bwd_params: BwdParams


def choose(options: Options, problem: Problem, torus: bool = False) -> Choice:
    """The strategy, the kernel, and their parameters: those of ``options.cfg``, completed. A named choice runs, or the error says
    why it cannot; "auto" takes the first that can compute the request, and falls back to the ring with the XLA kernel.

    ``torus``: the ranks are known to form a ring in the TPU topology. Raises ValueError for unknown or contradictory names,
    NotImplementedError for what cannot be computed.
    """
    given = options.cfg or RingAttentionConfig()
    platform = named_platform(options.platform, given)
    if given.backend not in ("any", problem.backend):
        raise ValueError(f'cfg is for backend "{given.backend}", but this program runs on "{problem.backend}"; use "any"')
    if options.strategy not in ("auto", *STRATEGIES):
        raise ValueError(f"strategy must be one of auto, {', '.join(STRATEGIES)}; got {options.strategy!r}")
    if empty.unsupported(problem, *_NO_PARAMS) is None:
        return Choice(empty, None, *_NO_PARAMS)
    if options.strategy != "auto":
        return _with_strategy(options.strategy, platform, given, problem)
    *first, last = preferred_strategies(platform, torus)
    for name in first:
        with suppress(NotImplementedError):
            return _with_strategy(name, platform, given, problem)
    return _with_strategy(last, platform, given, problem)


def _with_strategy(name: str, platform: str, given: RingAttentionConfig, problem: Problem) -> Choice:
    strategy = STRATEGIES[name]
    reason = refusal(problem.features, strategy.HANDLES)
    if reason is None and strategy.OWN_PLATFORM is None:
        return _with_kernel(name, platform, given, problem)
    if reason is None and platform not in ("auto", strategy.OWN_PLATFORM):
        reason = f'it has a kernel of its own, in {strategy.OWN_PLATFORM}, and runs no other; got platform="{platform}"'
    params = _completed(given, strategy.default_params(problem))
    reason = reason or strategy.unsupported(problem, *params)
    if reason is not None:
        raise NotImplementedError(f'strategy="{name}": {reason}; use strategy="auto"')
    return Choice(strategy, None, *params)


def _with_kernel(strategy: str, platform: str, given: RingAttentionConfig, problem: Problem) -> Choice:
    named = platform != "auto"
    reasons = {}
    for name in (platform,) if named else preferred_kernels(problem):
        choice, reasons[name] = _try(STRATEGIES[strategy], name, given, problem)
        if reasons[name] is None:
            return choice
    said = "; ".join(f'platform="{name}": {reason}' for name, reason in reasons.items())
    raise NotImplementedError(f'{said}; use platform="auto"' if named else f"no platform can: {said}")


def _try(strategy: Strategy, name: str, given: RingAttentionConfig, problem: Problem) -> tuple[Choice, str | None]:
    kernel = KERNELS[name]
    of_strategy = _completed(given, strategy.default_params(problem))
    forward, backward = lookup.completed(name, kernel, problem, of_strategy, given.autotune)
    choice = Choice(strategy, kernel, forward, backward)
    if name in _PER_PROCESS and problem.backend != jax.default_backend():
        return choice, f'the arrays are on "{problem.backend}", and this process computes on "{jax.default_backend()}"'
    reason = strategy.unsupported(problem, forward, backward)
    reason = reason or refusal(problem.features - strategy.IN_PLACE_OF_A_KERNEL, kernel.HANDLES)
    return choice, reason or kernel.unsupported(problem, forward, backward)


def _completed(given: RingAttentionConfig, defaults: tuple[FwdParams, BwdParams]) -> tuple[FwdParams, BwdParams]:
    return given.fwd_params.completed(defaults[0]), given.bwd_params.completed(defaults[1])


def named_platform(platform: str | None, cfg: RingAttentionConfig) -> str:
    """The platform that the call or its ``cfg`` names; "auto" if neither does."""
    platform = None if platform is None else checked_platform(platform)
    if platform is None or platform == cfg.platform:
        return cfg.platform
    if cfg.platform != "auto" and platform != "auto":
        raise ValueError(f'platform="{platform}" and cfg.platform="{cfg.platform}" differ; give one of them')
    return platform if cfg.platform == "auto" else cfg.platform
