"""Two processes use a ring and end as the first argument says; test_runtime.py checks what each must print."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import jax
import torch
import torch.distributed as dist
from rings import run

from torch_bridge.mesh import rings
from torch_bridge.start import runtime


def start_from_many_threads() -> None:
    """start() is idempotent from any thread."""
    threads = [threading.Thread(target=runtime.start, args=(rings.resolve(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runtime.start()
    runtime.start(rings.resolve("local"))


def early(rank: int) -> None:
    """Rank 0, beside which JAX's service runs, ends first, and the process group is destroyed."""
    dist.destroy_process_group()
    time.sleep(2.0 * rank)


def late(rank: int) -> None:
    """Rank 0 ends last; nobody destroys anything."""
    time.sleep(2.0 * (1 - rank))


def early_exit_status(rank: int) -> None:
    """Rank 1 leaves by sys.exit while rank 0 is in a step."""
    if rank == 1:
        sys.exit(5)
    run(rings.resolve(), torch.ones(3))


def fork(rank: int) -> None:
    """A child that ends as programs do, with its exit functions. What C++ makes of that in the child is not looked at."""
    child = os.fork()
    if not child:
        sys.exit(5)
    deadline = time.monotonic() + 4
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.05)
    run(rings.resolve(), torch.ones(3))


def stopped_coordinator(rank: int) -> None:
    """It is stopped, as by a debugger, when both end. Prints its process, for the test to end it, and when that was."""
    dist.barrier()
    if rank == 0:
        mine = f"MASTER_PORT={os.environ['MASTER_PORT']}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if b"coordinator import main" in (folder / "cmdline").read_bytes() and mine in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGSTOP)
                    print(f"stopped {folder.name} at {time.time()}")
    dist.barrier()


def user_error(rank: int) -> None:
    """Rank 1 fails while rank 0 runs a long computation of its own."""
    if rank == 1:
        raise ZeroDivisionError("a mistake of the user")
    time.sleep(3.0)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    out = run(rings.resolve(), torch.full((2, 2), float(rank)))
    assert out.tolist() == [[1.0 - rank] * 2] * 2
    assert (jax.process_index(), jax.process_count()) == (rank, 2)
    start_from_many_threads()
    globals()[sys.argv[1]](rank)


if __name__ == "__main__":
    main()
