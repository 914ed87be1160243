"""A device that does not come to the end of a call, on a ring of all processes of torchrun: a second of waiting before each of
eight calls accuses nobody, a minute before the ninth ends all ranks after ``LIMIT`` seconds and an eighth.

    torchrun --standalone --nproc-per-node 2 tests/gpu/stalled_worker.py
"""

import os

import torch
import torch.distributed as dist

import ring_attn

LIMIT = 15.0  # also of the making of NCCL's connections
SECOND = 2_000_000_000  # clock cycles


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    ring_attn.start(device_timeout=LIMIT)
    q, k, v = (torch.randn(1, 256, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    ring_attn.ring_attention(q, k, v, causal=True).sum().item()  # whose kernels are loaded now
    for _ in range(8):
        torch.cuda._sleep(SECOND)
        ring_attn.ring_attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    print(f"rank {rank}: eight slow calls have ended", flush=True)
    if rank == dist.get_world_size() - 1:
        torch.cuda._sleep(60 * SECOND)
    ring_attn.ring_attention(q, k, v, causal=True).sum().item()  # which keeps CUDA's driver meanwhile
    print(f"rank {rank}: nobody was told", flush=True)


if __name__ == "__main__":
    main()
