"""A worker on ranks that share GPUs, so that one GPU runs a ring of two or four: right or wrong, never how fast. NCCL lets no ranks
of one host share a GPU, so here each of a GPU's ranks is on a host of its own, reached through sockets.

    torchrun --standalone --nproc-per-node 4 tests/gpu/shared.py GPUS WORKER [ARGUMENTS]

Kernels of processes take turns of milliseconds, and each waits in its turn for what another sends; with NVIDIA's multi-process
service (``nvidia-cuda-mps-control -d``) they run at once.
"""

import os
import sys

if __name__ == "__main__":
    host, gpu = divmod(int(os.environ["LOCAL_RANK"]), int(sys.argv[1]))
    os.environ.update(
        LOCAL_RANK=str(gpu),
        NCCL_HOSTID=f"host-{host}",
        NCCL_NET="Socket",
        NCCL_MNNVL_ENABLE="0",
        TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",
    )
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
