"""What a ring call runs and why, without a look into the library: of one call, or of all calls of a model."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from jax_core.request.explain import Explanation
    from ring_attn.functional import AttentionOptions
    from torch_bridge.backends.operation import Request


def explain(q: Tensor, k: Tensor, v: Tensor, **options: "Unpack[AttentionOptions]") -> "Explanation":
    """What :func:`ring_attn.ring_attention` would run with these arguments: the strategy, the kernel and its tiles, why the others
    would not be taken, and the bytes sent and held (:class:`jax_core.request.explain.Explanation`; ``print`` it).

    Nothing is computed, compiled, sent or drawn. It is checked as the call is, and raises what that raises. Like a first call it
    starts JAX, on all processes of the job: call it on every rank.
    """
    from ring_attn.functional import ring_attention

    if options.get("dropout_p") and options.get("dropout_seed") is None:
        options["dropout_seed"] = 0  # in the place of one from torch's generator, which stays as it is
    with torch.no_grad(), Explaining(run=False) as calls:
        ring_attention(q, k, v, **options)
    from jax_core.request.explain import Explanation

    (explanation,) = calls.found.values()
    assert isinstance(explanation, Explanation)
    return explanation


class Explaining(TorchDispatchMode):
    """Explains the ring calls of a block, as torch's ``FlopCounterMode`` counts operations: ``with Explaining() as calls:
    model(**batch)``, then ``print(calls)``. Calls in graphs that ``torch.compile`` has made are not seen.

    ``found``: by the call's description, in the order of the first calls. ``str`` adds what has been compiled for each until then,
    also for a backward after the block. ``run``: False leaves the calls out; their results are then not initialised.
    """

    def __init__(self, run: bool = True) -> None:
        super().__init__()
        self.run = run
        self.found: dict[str, object] = {}
        self._requests: dict[str, tuple[str, Request]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        if str(func) != "ring_attn.forward.default":  # which no process has before its first call
            return func(*args, **(kwargs or {}))
        from torch_bridge.call.explanation import explain_request, requested

        operands, key = args
        request = requested(key, operands)
        if str(request) not in self.found:
            self.found[str(request)] = explain_request(key, request)
            self._requests[str(request)] = key, request
        return func(*args) if self.run else [operands[0].new_empty(spec.shape, dtype=spec.dtype) for spec in request.results]

    def __str__(self) -> str:
        from torch_bridge.call.explanation import compilations

        parts = []
        for description, explanation in self.found.items():
            compiled = (f"compiled  {each}" for each in compilations(*self._requests[description]))
            parts.append("\n".join((description, str(explanation), *compiled)))
        return "\n\n".join(parts)
