"""JAX functions that are compiled ahead of their first call, so that compiling and running can be told apart.

What is compiled is logged under ``ring_attn``: each program with its time as INFO, which Python keeps to itself unless it is asked
to show it, and once in a process, as WARNING, that one takes long while it does.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Lock, RLock, Thread, Timer
from typing import NamedTuple

import jax

from jax_core.turns import in_turn
from torch_bridge.failures.watchdog import compiling

LOG = logging.getLogger("ring_attn")
Arrays = Sequence[jax.Array | jax.ShapeDtypeStruct | None]
LONG = 3.0  # seconds after which it is said that a program is being compiled


class Compilation(NamedTuple):
    """``seconds``: of tracing, lowering and compiling, or of reading from the programs that are kept on disk. ``temporaries``:
    bytes that XLA holds while the program runs, beside its arguments and results; None where it does not say."""

    what: str
    seconds: float
    temporaries: int | None

    def __str__(self) -> str:
        temporaries_text = "" if self.temporaries is None else f", {self.temporaries / 2**20:.1f} MiB of temporaries"
        return f"{self.what} in {self.seconds:.1f} s{temporaries_text}"


class _Compiled(NamedTuple):
    compiled: "jax.stages.Compiled"
    compilation: Compilation


class Executable:
    """``function``, of arrays that have the same shapes, dtypes and devices in every call; those that are absent (None) always are.

    ``what``, ``of``: what it is called in the log, and the call that it belongs to. ``loud``: whether this process says that it
    takes long. It is compiled once for each of JAX's default precisions, the one setting that its results depend on.
    """

    def __init__(self, function: "jax.stages.Wrapped", what: str, of: str, loud: bool) -> None:
        self.compilations: list[Compilation] = []
        self.meanwhile: Callable[[], object] | None = None  # called once while it is compiled, after it is lowered
        self._function, self._what, self._of, self._loud = function, what, of, loud
        self._compiled: dict[str | None, jax.stages.Compiled] = {}
        self._ahead: dict[str | None, Future[_Compiled]] = {}

    def __call__(self, *arrays: jax.Array | None) -> Sequence[jax.Array]:
        precision = _precision()
        compiled = self._compiled.get(precision)
        if compiled is None:
            compiled = self._compiled[precision] = self._first(precision, arrays)
        results: Sequence[jax.Array] = compiled(*arrays)
        return results

    def compile_ahead(
        self, arrays: Sequence[jax.ShapeDtypeStruct | None], scope: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Begin to compile for such arrays, on a thread of its own, within ``scope()`` as calls are. What fails there is left to
        the first call, which compiles again. Python waits for the thread before it ends."""
        precision = _precision()
        if precision not in self._compiled and precision not in self._ahead:
            self._ahead[precision] = _on_a_thread(partial(self._compile_within, scope, precision, tuple(arrays)))

    def _compile_within(
        self, scope: Callable[[], AbstractContextManager[object]], precision: str | None, arrays: Arrays
    ) -> _Compiled:
        with scope(), jax.default_matmul_precision(precision):  # None is JAX's default
            return self._compile(arrays)

    def _first(self, precision: str | None, arrays: tuple[jax.Array | None, ...]) -> "jax.stages.Compiled":
        ahead = self._ahead.pop(precision, None)
        built = self._compile(arrays) if ahead is None or ahead.exception() is not None else ahead.result()
        self.compilations.append(built.compilation)
        LOG.info("compiled %s: %s", built.compilation, self._of)
        return built.compiled

    def _compile(self, arrays: Arrays) -> _Compiled:
        started = time.perf_counter()
        with compiling(), in_turn(), _saying_if_it_takes_long(f"the {self._what} of {self._of}", self._loud):
            with _lowering:
                lowered = self._function.lower(*arrays)
            meanwhile, self.meanwhile = self.meanwhile, None
            if meanwhile is not None:
                meanwhile()
            compiled = lowered.compile()
        return _Compiled(compiled, Compilation(self._what, time.perf_counter() - started, _temporaries(compiled)))


# Lowering compiles kernels, by compilers that are not made for several threads. It holds the GIL anyway, but for those.
_lowering = RLock()


def _precision() -> str | None:
    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # made at run time
    return precision


def _on_a_thread(compute: Callable[[], _Compiled]) -> "Future[_Compiled]":
    future: Future[_Compiled] = Future()

    def run() -> None:
        try:
            future.set_result(compute())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, name="ring_attn compiles ahead").start()
    return future


def _temporaries(compiled: "jax.stages.Compiled") -> int | None:
    known = compiled.memory_analysis()
    return None if known is None else int(known.temp_size_in_bytes)


@contextmanager
def _saying_if_it_takes_long(what: str, loud: bool) -> Iterator[None]:
    timer = Timer(LONG, _announce, (what,))
    timer.daemon = True  # a process may end in the middle of it
    if loud and not _announced.locked():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


_announced = Lock()  # taken by the first announcement of the process, and kept


def _announce(what: str) -> None:
    if _announced.acquire(blocking=False):
        LOG.warning(
            "compiling %s, which has taken %.0f s so far; each new set of shapes and options is compiled once and kept on disk "
            '(docs/install.md). This is said once; the logger "ring_attn" tells of every program at level INFO',
            what,
            LONG,
        )
