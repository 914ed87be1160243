"""Sums of gradients over a ring that begin while the backward runs, as DistributedDataParallel's do.

Copies travel, several gradients in a bucket. A parameter's ``grad`` is this rank's own until ``sync_gradients`` is called. That
writes the sums of the buckets whose gradients are still what was copied, and sums all others anew.

Ranks may differ in which gradients have come (experts without tokens, an error in one rank's backward). So these sums have a
process group of their own, in which every rank sums all buckets of one plan in its order, once between two calls: a bucket that
has not begun when the call comes is begun in it, with what is there. A sum that one rank begins before an attention and another
after it keeps the one's GPU waiting for the other, and whatever waits for that GPU as a whole, such as the freeing of memory,
would wait for ever. So gradients that have once come on some ranks alone, or not as often, are none of the plan's from then on.
"""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from operator import eq
from threading import Lock
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from ring_attn.sharding.reduction import in_buckets, summed_in
from ring_attn.training.shared_state import bits
from torch_bridge.failures.events import recorded
from torch_bridge.failures.watchdog import watch
from torch_bridge.mesh.rings import ProcessRing

_BUCKET = 25 * 2**20  # bytes of gradients, as many as DistributedDataParallel's
_STEP = "sync_gradients"


class _GradientSpec(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class _Bucket(NamedTuple):
    """The numbers of its parameters, and the specs of their gradients."""

    parameters: tuple[int, ...]
    specs: tuple[_GradientSpec, ...]

    @property
    def kind(self) -> tuple[int, torch.dtype, torch.device]:
        return sum(spec.shape.numel() for spec in self.specs), self.specs[0].dtype, self.specs[0].device


class _Begun(NamedTuple):
    """The sum of a bucket under way, and what tells whether its gradients have changed since they were copied."""

    total: Tensor
    work: dist.Work
    versions: list[tuple[int, int]]
    bits: Tensor


class EarlySums:
    """The sums of some parameters' gradients over ``ring``, from one call of ``sync_gradients`` to the next.

    All ranks of the ring call its methods alike, but for the hooks. A parameter holds it by its hook, and not the other way round.
    """

    def __init__(self, ring: ProcessRing) -> None:
        self.ring, self._lock = ring, Lock()  # a backward has a thread for each device
        self._group: dist.ProcessGroup | None = None
        self._parameters: list[weakref.ref[Tensor]] = []
        self._hooks: list[RemovableHandle] = []
        self._chosen: list[_Bucket] = []
        self._uneven: set[int] = set()  # the parameters whose gradients have once not come as often on all ranks
        self._ran: set[object] = set()  # the kinds of buckets that the ranks have summed
        self._begun: dict[int, _Begun] = {}
        self._times: dict[int, int] = {}  # how often each gradient has come since the last call, in the order of their last time
        self._awaited: dict[int, set[int]] = {}  # by parameter: those of its bucket that have not come as often as before that call
        self._before: dict[int, int] = {}  # how often that was
        self._streams: set[torch.cuda.Stream] = set()

    def __str__(self) -> str:
        return f"{len(self._chosen)} buckets of {len(self._parameters)} parameters that are summed early"

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Listens for the gradients of these too, but for DTensors: FSDP reduces theirs after the hooks."""
        for parameter in parameters:
            if parameter.is_leaf and parameter not in _sums and not hasattr(parameter, "to_local"):
                _sums[parameter] = self
                hook = partial(self._on_gradient, len(self._parameters))
                self._parameters.append(weakref.ref(parameter))
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def stop(self) -> None:
        """Makes the parameters what they were. The process group stays, as all of torch's do."""
        for hook in self._hooks:
            hook.remove()
        for reference in self._parameters:
            if (parameter := reference()) is not None:
                _sums.pop(parameter, None)
        self._begun.clear()

    @torch.no_grad()
    def _on_gradient(self, number: int, parameter: Tensor) -> None:
        """The hook: a backward has added to this parameter's gradient."""
        with self._lock:
            self._times[number] = times = self._times.pop(number, 0) + 1
            if parameter.is_cuda:
                self._streams.add(torch.cuda.current_stream(parameter.device))
            if times == self._before.get(number):
                self._awaited.get(number, set()).discard(number)
            while self._next_is_ready():
                self._begin(len(self._begun))

    def _next_is_ready(self) -> bool:
        """Whether all gradients of the next bucket have come. The first sum of a kind may have to connect the ranks, which blocks
        the host, so it does not begin early: a rank might wait here for one that waits for it in attention."""
        if len(self._begun) == len(self._chosen):
            return False
        bucket = self._chosen[len(self._begun)]
        return not self._awaited[bucket.parameters[0]] and bucket.kind in self._ran

    def _begin(self, number: int, late: bool = False) -> _Begun:
        bucket = self._chosen[number]
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        copy = self._copy(bucket)
        seen = ([], copy[:0]) if late else (self._versions(bucket), bits(copy))
        total = copy.to(summed_in(copy.dtype))
        work = dist.all_reduce(total, group=self._group, async_op=True)
        assert work is not None  # this process is a member
        self._begun[number] = _Begun(total, work, *seen)
        return self._begun[number]

    def report(self, device: torch.device) -> Tensor:
        """int64 ``[buckets + 3 parameters]``, to be added up over the ring: whether the sum of each bucket is of what the gradients
        are now; the place of each gradient in the order in which they came, how often it came, and the square of that."""
        order, numbers = {number: place for place, number in enumerate(self._times)}, range(len(self._parameters))
        places = [order.get(number, len(numbers)) for number in numbers]
        times = [self._times.get(number, 0) for number in numbers]
        right = [self._is_right(number).to(device).view(1) for number in range(len(self._chosen))]
        return torch.cat([*right, torch.tensor([*places, *times, *(x * x for x in times)], device=device)])

    def _is_right(self, number: int) -> Tensor:
        """int64 ``[]``."""
        bucket, begun = self._chosen[number], self._begun.get(number)
        fits = self._fits(bucket)
        if begun is None or not fits or self._versions(bucket) != begun.versions:
            return torch.tensor(int(fits and begun is None))
        return (bits(self._copy(bucket)) == begun.bits).long()  # what is changed by `.data` keeps its version

    def finish(self, report: Sequence[int], wanted: set[int], call: str) -> set[int]:
        """Writes the sums that are right on all ranks into the gradients of the ``wanted`` parameters, by ids, and returns the ids
        of these. ``report``: :meth:`report`, added up. A bucket's memory is free once it is written."""
        written: set[int] = set()
        with watch(self.ring, _STEP, call) as watched:
            for number, bucket in enumerate(self._chosen):
                begun = self._begun.get(number) or self._begin(number, late=True)
                begun.work.wait()
                if report[number] == self.ring.size:
                    written |= self._write(bucket, begun.total, wanted)
                del self._begun[number], begun
                watched.event = recorded(bucket.specs[0].device)
        self._ran |= {bucket.kind for bucket in self._chosen}
        return written

    def _write(self, bucket: _Bucket, total: Tensor, wanted: set[int]) -> set[int]:
        if total.is_cuda:
            total.record_stream(torch.cuda.current_stream(total.device))
        parts = total.split([spec.shape.numel() for spec in bucket.specs])
        pairs = [(x, part) for x, part in zip(self._of(bucket), parts, strict=True) if x is not None and id(x) in wanted]
        for parameter, part in pairs:
            assert parameter.grad is not None
            parameter.grad.copy_(part.view(parameter.grad.shape))
        return {id(parameter) for parameter, _ in pairs}

    def choose(self, report: Sequence[int], trained: set[int], call: str) -> None:
        """What is summed early until the next call: what has come on any rank since the last one, or was planned then, of the
        ``trained`` parameters. ``report`` as for :meth:`finish`."""
        count, told = len(self._parameters), report[len(self._chosen) :]
        places, times, squares = told[:count], told[count : 2 * count], told[2 * count :]
        alive = {number for number, reference in enumerate(self._parameters) if id(reference()) in trained}
        arrived = {number for number in alive if times[number]}
        # Cauchy and Schwarz: equal where the ranks' own are.
        self._uneven |= {number for number in arrived if self.ring.size * squares[number] > times[number] ** 2}
        planned = {number for bucket in self._chosen for number in bucket.parameters}
        wanted = ((arrived | planned) & alive) - self._uneven
        if wanted != planned or not all(map(self._fits, self._chosen)):
            self._chosen = self._buckets(sorted(wanted, key=lambda number: (places[number], number)))
        if self._chosen and self._group is None:
            with watch(self.ring, _STEP, call):
                self._group = _new_group(self.ring)
        self._before, self._times = self._times, {}
        self._streams.clear()
        awaited = [{number for number in bucket.parameters if number in self._before} for bucket in self._chosen]
        self._awaited = {x: left for bucket, left in zip(self._chosen, awaited, strict=True) for x in bucket.parameters}

    def _buckets(self, numbers: list[int]) -> list[_Bucket]:
        specs = [(number, spec) for number in numbers if (spec := _spec(self._parameters[number]())) is not None]
        groups = in_buckets(specs, _BUCKET, lambda pair: (pair[1].dtype, pair[1].device, pair[1].nbytes))
        return [_Bucket(*zip(*group, strict=True)) for group in groups]

    def _of(self, bucket: _Bucket) -> list[Tensor | None]:
        return [self._parameters[number]() for number in bucket.parameters]

    def _copy(self, bucket: _Bucket) -> Tensor:
        """All gradients in a row; zeros for those that are not there, or not of the specs that were planned."""
        parts, fits = [], self._fits(bucket)
        for parameter, spec in zip(self._of(bucket), bucket.specs, strict=True):
            if parameter is None or parameter.grad is None or not fits:
                parts.append(torch.zeros(spec.shape.numel(), dtype=spec.dtype, device=spec.device))
            else:
                parts.append(parameter.grad.reshape(-1))
        return torch.cat(parts)

    def _versions(self, bucket: _Bucket) -> list[tuple[int, int]]:
        gradients = [None if parameter is None else parameter.grad for parameter in self._of(bucket)]
        return [(0, 0) if gradient is None else (id(gradient), gradient._version) for gradient in gradients]

    def _fits(self, bucket: _Bucket) -> bool:
        """Whether the gradients are of the specs that were planned."""
        return all(map(eq, map(_spec, self._of(bucket)), bucket.specs))


def _spec(parameter: Tensor | None) -> _GradientSpec | None:
    """Of its gradient, or of the one that it would have."""
    if parameter is None:
        return None
    like = parameter if parameter.grad is None else parameter.grad
    return _GradientSpec(like.shape, like.dtype, like.device, like.layout)


def _new_group(ring: ProcessRing) -> dist.ProcessGroup:
    """In any order, which is nothing to a sum."""
    backend = dist.get_backend_config(ring.groups[0])
    group = dist.new_group(sorted(ring.ranks), backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this process is a member
    return group


def early_sums(parameters: Iterable[Tensor], ring: ProcessRing | None = None) -> list[EarlySums]:
    """Those that listen for gradients of these parameters; given a ring, for sums over that."""
    known = dict.fromkeys(sums for x in parameters if (sums := _sums.get(x)) is not None)
    return [sums for sums in known if ring is None or sums.ring == ring]


_sums = WeakIdKeyDictionary()  # by parameter, for as long as it lives or until a call without ``overlap``
