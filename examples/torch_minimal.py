"""The smallest torch example: two processes hold half a sequence each, and attention is the same as if one held all of it.

    torchrun --standalone --nproc-per-node 2 examples/torch_minimal.py

It checks itself against torch's attention over the whole sequence, forward and backward.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from ring_attn import ring_attention, shard, unshard

if "RANK" not in os.environ:
    sys.exit("torchrun starts the processes: torchrun --standalone --nproc-per-node 2 examples/torch_minimal.py")

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))

# The whole sequence is needed only for the comparison: [batch, seq, heads, dim], the same on both processes.
torch.manual_seed(0)
whole = [torch.randn(1, 1024, heads, 32, requires_grad=True) for heads in (4, 2, 2)]  # four query heads share two key heads
weights = torch.randn(1, 1024, 4, 32)

# Each process takes its shard of the sequence, and keys and values are sent around the ring.
q, k, v = (shard(x, mesh=mesh, layout="zigzag") for x in whole)
out = ring_attention(q, k, v, mesh=mesh, layout="zigzag", causal=True)

# Each process's loss covers its own positions; gradients of tensors that all processes hold are summed over the ring.
(out * shard(weights, mesh=mesh, layout="zigzag")).sum().backward()
for x in whole:
    dist.all_reduce(x.grad)

gathered = unshard(out.detach(), mesh=mesh, layout="zigzag")
q, k, v = (x.transpose(1, 2) for x in whole)
expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
torch.testing.assert_close(gathered, expected.detach(), rtol=1e-4, atol=1e-5)
for x, gradient in zip(whole, torch.autograd.grad((expected * weights).sum(), whole), strict=True):
    torch.testing.assert_close(x.grad, gradient, rtol=1e-4, atol=1e-4)
if dist.get_rank() == 0:
    print(f"{out.shape[1]} of {gathered.shape[1]} positions on each process: output and gradients are those of torch's attention")
dist.destroy_process_group()
