"""A model's step of decoding: on a GPU it is captured in a CUDA graph, so that a token costs the host next to nothing."""

import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from ring_attn.generation.cache import KVCache
from ring_attn.generation.checks import check_room
from torch_bridge.attention.peer_memory import follow_the_last
from torch_bridge.failures.events import recorded
from torch_bridge.failures.watchdog import exchange, watch

Model = Callable[[Tensor, Tensor, KVCache], Tensor | None]


class DecodingStep:
    """``step(token [batch])`` is ``model(token[:, None], cache.positions(), cache)``. The first one runs as it is, which compiles
    and compares what it needs, and makes layers that have had no prompt; the second is captured, and replayed from then on, until
    the cache's memory is another. Where a rank cannot capture it, none does, and a warning says why. :meth:`close` it: NCCL ends no
    communicator that a graph may still use."""

    def __init__(self, model: Model, cache: KVCache, cuda_graph: bool = True) -> None:
        self._model, self._cache, self._wanted = model, cache, cuda_graph
        self._graph: Graph | None = None
        self._memory: tuple[int, ...] | None = None  # of the cache, after the last step

    def __call__(self, token: Tensor) -> Tensor | None:
        """Logits, to be read before the next step."""
        if self._cache.memory() != self._memory:
            self.close()
        elif self._graph is None and self._wanted and capturable(token):
            self._graph = self._captured(token)
        return self._run(token) if self._graph is None else self._replayed(self._graph, token)

    def close(self) -> None:
        """Lets go of the graph. The next step runs as the first one does."""
        if self._graph is not None:
            self._graph.reset()
        self._graph, self._memory = None, None

    def _run(self, token: Tensor) -> Tensor | None:
        logits = self._model(token[:, None], self._cache.positions(), self._cache)
        self._memory = self._cache.memory()  # a layer may have been made
        return logits

    def _captured(self, token: Tensor) -> "Graph | None":
        """None, from here on, where it cannot be."""
        cache, graph, reason = self._cache, Graph(token), ""
        counts, memory = cache.counts(), self._memory
        layers = {number: replace(layer) for number, layer in cache.layers.items()}
        try:
            graph.capture(self._run)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if not reason and self._memory != memory:
            reason = "the second step needed other memory of the cache than the first, as for a layer that is new"
        # Nothing has run: memory that it has made holds nothing.
        cache.layers, self._memory = layers, memory
        cache.set_counts(counts)
        reasons = exchange(cache.ring.processes, "whether a step of decoding was captured", reason) or [reason]
        self._wanted = not any(reasons)
        if self._wanted:
            return graph
        graph.reset()
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
        follow_the_last(token.device)
        with watch(ring, "forward", "a captured step of decoding") as watched:
            logits = graph.replay(token)
            watched.event = recorded(token.device)
        self._cache.set_counts({number: appended + 1 for number, appended in counts.items()})
        return logits


# Where steps were captured whose graphs are gone. cuBLAS keeps memory for each stream that it has met, so streams are used again;
# and newer versions of torch clear that memory when a graph of the stream is reset, so no two graphs
# share one (of up to 32, as many as torch has).
_FREE_STREAMS: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


class Graph:
    """A function of ``token``, captured."""

    def __init__(self, token: Tensor) -> None:
        self._token = token.clone()
        self._graph = torch.cuda.CUDAGraph()
        free = _FREE_STREAMS[token.device]
        self._stream = free.pop() if free else torch.cuda.Stream(token.device)
        self._result: Tensor | None = None

    def capture(self, function: Callable[[Tensor], Tensor | None]) -> None:
        device = self._token.device
        with torch.cuda.device(device):
            before, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
            try:
                # Threads of NCCL and the watchdog look at events meanwhile, which "global" forbids.
                with torch.cuda.graph(self._graph, pool, self._stream, capture_error_mode="thread_local"):
                    self._result = function(self._token)
            except BaseException:
                _leave_capture(before, pool)
                raise

    def replay(self, token: Tensor) -> Tensor | None:
        self._token.copy_(token)
        self._graph.replay()
        return self._result

    def reset(self) -> None:
        """Once."""
        self._result = None
        self._graph.reset()
        _FREE_STREAMS[self._token.device].append(self._stream)


def _leave_capture(stream: torch.cuda.Stream, pool: tuple[int, int]) -> None:
    """What torch leaves as it is where a capture does not end: its own stream is the current one, the allocator still gives the
    graph's memory and frees none, and the device's generator, still in the capture, gives no random numbers."""
    torch.cuda.set_stream(stream)
    with suppress(RuntimeError):  # of the first: torch has ended it
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        torch._C._cuda_releasePool(stream.device_index, pool)
        generator = torch.cuda.default_generators[stream.device_index]
        generator.graphsafe_set_state(generator.clone_state())


def capturable(token: Tensor) -> bool:
    return token.device.type == "cuda"
