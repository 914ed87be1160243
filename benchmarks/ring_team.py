"""Processes of one job: their start, and what benchmarks/ring.py needs for them to measure together and not to wait for one
another for ever."""

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

ON_GPU = torch.cuda.is_available()
ALONE = "WORLD_SIZE" not in os.environ  # not under torchrun


def start() -> torch.device:
    """This process's device, and the default group of all processes, for tensors on the host and on GPUs."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    if not ALONE:
        dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    return device


class Team:
    """The processes of the job. Votes go over a group of their own, on the host: they must not disturb what is measured."""

    def __init__(self, timeout: float):
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("nccl" if self.on_gpu else "gloo", timeout=limit, device_id=self.device if self.on_gpu else None)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.votes = dist.new_group(backend="gloo", timeout=limit)

    def ready(self) -> None:
        """All have finished what they were at."""
        if self.on_gpu:
            torch.cuda.set_device(self.device)  # whatever another library made the current one
            torch.cuda.synchronize()
        dist.barrier(group=self.votes)

    def slowest(self, ms: float) -> float:
        return float(self._join(ms, dist.ReduceOp.MAX))

    def agreed(self, fine: bool) -> bool:
        return bool(self._join(float(fine), dist.ReduceOp.MIN))

    def _join(self, value: float, how) -> float:
        joined = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(joined, how, group=self.votes)
        return joined.item()


class Clock:
    """The time that is left. At the hard end the process stops whatever it waits for, after `rescue` has saved what there is."""

    def __init__(self, budget: float, hard_end: float, rescue: Callable[[], None]):
        self.start = time.monotonic()
        self.budget = budget
        timer = threading.Timer(hard_end, self._stop, [hard_end, rescue])
        timer.daemon = True
        timer.start()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def allows(self, team: Team) -> bool:
        """Whether there is time to begin something more; the same on all ranks."""
        return team.agreed(self.elapsed < self.budget)

    def _stop(self, hard_end: float, rescue: Callable[[], None]) -> None:
        print(f"not done after {hard_end:.0f} s: stopping", file=sys.stderr, flush=True)
        try:
            rescue()
        finally:
            os._exit(3)
