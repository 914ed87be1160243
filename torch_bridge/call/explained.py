"""What a call would run."""

from typing import NamedTuple

from jax_core.request.explain import Explanation, explained, heard
from torch_bridge.backends.operation import Form, forms_of
from torch_bridge.call.programs import request_of
from torch_bridge.job.mesh import Ring
from torch_bridge.job.ring import Tensors


class ExplainedCall(NamedTuple):
    description: str
    explanation: Explanation
    results: tuple[Form, ...]


def explain_call(operands: Tensors, key: str) -> ExplainedCall:
    """Of the call with this key for tensors of these forms, decided anew as for its program. Starts JAX. Raises NotImplementedError
    on an XLA device, whose calls are parts of graphs."""
    from torch_bridge.backends.compiled import local_of

    first = operands[0]
    assert first is not None
    request = request_of(key, forms_of(operands), first.device)
    if not isinstance(request.ring, Ring):
        raise NotImplementedError(f"calls on CPUs and GPUs can be explained, got one on {first.device.type}: jax_core.explain can")
    with heard() as decisions:
        local_of(request, request.ring)
    return ExplainedCall(str(request), explained(decisions[-1]), request.results)
