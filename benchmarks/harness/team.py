"""The processes of one benchmark: one alone, or all that torchrun started. They measure together, and none waits forever."""

import gc
import os
import platform
from datetime import timedelta
from importlib import metadata

import torch
import torch.distributed as dist

from torch_bridge.start.jax_memory import choose_allocator

GIB = 2**30
ON_GPU = torch.cuda.is_available()
PACKAGES = (
    *("torch", "jax", "jaxlib", "jax-cuda13-plugin", "jax-triton", "triton"),
    *("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi", "ring-flash-attn", "yunchang", "ejkernel"),
)


class Team:
    """This process among the others. Votes use a separate process group, on the host, so as not to disturb the measurement. A
    process without torchrun is a team of one."""

    def __init__(self, timeout: float = 120.0):
        choose_allocator(running=False)  # as the library would, for benchmarks that start JAX themselves
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if ON_GPU else torch.device("cpu")
        if ON_GPU:
            torch.cuda.set_device(self.device)
        self.rank, self.size = 0, 1
        self.votes: dist.ProcessGroup | None = None
        if "WORLD_SIZE" in os.environ:
            limit = timedelta(seconds=timeout)
            dist.init_process_group("nccl" if ON_GPU else "gloo", timeout=limit, device_id=self.device if ON_GPU else None)
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self.votes = dist.new_group(backend="gloo", timeout=limit)

    def ready(self) -> None:
        """Returns when every process and its GPU have finished their work."""
        if ON_GPU:
            torch.cuda.set_device(self.device)  # another library may have changed the current device
            torch.cuda.synchronize()
        if self.votes is not None:
            dist.barrier(group=self.votes)

    def slowest(self, time: float) -> float:
        return self._reduce(time, dist.ReduceOp.MAX)

    def agreed(self, fine: bool) -> bool:
        return bool(self._reduce(float(fine), dist.ReduceOp.MIN))

    def total(self, count: int) -> int:
        return int(self._reduce(float(count), dist.ReduceOp.SUM))

    def group(self, size: int) -> dist.ProcessGroup | str:
        """This rank's group among several disjoint ones; every rank makes all of them. "local": a ring of one."""
        if size == 1:
            return "local"
        groups = [dist.new_group(range(first, first + size)) for first in range(0, self.size, size)]
        return groups[self.rank // size]

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def close(self) -> None:
        self.ready()
        if self.votes is not None:
            dist.destroy_process_group()

    def _reduce(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        reduced = torch.tensor([value], dtype=torch.float64)
        if self.votes is not None:
            dist.all_reduce(reduced, operation, group=self.votes)
        return reduced.item()


def tidy() -> None:
    """Returns memory that nothing holds any more."""
    gc.collect()
    if ON_GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    """The versions of everything that could affect a figure; packages that are not installed are left out."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if ON_GPU:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        found |= {"CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version()), "NCCL": nccl}
    return found


def software() -> str:
    return ", ".join(map(" ".join, versions().items()))


def hardware() -> str:
    return torch.cuda.get_device_name() if ON_GPU else f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
