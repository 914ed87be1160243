"""Activation checkpointing that keeps attention: a layer is recomputed in the backward, its ring calls are not."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from weakref import ref

import torch
from torch import Tensor
from torch._C import _autograd
from torch.autograd.graph import saved_tensors_hooks

from torch_bridge.call.checkpointed_calls import CheckpointedCalls
from torch_bridge.call.host_copy import HostCopy
from torch_bridge.tracing import untraced


def keep_attention(*, offload: bool = False) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For ``context_fn`` of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``: the recomputation in the backward gets
    the results of the forward's ring calls, so that no attention is computed twice and nothing is sent twice.

    ```
    out = checkpoint(layer, x, use_reentrant=False, context_fn=ring_attn.keep_attention)
    ```

    Output and LSE are kept: ``tokens * heads * (value_dim * bytes + 4)`` bytes a call and rank. ``offload=True``
    (``functools.partial(ring_attn.keep_attention, offload=True)``): in pinned host memory, on their way while other layers compute.
    All gradients have the bits of full recomputation. Nothing else is kept; ring calls of other checkpoints are not concerned.

    Where the checkpoint is inside of what ``torch.compile`` compiles, name the operator in a policy of torch's own instead
    (docs/own-model.md). The backward raises RuntimeError where the function makes other ring calls than in the forward, or a kept
    output was changed in place.
    """
    calls = CheckpointedCalls(offload)
    return calls.first_run(), _SecondRun(calls)


class _SecondRun(AbstractContextManager[None]):
    """A context that may be entered again, by each backward through a graph that is retained."""

    def __init__(self, calls: CheckpointedCalls) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        self._entered = self._calls.second_run()
        self._entered.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered.__exit__(kind, error, trace)


class KeepingAttention:
    """``function``, which a checkpoint of any kind is to run twice, the second time with the results of the first one's ring calls.
    What ``torch.compile`` compiles is in the function; whether a run is the first, no graph can know."""

    def __init__(self, function: Callable[..., object], offload: bool = False) -> None:
        self._function, self._calls, self._again = function, CheckpointedCalls(offload), False

    @partial(untraced, recursive=False)
    def __call__(self, *arguments: object, **options: object) -> object:
        if not self._again:
            self._again = True
            with self._calls.first_run():
                return self._function(*arguments, **options)
        try:
            with self._calls.second_run():
                return self._function(*arguments, **options)
        finally:
            # What holds this function, torch's reentrant checkpoint, may outlive the backward; what it keeps must not.
            if torch._C._current_graph_task_id() != -1 and not _autograd._get_current_graph_task_keep_graph():
                self._calls.forget()


class _OfThisThread(threading.local):
    moved: "ref[_Moved] | None" = None


_here = _OfThisThread()


class _Moved:
    """A checkpoint's input on the host. The checkpoint before it is the next whose turn comes in the backward."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy, self._earlier = HostCopy(tensor), _here.moved
        _here.moved = ref(self)

    def back(self) -> Tensor:
        earlier = None if self._earlier is None else self._earlier()
        tensor = self._copy.on_device()
        if earlier is not None:
            earlier._copy.fetch()
        return tensor


def _moves(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda"


def moved_to_host(tensor: Tensor) -> AbstractContextManager[None]:
    """Around a checkpoint of which ``tensor`` is an input: what is saved of it is in pinned host memory until its backward, on the
    way while other layers compute. A CPU's stays where it is."""
    pointer, shape = tensor.data_ptr(), tensor.shape  # autograd keeps ``pack``, which must not keep the tensor

    def pack(saved: Tensor) -> _Moved | Tensor:
        is_it = saved.data_ptr() == pointer and saved.shape == shape
        return _Moved(saved) if is_it and _moves(saved) else saved

    return saved_tensors_hooks(pack, lambda saved: saved.back() if isinstance(saved, _Moved) else saved)
