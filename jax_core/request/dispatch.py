"""Which strategy and kernel compute a request: those that the user names, or the best that the hardware and the request allow."""

from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

from jax_core.config import BwdParams, FwdParams, RingAttentionConfig, checked_platform
from jax_core.experimental import warn_experimental
from jax_core.kernels import cudnn, cute, tpu, triton, xla
from jax_core.kernels.contract import Kernel, Problem
from jax_core.options import Options
from jax_core.request.features import refusal
from jax_core.request.preferences import preferred_kernels, preferred_strategies
from jax_core.strategies.all_gather import AllGather
from jax_core.strategies.contract import Strategy
from jax_core.strategies.decode import Decode
from jax_core.strategies.empty import Empty
from jax_core.strategies.fused_ring import FusedRing
from jax_core.strategies.hierarchical import Hierarchical
from jax_core.strategies.ring import RingStrategy
from jax_core.strategies.ulysses import Ulysses
from jax_core.tune import lookup

KERNELS: Mapping[str, Kernel] = MappingProxyType({"cute": cute, "cuda": cudnn, "triton": triton, "pallas": tpu, "xla": xla})
STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        "ring": RingStrategy(),
        "fused": FusedRing(),
        "all_gather": AllGather(),
        "ulysses": Ulysses(RingStrategy()),
        "ulysses_ring": Ulysses(RingStrategy(), 0),
        "ring_ulysses": Ulysses(RingStrategy(), 1),
        "hierarchical": Hierarchical(),
        "decode": Decode(),
    }
)
SHARED_QUERIES = frozenset(name for name, strategy in STRATEGIES.items() if strategy.SHARED_QUERIES)
_NO_PARAMS = FwdParams(), BwdParams()


class Choice(NamedTuple):
    """``kernel``: None if the strategy has its own."""

    strategy: Strategy
    kernel: Kernel | None
    fwd_params: FwdParams
    bwd_params: BwdParams


def choose(options: Options, problem: Problem, axes: tuple[str, ...] = ()) -> Choice:
    """The strategy, the kernel, and their parameters: those of ``options.cfg``, completed. A named choice runs, or the error says
    why it cannot; "auto" takes the first that can compute the request, and falls back to the ring with the XLA kernel.

    ``axes``: the names of several mesh axes, which may mean a strategy that "auto" then tries first. Raises ValueError for unknown
    or contradictory names, NotImplementedError for what cannot be computed.
    """
    cfg = options.cfg or RingAttentionConfig()
    platform = named_platform(options.platform, cfg)
    if cfg.backend not in ("any", problem.backend):
        raise ValueError(f'cfg is for backend "{cfg.backend}", but this program runs on "{problem.backend}"; use "any"')
    if options.strategy not in ("auto", *STRATEGIES):
        raise ValueError(f"strategy must be one of auto, {', '.join(STRATEGIES)}; got {options.strategy!r}")
    if Empty().unsupported(problem, *_NO_PARAMS) is None:
        return Choice(Empty(), None, *_NO_PARAMS)
    if options.strategy != "auto":
        return _with_strategy(options.strategy, platform, cfg, problem)
    *first, last = _order(problem, axes)
    for name in first:
        with suppress(NotImplementedError):
            return _with_strategy(name, platform, cfg, problem)
    return _with_strategy(last, platform, cfg, problem)


def _order(problem: Problem, axes: tuple[str, ...]) -> tuple[str, ...]:
    named = tuple(name for name, strategy in STRATEGIES.items() if axes and strategy.axes == axes)
    windowed = tuple(name for name, strategy in STRATEGIES.items() if strategy.sends_halo_only(problem))
    return *named, *preferred_strategies(problem, windowed)


def _with_strategy(name: str, platform: str, cfg: RingAttentionConfig, problem: Problem) -> Choice:
    strategy = STRATEGIES[name]
    params = _params(strategy, cfg, problem)
    reason = _strategy_reason(strategy, platform, params, problem)
    if reason is not None:
        raise NotImplementedError(f'strategy="{name}": {reason}; use strategy="auto"')
    if strategy.EXPERIMENTAL and problem.backend == "tpu":
        warn_experimental(f'strategy="{name}"', strategy.EXPERIMENTAL)
    if strategy.FIXED_PLATFORM is not None:
        return Choice(strategy, None, *params)
    return _with_kernel(strategy, platform, params, cfg.autotune, problem)


