"""What the command line asks for, as problems of kernels; and the processes that search."""

import argparse
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_core.kernels.contract import Problem
from jax_core.masks.dropout import seed_words
from jax_core.operands import Operands
from jax_core.options import Options
from jax_core.request.dispatch import KERNELS
from jax_core.request.features import refusal
from jax_core.request.preferences import preferred_kernels
from jax_core.request.spec import make_problem
from jax_core.tune.keys import key_of
from jax_core.tune.search import Limits, Result, candidates, search
from tools.tune.models import SHAPES

STOP = 0.12  # the part of the time at whose beginning no more candidates are compiled


class Work(NamedTuple):
    """``name``: for whom it is. ``platform``: the kernel's. ``also``: how many of the asked shapes share its key besides."""

    name: str
    platform: str
    problem: Problem
    also: int = 0

    @property
    def key(self) -> str:
        return key_of(self.platform, self.problem)

    @property
    def candidates(self) -> int:
        return sum(map(len, candidates(KERNELS[self.platform], self.problem)))


class Done(NamedTuple):
    work: Work
    results: dict[str, Result]
    failed: str | None = None


def asked(options: argparse.Namespace) -> list[Work]:
    """The first of each key. ValueError or NotImplementedError for what cannot be."""
    works: dict[str, Work] = {}
    for length in options.length:
        for name, sizes, settings, arrays in _shapes(options):
            work = _work(f"{name}, {length}", options, length, sizes, settings, arrays)
            first = works.get(work.key)
            works[work.key] = work if first is None else first._replace(also=first.also + 1)
    return list(works.values())


Sizes = tuple[int, int, int, int]  # heads, kv_heads, dim, value_dim


def _shapes(options: argparse.Namespace) -> Iterator[tuple[str, Sizes, dict[str, Any], set[str]]]:
    if options.all_models:
        for shape in SHAPES:
            sizes = shape.heads, shape.kv_heads, shape.dim, shape.dim
            yield shape.model, sizes, shape.options, {"sinks"} if shape.sinks else set()
        return
    sizes = options.heads, options.kv_heads, options.dim, options.value_dim
    settings = dict(
        causal=options.causal,
        sliding_window=options.window[0]
        if options.window and len(options.window) == 1
        else options.window and tuple(options.window),
        chunk_size=options.chunk,
        logits_soft_cap=options.softcap,
        dropout_prob=options.dropout,
        fused_backward=options.fused_backward,
    )
    arrays = {name for name in ("segments", "positions", "bias", "mask", "alibi", "sinks") if getattr(options, name)}
    yield f"{sizes[0]}:{sizes[1]} heads of {sizes[2]}", sizes, settings, arrays


def _work(name: str, options: argparse.Namespace, length: int, sizes: Sizes, settings: dict[str, Any], arrays: set[str]) -> Work:
    problem, _ = make_problem(Options(**settings), _operands(options, length, sizes, settings, arrays))
    platform = _platform(problem) if options.platform == "auto" else options.platform
    kernel = KERNELS[platform]
    reason = refusal(problem.features - {"contiguous", "softmax_aux"}, kernel.CAPABILITIES)
    reason = reason or kernel.unsupported(problem, *kernel.default_params(problem))
    if reason is not None:
        raise NotImplementedError(f'platform="{platform}" cannot compute {name}: {reason}')
    return Work(name, platform, problem)


def _operands(options: argparse.Namespace, length: int, sizes: Sizes, settings: dict[str, Any], arrays: set[str]) -> Operands:
    """By shape and dtype alone."""
    heads, kv_heads, dim, value_dim = sizes

    def struct(name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype) if name in {"always", *arrays} else None

    ids, plane = (options.batch, length), (1, 1, length, length)
    with jax.enable_x64(options.dtype == "float64"):
        return Operands(
            query=struct("always", (options.batch, length, heads, dim), options.dtype),
            key=struct("always", (options.batch, length, kv_heads, dim), options.dtype),
            value=struct("always", (options.batch, length, kv_heads, value_dim), options.dtype),
            softmax_aux=struct("sinks", (heads,), jnp.float32),
            bias=struct("bias", plane, options.dtype),
            mask=struct("mask", plane, jnp.bool_),
            q_segment_ids=struct("segments", ids, jnp.int32),
            kv_segment_ids=struct("segments", ids, jnp.int32),
            q_position_ids=struct("positions", ids, jnp.int32),
            kv_position_ids=struct("positions", ids, jnp.int32),
            alibi_slopes=struct("alibi", (heads,), jnp.float32),
            dropout_seed=seed_words(0) if settings.get("dropout_prob") else None,
        )


def _platform(problem: Problem) -> str:
    """The first that ``auto`` would try and that has candidates for this."""
    names = preferred_kernels(problem)
    return next((name for name in names if any(candidates(KERNELS[name], problem))), names[-1])


def run(works: list[Work], workers: int, seconds: float, rounds: int) -> Iterator[Done]:
    """The results as they come, in any order. When the time is over, those that are not there yet are not waited for."""
    begun = time.monotonic()
    until = begun + (1 - STOP) * seconds
    if workers == 1:
        yield from (_one(nullcontext(), until, rounds, work) for work in works)
        return
    fresh = multiprocessing.get_context("spawn")  # a fork of a process that runs JAX would hang
    with fresh.Manager() as manager:
        others, turn = set(multiprocessing.active_children()), manager.Lock()
        pool = ProcessPoolExecutor(min(workers, len(works)), mp_context=fresh)
        try:
            tasks = {pool.submit(_one, turn, until, rounds, work): work for work in works}
            left = None if seconds == float("inf") else max(0.0, begun + seconds - time.monotonic())
            yield from (_result(task, tasks[task]) for task in as_completed(tasks, left))
        except TimeoutError:
            return
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()


def _result(task: Future[Done], work: Work) -> Done:
    try:
        return task.result()
    except BrokenProcessPool:
        return Done(work, {}, "a process that searched was ended from outside, and all others with it")


def _one(lock: Any, until: float, rounds: int, work: Work) -> Done:
    if time.monotonic() > until:
        return Done(work, {}, "there was no time for it")
    try:
        return Done(work, search(KERNELS[work.platform], work.problem, Limits(lambda: lock, until, rounds)))
    except Exception as error:  # the other problems go on
        return Done(work, {}, f"{type(error).__name__}: {error}")
