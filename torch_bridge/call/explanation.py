"""What a call would run, and what was compiled for it."""

from torch_bridge.backends.executable import Compilation
from torch_bridge.backends.operation import Request, specs_of
from torch_bridge.call.programs import cached_program, request_of, with_caller_names
from torch_bridge.mesh.protocol import Tensors
from torch_bridge.mesh.rings import ProcessRing


def requested(key: str, operands: Tensors) -> Request:
    """What the call with this key asks for with tensors of these specs."""
    first = operands[0]
    assert first is not None
    return request_of(key, specs_of(operands), first.device)


def explain_request(key: str, request: Request) -> object:
    """Decided anew, as for its program: what the operation says of it. Starts JAX. Raises NotImplementedError on an XLA device,
    whose calls are parts of graphs, and the call's own errors, in its caller's words; the other ranks do not hear of them."""
    from torch_bridge.backends.compiled import local_of

    if not isinstance(request.ring, ProcessRing):
        device = request.device.type
        raise NotImplementedError(f"calls on CPUs and GPUs can be explained, got one on {device}: jax_core.explain can")
    with with_caller_names(key):
        return local_of(request, request.ring).explanation()


def compilations(key: str, request: Request) -> list[Compilation]:
    """The programs that calls with this request have compiled so far in this process."""
    from torch_bridge.backends.compiled import CompiledProgram

    program = cached_program(key, request)
    return program.compilations if isinstance(program, CompiledProgram) else []
