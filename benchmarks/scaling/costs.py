"""What a ring's pass costs: predicted from its schedule and a machine's measured figures, with no array computed and no backend
started.

``ring_stages`` lists what every rank does, stage by stage, from the schedule that the ring runs; ``estimate`` adds the stages up in
closed form; ``simulate`` plays them through, rank by rank. A ``Machine`` holds the figures, fitted by predict.py. README.md
explains the model and shows how far it is from what was measured.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from heapq import heappop, heappush
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_core.masks.layout import Layout, Run, check_shard_length, runs
from jax_core.masks.static import Mask
from jax_core.strategies.ring.loop import visible_shifts
from jax_core.strategies.rotation import Step, steps

# ---------------------------------------------------------------------------------------------------- machine
# A machine's figures, and those shipped with the library.

FIGURES = Path(__file__).parent


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
    known = sorted(path.stem.removeprefix("costs_") for path in FIGURES.glob("costs_*.json"))
    if name not in known:
        raise ValueError(f"machine must be one of {', '.join(known)}; got {name!r}")
    data = json.loads((FIGURES / f"costs_{name}.json").read_text(encoding="utf-8"))
    return machine(data["machine"]), data["provenance"]


def machine(data: Mapping[str, Any]) -> Machine:
    """The inverse of ``dataclasses.asdict``."""
    kernels = {name: Kernel(Pass(**found["forward"]), Pass(**found["backward"])) for name, found in data["kernels"].items()}
    return Machine(**{**data, "inside": Link(**data["inside"]), "between": Link(**data["between"]), "kernels": kernels})


# ---------------------------------------------------------------------------------------------------- work
# How much a rank computes at a step: the visible scores of its queries and a shard of keys, counted exactly and for all ranks at
# once, by arithmetic on their runs.

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Call:
    """Self-attention over ``size`` ranks that hold ``length`` positions each. ``itemsize``: bytes of an element of q, k, v.
    ``home_itemsize``: of dK/dV on the way home, if not as many."""

    length: int
    size: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    value_dim: int = 128
    batch: int = 1
    itemsize: int = 2
    mask: Mask = Mask(causal=True)
    layout: Layout = "zigzag"
    home_itemsize: int | None = None

    def __post_init__(self) -> None:
        check_shard_length(self.layout, self.length, size=self.size)

    def split_over(self, size: int) -> "Call":
        """The same sequence on ``size`` ranks. Raises ValueError if it cannot be split evenly."""
        tokens = self.length * self.size
        if tokens % size:
            raise ValueError(
                f"the sequence's length must be a multiple of the number of ranks; got {tokens} tokens on {size} ranks"
            )
        return replace(self, length=tokens // size, size=size)

    def flop(self, direction: str) -> float:
        """Floating point operations of all ranks, a score of a causal square's diagonal counted as half, as is customary."""
        shares = (seen(self, shift).scores.sum() for shift in range(self.size))
        counted = sum(shares) - (self.size * self.length / 2 if self.mask.causal else 0)
        return float(counted * flop_per_score(self, direction))


def flop_per_score(call: Call, direction: str) -> int:
    """Of all heads: two products in the forward, five in the backward."""
    dims = call.dim + call.value_dim if direction == "forward" else 3 * call.dim + 2 * call.value_dim
    return 2 * call.batch * call.heads * dims


class Seen(NamedTuple):
    """Per rank, of one head: visible ``scores``, and ``cut``, the rows at which a bound of the mask lies within the keys."""

    scores: np.ndarray
    cut: np.ndarray


@lru_cache(maxsize=8192)  # a fit asks for the same calls many times
def seen(call: Call, shift: int) -> Seen:
    """What each rank computes on the keys of the rank ``shift`` before it."""
    ranks = np.arange(call.size)
    queries = runs(call.layout, ranks, call.size, call.length)
    keys = runs(call.layout, (ranks - shift) % call.size, call.size, call.length)
    return Seen(*np.sum([_pair(call, *pair) for pair in product(queries, keys)], axis=0))


