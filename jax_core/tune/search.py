"""The search: every candidate of a kernel is compiled, compared with the reference, and timed; the fastest that is right wins."""

import datetime
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Kernel, Params, Problem
from jax_core.tune import timing
from jax_core.tune.devices import versions
from jax_core.tune.inputs import Inputs, make_inputs
from jax_core.tune.programs import Program, Reference, Results, calls_per_sample, make_program, make_reference
from jax_core.tune.table import PASSES, Tuned

FINALISTS = 2  # beside the heuristic's
NOISE = 0.01  # what must be won, as a part of the time, to leave the heuristic
_SUMS = {"float64": 1e-12}  # the relative error of sums over some thousand terms, else in float32:
_SUMS_IN_FLOAT32 = 1e-5


Candidates = tuple[tuple[FwdParams, ...], tuple[BwdParams, ...]]


@dataclass(frozen=True)
class Limits:
    """How a search is held: ``turn`` is entered while the device is to be undisturbed, ``until`` (of time.monotonic) ends it with
    what it has, ``rounds`` of samples decide."""

    turn: Callable[[], AbstractContextManager[object]] = nullcontext
    until: float = float("inf")
    rounds: int = timing.ROUNDS


class Result(NamedTuple):
    """Of one pass. ``tuned``: None if no candidate could run, or the time was over before there were two. ``tried``: how many of
    ``listed`` were compiled. ``dropped``: which of them were left out, with the reasons."""

    tuned: Tuned | None
    heuristic: FwdParams
    tried: int
    listed: int
    dropped: tuple[str, ...]


def candidates(kernel: Kernel, problem: Problem) -> Candidates:
    """Those that its ``configs(problem)`` lists for the forward and for the backward, without those that it refuses; none for a
    kernel without ``configs``, whose parameters are not the caller's to choose."""
    configs = getattr(kernel, "configs", None)
    if configs is None:
        return (), ()
    forward, backward = configs(problem)
    return _running(kernel, problem, forward), _running(kernel, problem, backward)


def as_pair(kernel: Kernel, problem: Problem, params: FwdParams) -> tuple[FwdParams, BwdParams]:
    """With the kernel's own choice for the other pass."""
    forward, backward = kernel.default_params(problem)
    return (forward, params) if isinstance(params, BwdParams) else (params, backward)


def _running(kernel: Kernel, problem: Problem, listed: Iterable[Params]) -> tuple[Params, ...]:
    return tuple(
        params for params in dict.fromkeys(listed) if kernel.unsupported(problem, *as_pair(kernel, problem, params)) is None
    )


def search(kernel: Kernel, problem: Problem, limits: Limits = Limits()) -> dict[str, Result]:
    """By pass. The candidates attend from one shard to its own keys, in arrays of the problem's shapes, on one local device: the
    first of the problem's backend. NotImplementedError if no such arrays can be made or the kernel has no candidates."""
    if not any(candidates(kernel, problem)):
        raise NotImplementedError("the kernel has no candidates for this")
    device = jax.local_devices(backend=problem.backend)[0]
    with jax.default_device(device), jax.enable_x64(problem.dtype == "float64"):
        inputs = make_inputs(problem)
        compute = make_reference(problem, inputs)
        with limits.turn():
            reference = jax.block_until_ready(compute())
        return {way: _search_pass(way, kernel, problem, inputs, reference, limits) for way in PASSES}


def _search_pass(way: str, kernel: Kernel, problem: Problem, inputs: Inputs, reference: Reference, limits: Limits) -> Result:
    number = list(PASSES).index(way)
    heuristic = kernel.default_params(problem)[number]
    listed = dict.fromkeys((heuristic, *candidates(kernel, problem)[number]))
    calls = calls_per_sample(problem)
    right: dict[FwdParams, Program] = {}
    dropped = []
    for params in _in_time(listed, limits):
        try:
            program = make_program(kernel, problem, params, inputs, reference.residuals, calls)
            reason = wrong(jax.block_until_ready(program()), reference.results[way], problem.dtype)
        except Exception as error:  # whatever a compiler raises, the others go on
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
        if reason is None:
            right[params] = program
        else:
            dropped.append(f"{formatted(params)}: {reason}")
    tried = len(right) + len(dropped)
    complete = tried == len(listed)
    fastest = _fastest(right, heuristic, problem, limits, calls, complete) if right and (complete or tried > 1) else None
    return Result(fastest, heuristic, tried, len(listed), tuple(dropped))


def _in_time(listed: Iterable[FwdParams], limits: Limits) -> Iterable[FwdParams]:
    """The first one in any case."""
    for number, params in enumerate(listed):
        if number and time.monotonic() > limits.until:
            return
        yield params


def _fastest(
    programs: dict[FwdParams, Program], heuristic: FwdParams, problem: Problem, limits: Limits, calls: int, complete: bool
) -> Tuned:
    rest = 0.0 if problem.backend == "cpu" else timing.REST
    with limits.turn():
        once = timing.take_turns(programs, 1, 0.0)
        finalists = sorted(programs, key=lambda params: once[params])[:FINALISTS]
        timed = {params: programs[params] for params in dict.fromkeys((heuristic, *finalists)) if params in programs}
        times = timing.take_turns(timed, limits.rounds, rest)
    best, heuristic_time = min(times, key=lambda params: times[params]), times.get(heuristic)
    if heuristic_time is not None and times[best] > (1 - NOISE) * heuristic_time:
        best = heuristic
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Tuned(best, times[best] / calls, None if heuristic_time is None else heuristic_time / calls, complete, today, versions())


def wrong(results: Results, reference: Results, dtype: str) -> str | None:
    """What of the results is not the reference's within two roundings to the dtype and the error of its sums, or None."""
    allowed = 2 * float(jnp.finfo(dtype).eps) + _SUMS.get(dtype, _SUMS_IN_FLOAT32)
    errors = {name: difference(results[name], exact) for name, exact in reference.items()}
    bad = [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= allowed]
    return f"wrong: {', '.join(bad)}, where {allowed:.1e} is allowed" if bad else None


def difference(result: jax.Array, exact: jax.Array) -> float:
    """The root mean square of the difference over that of ``exact``; rows of the LSE that saw nothing must agree on it."""
    wide = exact.dtype
    a, b = result.astype(wide), exact
    nothing = jnp.isneginf(a) & jnp.isneginf(b)
    a, b = jnp.where(nothing, 0, a), jnp.where(nothing, 0, b)
    scale = jnp.sqrt(jnp.mean(b * b))
    return float(jnp.sqrt(jnp.mean((a - b) ** 2)) / jnp.where(scale > 0, scale, 1))


def formatted(params: FwdParams) -> str:
    """As ``64 x 128, 3 stages, 8 warps``."""
    words = [f"{params.q_blocksize} x {params.kv_blocksize}"]
    words += [f"{number} {name}" for name, number in (("stages", params.num_stages), ("warps", params.num_warps)) if number]
    return ", ".join(words)
