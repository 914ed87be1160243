"""Two ranks make a call and its gradients; each prints how many programs of it it has compiled and how many it has read."""

from collections import Counter

import jax
import torch
import torch.distributed as dist

import ring_attn

dist.init_process_group("gloo")
ring_attn.start()
events: Counter[str] = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))
torch.manual_seed(0)
whole = [torch.randn(1, 8, 2, 8) for _ in range(3)]
leaves = [ring_attn.shard(x).requires_grad_() for x in whole]
out = ring_attn.ring_attention(*leaves, causal=True)
grads = torch.autograd.grad(out.square().sum(), leaves)
expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole), is_causal=True).transpose(1, 2)
torch.testing.assert_close(out, ring_attn.shard(expected))
total = torch.stack([x.double().sum() for x in grads]).tolist()
print(f"rank {dist.get_rank()}: compiled {events['cache_misses']}, found {events['cache_hits']}, gradients {total}")
