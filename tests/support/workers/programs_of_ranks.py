"""Two ranks make a call and its gradients; each prints how many programs of it it has compiled and how many it has read. With
"cuda" on GPUs."""

import os
import sys
from collections import Counter

import jax
import torch
import torch.distributed as dist

import ring_attn

ON_GPU = sys.argv[1:] == ["cuda"]
if ON_GPU:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if ON_GPU else "gloo")
ring_attn.start()
events: Counter[str] = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))
torch.manual_seed(0)
shape, near = ((1, 2048, 8, 64), dict(rtol=0.02, atol=0.02)) if ON_GPU else ((1, 8, 2, 8), {})
whole = [torch.randn(shape) for _ in range(3)]
whole = [x.to("cuda", torch.bfloat16) if ON_GPU else x for x in whole]
leaves = [ring_attn.shard(x).requires_grad_() for x in whole]
out = ring_attn.ring_attention(*leaves, causal=True, deterministic=True)
grads = torch.autograd.grad(out.square().sum(), leaves)
expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole), is_causal=True).transpose(1, 2)
torch.testing.assert_close(out, ring_attn.shard(expected), **near)
total = torch.stack([x.double().sum() for x in grads]).tolist()
print(f"rank {dist.get_rank()}: compiled {events['cache_misses']}, found {events['cache_hits']}, gradients {total}", flush=True)
