"""A recurrence over a ring by the way of a call that attention goes; run by test_second_operation.py."""

import torch
import torch.distributed as dist
from recurrence import recurrence, sequential

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
whole = [torch.rand(2, 6 * size, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
weight = torch.randn(2, 6 * size, 3, dtype=torch.float64)
parts = [x.detach().chunk(size, 1)[rank].clone().requires_grad_() for x in whole]

h, last = recurrence(*parts)
exact = sequential(*whole)
torch.testing.assert_close(h, exact.chunk(size, 1)[rank])
torch.testing.assert_close(last, h[:, -1])

(h * weight.chunk(size, 1)[rank]).sum().backward()
(exact * weight).sum().backward()
for part, x in zip(parts, whole, strict=True):
    torch.testing.assert_close(part.grad, x.grad.chunk(size, 1)[rank])

try:
    recurrence(parts[0], parts[1][:, :4])
except ValueError as error:
    assert "decay must have the shape of x" in str(error), error
else:
    raise AssertionError("shapes that differ were taken")
dist.barrier()
dist.destroy_process_group()
