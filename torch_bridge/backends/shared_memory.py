"""The backend for CPUs and CUDA GPUs: tensors become JAX arrays through DLPack, with zero copy, and each rank runs its part of a
program that JAX compiles over all processes of the ring. The first call loads JAX; importing this module does not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from torch_bridge.backends.dlpack import precision_scope
from torch_bridge.backends.operation import Request
from torch_bridge.mesh.protocol import AnyRing
from torch_bridge.mesh.rings import ProcessRing
from torch_bridge.mesh.rings import resolve as resolve
from torch_bridge.start.runtime import start

if TYPE_CHECKING:
    from torch_bridge.backends.compiled import CompiledProgram

OPERATORS = None
_DEVICES = ("cpu", "cuda")


def check(query: torch.Tensor) -> None:
    if query.device.type not in _DEVICES:
        shapes = "; for shapes alone call it under torch's FakeTensorMode" if query.is_meta else ""
        raise ValueError(
            f"tensors must be on one of the devices cpu, cuda, xla, tpu; got {query.device}: move them with .to(){shapes}"
        )


@contextmanager
def tracing(ring: AnyRing, query: torch.Tensor) -> Iterator[None]:
    assert isinstance(ring, ProcessRing)
    start(ring=ring, device=query.device)
    with precision_scope(query.dtype):
        yield


def program(request: Request) -> "CompiledProgram":
    """On a ring of several processes this is a collective, in which they compare their requests."""
    from torch_bridge.backends import compiled

    return compiled.program(request)
