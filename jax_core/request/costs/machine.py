"""A machine's figures, and those shipped with the library."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Link:
    """One way out of a GPU. ``bandwidth``: bytes a second; ``latency``: seconds from a transfer's start to its first byte."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Pass:
    """A kernel in one direction.

    ``product``: seconds per FLOP of its matrix products; ``score``: seconds per visible score, of all else that is done to one.
    ``edge``: further scores computed for each row at which the mask cuts through tiles; they make the rate grow with the length.
    ``launch``: seconds a step takes beside its work.
    ``joined``: bytes of memory moved to join a step with those before it, per element of the queries.
    ``host``, ``host_in_ring``: seconds of the host's work in a call from torch, alone and in a ring.
    """

    product: float
    score: float
    edge: float
    launch: float
    joined: float
    host: float
    host_in_ring: float


@dataclass(frozen=True)
class Kernel:
    """A platform's two directions."""

    forward: Pass
    backward: Pass


@dataclass(frozen=True)
class Machine:
    """Hosts of ``host_size`` GPUs. ``memory``: bytes a second of a GPU's memory. ``sharing``: the share of a GPU's compute that a
    transfer takes while it is under way. ``sustained``: how many times as long the kernels' work takes on a GPU that has been busy
    for a while as on a rested one, for which ``kernels`` holds. ``inside``, ``between``: the links of two GPUs of one host, and of
    different hosts."""

    memory: float
    sharing: float
    sustained: float
    host_size: int
    inside: Link
    between: Link
    kernels: Mapping[str, Kernel]


def load(name: str = "h200") -> tuple[Machine, dict[str, Any]]:
    """The shipped machine of that name, and where its figures come from: what was assumed, and what was fitted to which results.

    Raises ValueError for a name that is not shipped.
    """
    folder = files(__package__)
    known = sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json"))
    if name not in known:
        raise ValueError(f"machine must be one of {', '.join(known)}; got {name!r}")
    data = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return machine(data["machine"]), data["provenance"]


def machine(data: Mapping[str, Any]) -> Machine:
    """The inverse of ``dataclasses.asdict``."""
    kernels = {name: Kernel(Pass(**found["forward"]), Pass(**found["backward"])) for name, found in data["kernels"].items()}
    return Machine(**{**data, "inside": Link(**data["inside"]), "between": Link(**data["between"]), "kernels": kernels})
