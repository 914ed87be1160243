"""Run by torchrun on two ranks that make different calls: both must raise, and the ring must work afterwards."""

import torch
import torch.distributed as dist

import ring_attn

dist.init_process_group("gloo")
rank = dist.get_rank()
x = torch.ones(1, 8, 2, 4)
wide = x.double() if rank else x
asked = {
    "dtype": dict(q=wide, k=wide, v=wide),  # in the job's first call, which starts JAX
    "option": dict(q=x, k=x, v=x, causal=rank == 0),
    "layout": dict(q=x, k=x, v=x, layout=("zigzag", "striped")[rank]),
    "shape": dict(q=x[:, : 8 - 2 * rank], k=x, v=x),
    "operand": dict(q=x, k=x, v=x, **({"sinks": torch.zeros(2)} if rank else {})),
    "batch": dict(q=x[rank:], k=x[rank:], v=x[rank:]),  # empty on rank 1 only
    "mask_mod": dict(q=x, k=x, v=x, mask_mod=(lambda b, h, i, j: i > j) if rank else (lambda b, h, i, j: i >= j)),
}
for name, arguments in asked.items():
    try:
        ring_attn.ring_attention(**arguments)
    except ValueError as error:
        assert "ring rank 0" in str(error) and "ring rank 1" in str(error), error
        print(f"refused {name}", flush=True)
# K/V need gradients on one rank only: the rotations must be the same nevertheless.
q, k = x.clone().requires_grad_(), x.clone().requires_grad_(rank == 0)
ring_attn.ring_attention(q, k, x).sum().backward()
# No query-key pair on any rank: nothing is sent, and gradients are zeros.
q, k = x[:, :0].clone().requires_grad_(), x.clone().requires_grad_()
out = ring_attn.ring_attention(q, k, x)
out.sum().backward()
assert out.shape == q.shape and not k.grad.any()
print("and works", flush=True)
dist.destroy_process_group()