def _pair(call: Call, q_run: Run, k_run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Of two runs. A chunked mask is the sum of its chunks, each of which is a causal band over the parts of the runs within it."""
    chunk = call.mask.chunk or call.size * call.length
    starts = np.arange(0, call.size * call.length, chunk)[:, None]
    (q_start, rows), (k_start, columns) = (_within(run, starts, starts + chunk) for run in (q_run, k_run))
    left, right = call.mask.left, 0 if call.mask.causal else call.mask.right
    # Row i sees column j if  first <= j - i <= last: both runs have the same stride.
    last = columns - 1 if right is None else (q_start - k_start + right) // q_run.stride
    first = -rows + 1 if left is None else -((k_start - q_start + left) // q_run.stride)
    count = np.maximum(_below(rows, columns, last) - _below(rows, columns, first - 1), 0)
    cut = sum(_cut(rows, columns, bound) for bound, given in ((last, right), (first - 1, left)) if given is not None)
    return count.sum(0), (cut + np.zeros_like(count)).sum(0)


def _within(run: Run, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first position and the length of the part of a run that is in ``start .. stop - 1``."""
    skipped = np.clip(-((run.start - start) // run.stride), 0, run.length)
    ended = np.clip(-((run.start - stop) // run.stride), 0, run.length)
    return run.start + skipped * run.stride, np.maximum(ended - skipped, 0)


def _below(rows: np.ndarray, columns: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """The pairs ``(i, j)`` with ``j - i <= bound``."""

    def up_to(y):  # the sum of min(u, columns) over u = 1 .. y
        capped = np.clip(y, 0, columns)
        return capped * (capped + 1) // 2 + columns * np.maximum(y - columns, 0)

    return up_to(rows + bound) - up_to(bound)


def _cut(rows: np.ndarray, columns: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """The rows ``i`` that see some of the columns ``j <= i + bound``, but not all."""
    return np.maximum(np.minimum(rows, columns - 1 - bound) - np.maximum(0, -bound), 0)


# ---------------------------------------------------------------------------------------------------- plan
# What every rank does, stage by stage, from the schedule that the strategy runs.
#
# A stage is what XLA's loop makes of a step: work and transfers that begin together, and a next stage that begins when both are
# done.

GRADIENT_ITEMSIZE = 4  # dK and dV travel in float32, but for the way home


class Send(NamedTuple):
    """``bytes`` from every rank to the one ``hop`` after it."""

    bytes: float
    hop: int


class Stage(NamedTuple):
    """``compute``: seconds, per rank. ``sends``: one collective each, one after another; equal hops are one collective."""

    compute: np.ndarray
    sends: tuple[Send, ...] = ()


def ring_stages(machine: Machine, platform: str, call: Call, direction: str) -> list[Stage]:
    """One pass of ``strategies.ring``. ``direction``: "forward" or "backward".

    Raises ValueError for a platform whose figures the machine does not have.
    """
    if platform not in machine.kernels:
        raise ValueError(f"platform must be one of {', '.join(sorted(machine.kernels))}, which were measured; got {platform!r}")
    costs: Pass = getattr(machine.kernels[platform], direction)
    shifts, plan = _schedule(call)
    keys = float(call.batch * call.length * call.kv_heads * (call.dim + call.value_dim))
    backward = direction == "backward"
    stages = []
    for shift, step in zip(shifts, plan, strict=True):
        sends = [Send(keys * call.itemsize, step.hop_out)]
        sends += [Send(keys * GRADIENT_ITEMSIZE, step.hop_in)] if backward else []
        stages.append(Stage(_compute(machine, costs, call, direction, shift), _merged(sends)))
    if backward and shifts[-1]:  # dK and dV go home; nothing is computed meanwhile
        home = Send(keys * (call.home_itemsize or call.itemsize), call.size - shifts[-1])
        stages.append(Stage(np.zeros(call.size), (home,)))
    return stages


@lru_cache(maxsize=8192)  # a fit asks for the same calls many times
def _schedule(call: Call) -> tuple[tuple[int, ...], list[Step]]:
    shifts = visible_shifts(call.mask, call.layout, call.size, call.length, call.length)
    return shifts, steps(shifts)


def _compute(machine: Machine, costs: Pass, call: Call, direction: str, shift: int) -> np.ndarray:
    """Seconds of a step's kernels, per rank. (A kernel that computes a hidden pair of shards and drops it costs the ring nothing:
    there is always a rank that sees the pair of that step, and the others wait for it.)"""
    scores, cut = seen(call, shift)
    per_score = costs.product * flop_per_score(call, direction) + costs.score * call.batch * call.heads
    joined = costs.joined * call.batch * call.length * call.heads * call.dim / machine.memory if shift else 0.0
    return machine.sustained * per_score * (scores + costs.edge * cut) + costs.launch + joined


def _merged(sends: list[Send]) -> tuple[Send, ...]:
    """XLA makes one collective of what starts together and goes equally far."""
    by_hop: Counter[int] = Counter()
    for send in sends:
        by_hop[send.hop] += send.bytes  # type: ignore[assignment]  # a count may be a float
    return tuple(Send(size, hop) for hop, size in by_hop.items() if hop)


def hop_times(machine: Machine, size: int, send: Send) -> np.ndarray:
    """Seconds that the transfer out of each rank takes, once both of its ends have begun it."""
    ranks = np.arange(size)
    crosses = ranks // machine.host_size != (ranks + send.hop) % size // machine.host_size
    inside, between = (link.latency + send.bytes / link.bandwidth for link in (machine.inside, machine.between))
    return np.where(crosses, between, inside)


# ---------------------------------------------------------------------------------------------------- estimate
# The time of a pass in closed form: every stage takes as long as its slowest rank and its slowest hop.
#
# An upper bound of what ``simulate`` finds, and equal to it where one rank or one hop is the slowest at every stage, as in a
# causal ring. In a ring that is no pessimism: all shards but one pass every link, so no number of buffers hides a slow link.


class Times(NamedTuple):
    """Seconds of a pass. ``device``: from its start to its end on the device, of which ``waiting`` is not the kernels': transfers
    not hidden, and compute that they take. ``host``: the host's work. Calls that follow one another overlap the two."""

    device: float
    waiting: float
    host: float

    @property
    def total(self) -> float:
        """Of one call among many."""
        return max(self.device, self.host)


def estimate(machine: Machine, platform: str, call: Call, direction: str) -> Times:
    """One pass of the ring, called from torch. Raises ValueError for a platform that was not measured."""
    stages = ring_stages(machine, platform, call, direction)
    device = sum(_stage_time(machine, call.size, stage) for stage in stages)
    computing = sum(float(stage.compute.max()) for stage in stages)
    costs = getattr(machine.kernels[platform], direction)
    return Times(device, device - computing, costs.host if call.size == 1 else costs.host_in_ring)


def both(machine: Machine, platform: str, call: Call) -> Times:
    """Forward and backward."""
    forward, backward = (estimate(machine, platform, call, direction) for direction in DIRECTIONS)
    return Times(*(sum(pair) for pair in zip(forward, backward, strict=True)))


def _stage_time(machine: Machine, size: int, stage: Stage) -> float:
    """While a transfer is under way, the kernels run at ``1 - sharing`` of their speed."""
    compute = float(stage.compute.max())
    sending = sum(float(hop_times(machine, size, send).max()) for send in stage.sends)
    return max(sending, compute + machine.sharing * sending)


# ---------------------------------------------------------------------------------------------------- simulation
# A pass played through, event by event: each rank's compute, each link, and neighbours that wait for one another.
#
# As the ring is implemented: a rank begins a stage when it has finished the one before, both computing and sending; a transfer
# begins when both of its ends have begun its collective, and a rank's collective is done when it has sent and received. So one
# buffer is under way ahead of the one in use, never more.


def simulate(machine: Machine, stages: list[Stage]) -> float:
    """Seconds until the last of the ranks has finished."""
    return _Run(machine, stages).finished()


class _Event(NamedTuple):
    """``collective`` number of ``stage``: this ``rank`` begins it, or its transfer to the next rank has arrived."""

    time: float
    arrived: bool
    rank: int
    stage: int
    collective: int


@dataclass
class _Run:
    machine: Machine
    stages: list[Stage]
    events: list[_Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = len(self.stages[0].compute)
        self.durations = [[hop_times(self.machine, self.size, send) for send in stage.sends] for stage in self.stages]
        self.start = np.zeros(self.size)  # of the stage that the rank is in
        self.began: dict[tuple[int, int, int], float] = {}  # (stage, collective, rank)
        self.halves: dict[tuple[int, int, int], int] = {}  # how many of its two transfers are done
        self.ends = np.zeros(self.size)

    def finished(self) -> float:
        for rank in range(self.size):
            self.enter(rank, 0, 0.0)
        while self.events:
            time, arrived, rank, stage, collective = heappop(self.events)
            if arrived:
                for end in (rank, self.after(rank, stage, collective)):
                    self.half_done(end, stage, collective, time)
            else:
                self.begin(rank, stage, collective, time)
        return float(self.ends.max())

    def after(self, rank: int, stage: int, collective: int, sign: int = 1) -> int:
        return (rank + sign * self.stages[stage].sends[collective].hop) % self.size

    def enter(self, rank: int, stage: int, time: float) -> None:
        """Stages without a transfer pass at once."""
        while stage < len(self.stages) and not self.stages[stage].sends:
            time, stage = time + self.stages[stage].compute[rank], stage + 1
        self.start[rank] = self.ends[rank] = time
        if stage < len(self.stages):
            heappush(self.events, _Event(time, False, rank, stage, 0))

    def begin(self, rank: int, stage: int, collective: int, time: float) -> None:
        self.began[stage, collective, rank] = time
        for sender in {rank, self.after(rank, stage, collective, sign=-1)}:
            receiver = self.after(sender, stage, collective)
            if all((stage, collective, end) in self.began for end in (sender, receiver)):
                done = time + self.durations[stage][collective][sender]
                heappush(self.events, _Event(done, True, sender, stage, collective))

    def half_done(self, rank: int, stage: int, collective: int, time: float) -> None:
        key = stage, collective, rank
        self.halves[key] = self.halves.get(key, 0) + 1
        if self.halves[key] < 2:
            return
        if collective + 1 < len(self.stages[stage].sends):
            heappush(self.events, _Event(time, False, rank, stage, collective + 1))
        else:
            self.enter(rank, stage + 1, max(time, self.computed(rank, stage, time)))

    def computed(self, rank: int, stage: int, sent: float) -> float:
        """When the stage's kernels are done, if its transfers were under way until ``sent``."""
        done = (1 - self.machine.sharing) * (sent - self.start[rank])
        return sent + max(self.stages[stage].compute[rank] - done, 0.0)