def _params(strategy: Strategy, cfg: RingAttentionConfig, problem: Problem) -> tuple[FwdParams, BwdParams]:
    forward, backward = strategy.default_params(problem)
    return cfg.fwd_params.completed(forward), cfg.bwd_params.completed(backward)


def _strategy_reason(strategy: Strategy, platform: str, params: tuple[FwdParams, BwdParams], problem: Problem) -> str | None:
    reason = refusal(problem.features, strategy.CAPABILITIES) or _platform_reason(strategy, platform)
    return reason or strategy.unsupported(problem, *params)


def strategies_reasons(options: Options, problem: Problem) -> dict[str, str | None]:
    """Of each strategy why it cannot compute the request, by itself or because no kernel can for it; None if it can."""
    cfg = options.cfg or RingAttentionConfig()
    platform, reasons = named_platform(options.platform, cfg), {}
    for name, strategy in STRATEGIES.items():
        params = _params(strategy, cfg, problem)
        reason = _strategy_reason(strategy, platform, params, problem)
        if reason is None and strategy.FIXED_PLATFORM is None:
            of_kernels = _kernels_reasons(strategy, params, problem)
            asked = of_kernels if platform == "auto" else {platform: of_kernels[platform]}
            reason = None if None in asked.values() else _said(asked)
        reasons[name] = reason
    return reasons


def kernels_reasons(options: Options, problem: Problem, strategy: Strategy) -> dict[str, str | None]:
    """Of each kernel why it cannot compute what the strategy asks of it; None if it can. Looks no configuration up."""
    return _kernels_reasons(strategy, _params(strategy, options.cfg or RingAttentionConfig(), problem), problem)


def _kernels_reasons(strategy: Strategy, params: tuple[FwdParams, BwdParams], problem: Problem) -> dict[str, str | None]:
    asked, reasons = strategy.kernel_problem(problem), {}
    for name, kernel in KERNELS.items():
        forward, backward = kernel.default_params(asked)
        choice = Choice(strategy, kernel, params[0].completed(forward), params[1].completed(backward))
        reasons[name] = _kernel_reason(choice, asked)
    return reasons


def _said(reasons: Mapping[str, str | None]) -> str:
    return "; ".join(f'platform="{kernel}": {reason}' for kernel, reason in reasons.items())


def _platform_reason(strategy: Strategy, platform: str) -> str | None:
    if strategy.FIXED_PLATFORM is None or platform in ("auto", strategy.FIXED_PLATFORM):
        return None
    return f'it has a kernel of its own, in {strategy.FIXED_PLATFORM}, and runs no other; got platform="{platform}"'


def _with_kernel(
    strategy: Strategy, platform: str, params: tuple[FwdParams, BwdParams], autotune: bool, problem: Problem
) -> Choice:
    named, asked, reasons = platform != "auto", strategy.kernel_problem(problem), {}
    for name in (platform,) if named else preferred_kernels(asked):
        forward, backward = lookup.completed(name, KERNELS[name], asked, params, autotune)
        choice = Choice(strategy, KERNELS[name], forward, backward)
        reasons[name] = _kernel_reason(choice, asked)
        if reasons[name] is None:
            tried = getattr(KERNELS[name], "EXPERIMENTAL", "")
            if tried and problem.backend == "tpu":
                warn_experimental(f'platform="{name}"', tried)
            return choice
    said = _said(reasons)
    raise NotImplementedError(f'{said}; use platform="auto"' if named else f"no platform can: {said}")


def _kernel_reason(choice: Choice, problem: Problem) -> str | None:
    """Why the kernel cannot compute the ``problem`` that the strategy has for it, or None."""
    assert choice.kernel is not None
    reason = refusal(problem.features - choice.strategy.DONE_BY_STRATEGY, choice.kernel.CAPABILITIES)
    return reason or choice.kernel.unsupported(problem, choice.fwd_params, choice.bwd_params)


def named_platform(platform: str | None, cfg: RingAttentionConfig) -> str:
    """The platform that the call or its ``cfg`` names; "auto" if neither does."""
    platform = None if platform is None else checked_platform(platform)
    if platform is None or platform == cfg.platform:
        return cfg.platform
    if cfg.platform != "auto" and platform != "auto":
        raise ValueError(f'platform="{platform}" and cfg.platform="{cfg.platform}" differ; give one of them')
    return platform if cfg.platform == "auto" else cfg.platform
