"""The configuration of a request: what the caller gave, else the user's cache, else what is shipped for this device, else a search
where one was asked for, else the kernel's own choice."""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax

from jax_core.caches import cache_folder, warn_once
from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Kernel, Problem
from jax_core.tune import search, store
from jax_core.tune.agreement import agreed
from jax_core.tune.devices import device_name, file_name
from jax_core.tune.keys import key_of
from jax_core.tune.table import PASSES, Table, Tuned, from_json

SHIPPED = Path(__file__).parent / "shipped"
Params = tuple[FwdParams, BwdParams]


class Origin(NamedTuple):
    """A pass's configuration that was measured, and where it is kept."""

    tuned: Tuned
    place: str


def completed(name: str, kernel: Kernel, problem: Problem, params: Params, autotune: bool = False) -> Params:
    """``params`` with every number in place. A pass of which it gives some numbers is completed by the kernel; what was measured
    stands for a pass as a whole.

    Nothing is looked up for a kernel without candidates, nor for devices that JAX does not run on here (a program that is compiled
    ahead of time). In a job of several processes the one that asks first decides.
    """
    defaults = kernel.default_params(problem)
    chosen = params[0].completed(defaults[0]), params[1].completed(defaults[1])
    open_passes = [way for way, part in zip(PASSES, params, strict=True) if set(vars(part).values()) == {None}]
    if not open_passes or problem.backend != jax.default_backend() or not hasattr(kernel, "configs"):
        return chosen
    device, key = device_name(problem.backend), key_of(name, problem)
    what = f"{device}, {key}{', searching' if autotune else ''}"
    decided = json.loads(agreed(what, lambda: json.dumps(_decide(name, kernel, problem, key, device, autotune))))
    measured = {way: PASSES[way](**decided[way]) for way in open_passes if way in decided}
    # Asked here, not by the process that decided: its problem had the same key, and may not have been the same.
    running = {way: params for way, params in measured.items() if _runs(kernel, problem, key, params)}
    forward, backward = (running.get(way, part) for way, part in zip(PASSES, chosen, strict=True))
    assert isinstance(backward, BwdParams)
    return forward, backward


def _decide(name: str, kernel: Kernel, problem: Problem, key: str, device: str, autotune: bool) -> dict[str, dict[str, int | None]]:
    params_of = {way: origin.tuned.params for way, origin in origins(key, device).items()}
    if autotune and len(params_of) < len(PASSES):
        params_of = _searched(name, kernel, problem, key, device) | params_of
    return {way: vars(params) for way, params in params_of.items()}


def origins(key: str, device: str) -> dict[str, Origin]:
    """By pass, what the user's cache or the shipped data hold for a key."""
    tables = {"shipped": shipped(device), "cache": user_table(device)}
    return {way: Origin(tuned, place) for place, table in tables.items() for way, tuned in table.get(key, {}).items()}


@cache
def shipped(device: str) -> Table:
    path = SHIPPED / file_name(device)
    try:
        return from_json(path.read_text(encoding="utf-8"), device) if path.exists() else {}
    except ValueError as error:  # a device whose name differs in what a file's name does not show
        warn_once(f"the shipped configurations in {path.name} are not used: {error}")
        return {}


def user_table(device: str) -> Table:
    path = user_file(device)
    return {} if path is None else _read_once(path, device)


def user_file(device: str) -> Path | None:
    """Where the user's cache has the configurations of a device; None if caches are off."""
    folder = cache_folder()
    return None if folder is None else folder / "tune" / file_name(device)


@cache
def _read_once(path: Path, device: str) -> Table:
    """So that a lookup costs no file access, and a job's later programs have what its earlier ones had."""
    return store.read(path, device)


def remember(device: str, results: Table) -> None:
    """Keeps what a search has found in the user's cache; for this process also where there is none."""
    path = user_file(device)
    if path is not None and store.merge(path, device, results):
        _read_once.cache_clear()
    _searched_here().update(results)


@cache
def _searched_here() -> dict[str, Mapping[str, Tuned]]:
    return {}


def _searched(name: str, kernel: Kernel, problem: Problem, key: str, device: str) -> dict[str, FwdParams]:
    if key not in _searched_here():
        try:
            # In a thread of its own: the call may be in the middle of a trace, and nothing of the search belongs to it.
            with ThreadPoolExecutor(1) as thread:
                results = thread.submit(search.search, kernel, problem).result()
        except Exception as error:  # the attention itself can still be computed
            warn_once(f"the search for {key} failed ({type(error).__name__}: {error}); the kernel's own configuration is used")
            return {}
        remember(device, {key: {way: result.tuned for way, result in results.items() if result.tuned is not None}})
    return {way: tuned.params for way, tuned in _searched_here()[key].items()}


def _runs(kernel: Kernel, problem: Problem, key: str, params: FwdParams) -> bool:
    """Whether the kernel takes these parameters: a table is data, and its keys stand for many problems."""
    pair = search.as_pair(kernel, problem, params)
    reason = kernel.unsupported(problem, *pair)
    if reason is None or kernel.unsupported(problem, *kernel.default_params(problem)) is not None:
        return True  # or it is no fault of the parameters
    warn_once(f"the configuration kept for {key} cannot run here ({reason}); the kernel's own is used")
    return False
