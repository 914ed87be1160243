"""Every rank of two hosts, without torchrun: the ring of all of them turns until a host is lost. Prints "turns" when it does."""

import sys

import torch
import torch.distributed as dist
from rings import rotation

from torch_bridge.backends.dlpack import to_jax
from torch_bridge.mesh import jax_mesh, rings
from torch_bridge.start import runtime


def main() -> None:
    dist.init_process_group("gloo")
    ring = rings.resolve()
    runtime.start(ring, peer_timeout=float(sys.argv[1]))
    program, local = rotation(ring, 1), to_jax(torch.ones(64, 32))
    for turn in range(1_000_000):
        with runtime.watch(ring, "forward"):
            jax_mesh.to_local(program(jax_mesh.to_global(ring, local))).block_until_ready()
        if turn == 3:
            print("turns", flush=True)


if __name__ == "__main__":
    main()
