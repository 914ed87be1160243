"""Started four times by the test, without torchrun: one rank of a ring kills itself in the middle of a step.

Arguments: the rank that dies, and what the survivors do with the error: "leave" lets it end the process, "linger" catches it and
keeps running, so that only the watchdog can end the ranks that wait for others.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from rings import rotation

from torch_bridge.backends.dlpack import to_jax
from torch_bridge.mesh import jax_mesh, rings
from torch_bridge.start import runtime


def main() -> None:
    victim, survivors = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    ring = rings.resolve()
    runtime.start(ring, peer_timeout=12.0)
    program = rotation(ring, 1)
    local = to_jax(torch.ones(64, 32))
    for turn in range(10_000):
        if turn == 30 and ring.rank == victim:
            print(f"dies at {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            with runtime.watch(ring, "forward" if turn % 2 == 0 else "backward"):
                jax_mesh.to_local(program(jax_mesh.to_global(ring, local))).block_until_ready()
        except runtime.PeerFailure as error:
            if survivors == "leave":
                raise
            print(f"caught: {error}", file=sys.stderr, flush=True)
            time.sleep(6)
            os._exit(3)


if __name__ == "__main__":
    main()
