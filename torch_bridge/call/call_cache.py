"""Calls that were made before. What was checked then, by the options and the specs of the tensors, need not be checked again: for a
short sequence that would take longer than the attention. Importing this module loads no JAX.
"""

from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from weakref import ref

import torch
import torch.distributed as dist
from torch._C import _are_functorch_transforms_active
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from torch_bridge.mesh.rings import MeshArg, started_by_a_launcher
from torch_bridge.mesh.trial import current

CachedCall = Callable[[tuple[torch.Tensor | None, ...]], tuple[torch.Tensor, ...]]  # of the operands, in the order of the operation

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None)))
MOST = 4096  # calls: of one program there may be many, as with a mesh made anew each time
_DEVICES = ("cpu", "cuda")  # the devices whose tensors go through no graph
# A process has one JAX and one set of programs, hence module-level state.
_CALLS: dict[Hashable, CachedCall] = {}


def lookup(key: Hashable) -> CachedCall | None:
    """How to make the call of this key once more, if it was made before."""
    try:
        return _CALLS.get(key) if key is not None else None
    except TypeError:  # an option without a hash, which the call's own checks object to
        return None


def store(key: Hashable, repeat: CachedCall) -> None:
    if len(_CALLS) >= MOST:
        clear()
    with suppress(TypeError):
        _CALLS[key] = repeat


def clear() -> None:
    """As where a program is dropped: a stored call would keep it."""
    _CALLS.clear()


def observed() -> bool:
    """Whether something may need to see an operator: tracing, a function transform, a dispatch mode, a profiler."""
    return bool(
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch.autograd._profiler_enabled()
        or _are_functorch_transforms_active()
    )


def key(where: MeshArg, tensors: Iterable[object], *settings: Hashable) -> Hashable:
    """What the checks of a call look at: its settings, the specs of its tensors, who shares the sequence, and torch's own settings.
    None if it must be looked at each time: something observes it, or a tensor is no plain one on a CPU or a GPU."""
    specs: list[Hashable] = []
    kind = ""
    for x in tensors:
        if x is None:
            specs.append(None)
        elif type(x) not in PLAIN or x.is_nested:  # type: ignore[attr-defined]
            return None
        else:
            device = x.device  # type: ignore[attr-defined]
            kind = kind or device.type
            specs += (x.shape, x.dtype, device, x.layout)  # type: ignore[attr-defined]
    if observed() or kind not in _DEVICES:
        return None
    mesh, dim = where
    kinds = tuple(map(type, dim)) if isinstance(dim, tuple) else type(dim)  # True equals 1, and is refused
    return *settings, *specs, _weak(mesh), kinds, dim, *_surroundings(mesh, kind)


def _surroundings(mesh: object, kind: str) -> tuple[Hashable, ...]:
    world = dist.group.WORLD if dist.is_available() else None
    alone = world is None and mesh is None and not started_by_a_launcher()
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return _weak(world), alone, autocast, torch.are_deterministic_algorithms_enabled(), current()


def _weak(x: object) -> object:
    """So that a process group may end: a reference equals another of the same object, and none once that is gone."""
    return ref(x) if type(x).__weakrefoffset__ else x
