"""Run by torchrun with --max-restarts 1: a rank of the first attempt dies, and the second works."""

import os

import torch
import torch.distributed as dist
from rings import run

from torch_bridge.mesh import rings


def main() -> None:
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    out = run(rings.resolve(), torch.full((2, 2), float(rank)))
    assert out.tolist() == [[1.0 - rank] * 2] * 2
    if attempt == "0" and rank == 1:
        os._exit(7)
    run(rings.resolve(), torch.ones(3))
    print(f"attempt {attempt} works", flush=True)


if __name__ == "__main__":
    main()
