"""The interface of a backend: one path for torch tensors into a JAX program and for its results back.

A backend is a module that implements :class:`Backend`; ``dispatch`` chooses by the type of the tensors' device.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from torch_bridge.backends.operation import Program, Request, Results
from torch_bridge.mesh.protocol import AnyRing
from torch_bridge.mesh.rings import MeshDim, MeshLike


class Operators(NamedTuple):
    """A program's methods as functions of the number of its custom ops, which torch's tracers see."""

    forward: Callable[..., Results]
    backward: Callable[..., list[torch.Tensor]]


class Backend(Protocol):
    """What a backend's module provides. ``OPERATORS``: None if its programs are not custom ops themselves."""

    @property
    def OPERATORS(self) -> Operators | None: ...

    def resolve(self, mesh: MeshLike = None, mesh_dim: MeshDim = None) -> AnyRing:
        """The ring that ``mesh`` stands for. Cheap: no communication, and JAX is not started."""

    def check(self, query: torch.Tensor) -> None:
        """Raises for a device or dtype that this backend does not support."""

    def tracing(self, ring: AnyRing, query: torch.Tensor) -> AbstractContextManager[object]:
        """A context in which JAX may trace a function for a call with ``query``."""

    def program(self, request: Request) -> Program:
        """Checks the request (ValueError, NotImplementedError) and makes its program."""
