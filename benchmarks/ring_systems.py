"""The systems of benchmarks/ring.py: this library's ring and its peers, called from torch on this rank's shards.

All hold the sequence in the same order: rank r of N has the pieces r and 2N-1-r of 2N ("zigzag" here and in ring-flash-attention,
"load balance" in torch's context parallelism), so that equal shards must give equal results.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import ring_attn
from flash_attn_of_torch import zigzag_function
from timing import Timed


@dataclass(frozen=True)
class Shards:
    """This rank's part: bfloat16, `[1, length, heads, dim]`, standard normal."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    dout: torch.Tensor


@dataclass(frozen=True)
class Passes:
    """The forward, and forward and backward together, ready to be timed; `opened` is closed when the case is over."""

    forward: Timed
    both: Timed
    opened: ExitStack = field(default_factory=ExitStack)

    def results(self, heads_first: bool) -> list[torch.Tensor]:
        """out, dq, dk, dv as `[1, length, heads, dim]`."""
        found = [x.detach() for x in (self.forward.call(), *self.both.call())]
        return [x.transpose(1, 2) for x in found] if heads_first else found


@dataclass(frozen=True)
class System:
    prepare: Callable[..., Passes]
    heads_first: bool = False


def make_shards(length: int, sizes: Sequence[int], device: torch.device, rank: int) -> Shards:
    """`sizes`: query heads, K/V heads, head dim."""
    heads, kv_heads, dim = sizes
    generator = torch.Generator(device).manual_seed(rank)
    shapes = [(1, length, held, dim) for held in (heads, kv_heads, kv_heads, heads)]
    return Shards(*(torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes))


def passes(attention: Callable[..., torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor) -> Passes:
    leaves = [x.detach().requires_grad_() for x in leaves]

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return attention(*leaves)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attention(*leaves), leaves, dout)

    return Passes(Timed(forward), Timed(both))


def ours(platform: str, shards: Shards, group: Any) -> Passes:
    options: dict[str, Any] = dict(mesh=group, layout="zigzag", causal=True, platform=platform)
    attention = partial(ring_attn.ring_attention, **options)
    return passes(attention, [shards.query, shards.key, shards.value], shards.dout)


def context_parallel(shards: Shards, group: Any) -> Passes:
    """torch's own at its best: cuDNN's kernels, K/V gathered at once, balanced load.

    It needs as many K/V heads as query heads; they are repeated before anything is timed, in its favour.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel as enter

    mesh = DeviceMesh.from_group(group, shards.query.device.type)
    times = shards.query.shape[2] // shards.key.shape[2]
    repeated = [x.repeat_interleave(times, 2) for x in (shards.key, shards.value)]
    leaves = [x.transpose(1, 2).contiguous() for x in (shards.query, *repeated)]

    def attention(q, k, v):
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    made = passes(attention, leaves, shards.dout.transpose(1, 2).contiguous())
    # It shards buffers on the way in and wants at least one: the shards are made already, so it gets a toy.
    toy = torch.zeros(2 * dist.get_world_size(group), device=shards.query.device)
    made.opened.enter_context(enter(mesh, buffers=[toy], buffer_seq_dims=[0], no_restore_buffers={toy}))
    return made


def ring_flash_attention(shards: Shards, group: Any) -> Passes:
    attention = partial(zigzag_function(), causal=True, group=group)
    return passes(attention, [shards.query, shards.key, shards.value], shards.dout)


CONTEXT_PARALLEL = "torch context_parallel"
RING_FLASH = "ring-flash-attention"
PEERS = (CONTEXT_PARALLEL, RING_FLASH)
SYSTEMS = {
    "auto": System(partial(ours, "auto")),
    "triton": System(partial(ours, "triton")),
    "cuda": System(partial(ours, "cuda")),
    "xla": System(partial(ours, "xla")),
    CONTEXT_PARALLEL: System(context_parallel, heads_first=True),
    RING_FLASH: System(ring_flash_attention),
}
