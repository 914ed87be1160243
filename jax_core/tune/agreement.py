"""One process of a job decides, and the others follow.

What a cache holds, and what a search finds, may differ from host to host; a ring's processes must run one program. Whoever asks
first decides, so nobody waits for a process that never asks. The answers are kept by JAX's coordination service, which every job of
several processes has, those that torch started too (``torch_bridge.runtime``).
"""

from collections.abc import Callable
from typing import Protocol

import jax

from jax_core.internals import job

LIMIT = 900.0  # seconds: a search compiles some dozens of programs
_PREFIX = "ring_attn/tune/"


class _Client(Protocol):
    """Of the coordination service, and what it keeps."""

    def key_value_set(self, key: str, value: str, /) -> None: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int, /) -> str: ...


def agreed(what: str, decide: Callable[[], str]) -> str:
    """The result of ``decide`` in the process that asked for ``what`` first. RuntimeError if it does not answer in time."""
    client = _store()
    return decide() if client is None else _first_decides(client, what, decide, LIMIT)


def _store() -> _Client | None:
    """None in a job of one process."""
    client = job().client
    return None if client is None or job().num_processes in (None, 1) else client


def _first_decides(client: _Client, what: str, decide: Callable[[], str], limit: float) -> str:
    key = f"{_PREFIX}{what}"
    if not _claims(client, f"{key}/by"):
        return _answer(client, key, what, limit)
    try:
        decision = decide()
    except BaseException:
        client.key_value_set(f"{key}/is", "")  # nobody waits for an answer that does not come
        raise
    client.key_value_set(f"{key}/is", f"={decision}")
    return decision


def _claims(client: _Client, key: str) -> bool:
    """Whether this process is the first; of equal keys the service takes one."""
    try:
        client.key_value_set(key, str(job().process_id))
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return False
    return True


def _answer(client: _Client, key: str, what: str, limit: float) -> str:
    by = client.blocking_key_value_get(f"{key}/by", int(limit * 1000))
    try:
        answer = client.blocking_key_value_get(f"{key}/is", int(limit * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(f"process {by} was to choose the configuration of {what}, and did not in {limit:g} s") from error
    if not answer:
        raise RuntimeError(f"process {by} failed while it chose the configuration of {what}; see its log")
    return answer.removeprefix("=")
