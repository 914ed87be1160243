"""A model's step of decoding: on a GPU it is captured in a CUDA graph, so that a token costs the host next to nothing."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ring_attn.generation.cache import KVCache
from ring_attn.generation.checks import check_room
from torch_bridge.backends import capture
from torch_bridge.failures.device_progress import recorded
from torch_bridge.failures.watchdog import exchange, watch

Model = Callable[[Tensor, Tensor, KVCache], Tensor | None]


class DecodingStep:
    """``step(token [batch])`` is ``model(token[:, None], cache.positions(), cache)``. The first one runs as it is, which compiles
    and compares what it needs; the second is captured, and replayed from then on, until the cache's memory is another. Where a
    rank cannot capture it, none does, and a warning says why."""

    def __init__(self, model: Model, cache: KVCache, cuda_graph: bool = True) -> None:
        self._model, self._cache, self._wanted = model, cache, cuda_graph
        self._graph: Graph | None = None
        self._memory: tuple[int, ...] = ()  # of the cache, after the last step

    def __call__(self, token: Tensor) -> Tensor | None:
        """Logits, to be read before the next step."""
        if self._cache.memory() != self._memory:
            self._graph = None
        elif self._graph is None and self._wanted and capturable(token):
            self._graph = self._captured(token)
        return self._run(token) if self._graph is None else self._replayed(self._graph, token)

    def _run(self, token: Tensor) -> Tensor | None:
        logits = self._model(token[:, None], self._cache.positions(), self._cache)
        self._memory = self._cache.memory()  # a layer may have been made
        return logits

    def _captured(self, token: Tensor) -> "Graph | None":
        """None, from here on, where it cannot be."""
        counts, graph, reason = self._cache.counts(), Graph(token), ""
        try:
            graph.capture(self._run)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        self._cache.set_counts(counts)  # nothing has run
        reasons = exchange(self._cache.ring.processes, "whether a step of decoding was captured", reason) or [reason]
        self._wanted = not any(reasons)
        if self._wanted:
            return graph
        warnings.warn(
            f"a step of decoding runs as it is, since it cannot be captured in a CUDA graph: {next(filter(None, reasons))}; have "
            "the model do the same for each token on the device alone, or give cuda_graph=False, which does not try",
            RuntimeWarning,
            stacklevel=4,
        )
        return None

    def _replayed(self, graph: "Graph", token: Tensor) -> Tensor | None:
        ring, counts = self._cache.ring.processes, self._cache.counts()
        check_room(self._cache.appended, 1, self._cache.longest, self._cache.max_length)
        with watch(ring, "forward", "a captured step of decoding") as watched:
            logits = graph.replay(token)
            watched.event = recorded(token.device)
        self._cache.set_counts({number: appended + 1 for number, appended in counts.items()})
        return logits


class Graph:
    """A function of ``token``, captured."""

    def __init__(self, token: Tensor) -> None:
        self._token = token.clone()
        self._graph = torch.cuda.CUDAGraph()
        self._result: Tensor | None = None

    def capture(self, function: Callable[[Tensor], Tensor | None]) -> None:
        # Threads of NCCL and the watchdog look at events meanwhile, which "global" forbids.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = function(self._token)

    def replay(self, token: Tensor) -> Tensor | None:
        self._token.copy_(token)
        self._graph.replay()
        return self._result


def capturable(token: Tensor) -> bool:
    return capture.DECODES_ON_GPUS and token.device.type == "cuda"
