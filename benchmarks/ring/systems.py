"""The systems of benchmarks/ring/compare.py: this library's ring and its peers, called from torch on this rank's shards.

All hold the sequence in the same order: rank r of N has pieces r and 2N-1-r of 2N ("zigzag" here and in ring-flash-attention,
"load balance" in torch's context parallelism), so equal shards must give equal results.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import systems
from benchmarks.harness.systems import Inputs, Prepared, through_torch
from benchmarks.ring.flash_attn_of_torch import yunchang, zigzag_function

Group = dist.ProcessGroup | str  # or "local", a ring of one


def ours(platform: str, shards: Inputs, group: Group, layout: str = "zigzag", **options: Any) -> Prepared:
    return systems.ours(platform, shards, mesh=group, layout=layout, causal=True, **options)


def two_axes(platform: str, shards: Inputs, group: Group, layout: str = "zigzag", **options: Any) -> Prepared:
    """The ranks as a mesh of two dimensions, the second of two ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(shards.query.device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("outer", "inner"))
    assert group is dist.group.WORLD
    return systems.ours(platform, shards, mesh=mesh, mesh_dim=("outer", "inner"), layout=layout, causal=True, **options)


def context_parallel(shards: Inputs, group: Group) -> Prepared:
    """torch's context parallelism in its fastest configuration: cuDNN's kernels, K/V gathered at once, balanced load.

    It needs as many K/V heads as query heads; they are repeated before the timing starts, in its favour.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel as enter

    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, shards.query.device.type)
    times = shards.query.shape[2] // shards.key.shape[2]
    key, value = (x.repeat_interleave(times, 2) for x in (shards.key, shards.value))
    repeated = Inputs(shards.query, key, value, shards.dout)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    prepared = through_torch(attention, repeated, lambda x: x.transpose(1, 2).contiguous())
    # It shards buffers on entry and requires at least one. The shards exist already, so it gets a dummy.
    toy = torch.zeros(2 * dist.get_world_size(group), device=shards.query.device)
    prepared.opened.enter_context(enter(mesh, buffers=[toy], buffer_seq_dims=[0], no_restore_buffers={toy}))
    return prepared


def ring_flash_attention(shards: Inputs, group: Group) -> Prepared:
    return through_torch(partial(zigzag_function(), causal=True, group=group), shards)


def yunchang_usp(shards: Inputs, group: Group) -> Prepared:
    """Ulysses over neighbouring pairs of ranks, a zigzag ring over the pairs. Its pairs split their shards in another order, so its
    results are compared with nothing."""
    package, ranks = yunchang(), dist.get_world_size()
    assert isinstance(group, dist.ProcessGroup) and group.size() == ranks
    package.set_seq_parallel_pg(2, ranks // 2, dist.get_rank(), ranks)
    attention = package.LongContextAttention(ring_impl_type="zigzag")
    return through_torch(partial(attention, causal=True), shards)


CONTEXT_PARALLEL = "torch context_parallel"
RING_FLASH = "ring-flash-attention"
YUNCHANG = "yunchang"
PEERS = (CONTEXT_PARALLEL, RING_FLASH, YUNCHANG)
STRATEGIES = ("ring", "all_gather", "ulysses", "ulysses_ring", "ring_ulysses", "hierarchical")
OF_TWO_AXES = STRATEGIES[3:]


def strategies() -> dict[str, Callable[..., Prepared]]:
    """Every strategy with every kernel, by name: "ulysses", which takes the kernel that "auto" does, "ulysses triton"."""
    made: dict[str, Callable[..., Prepared]] = {}
    for strategy, platform in product(STRATEGIES, ("auto", "cute", "triton", "cuda", "xla")):
        make = two_axes if strategy in OF_TWO_AXES else ours
        name = strategy if platform == "auto" else f"{strategy} {platform}"
        made[name] = partial(make, platform, strategy=strategy)
    return made


SYSTEMS: dict[str, Callable[..., Prepared]] = {
    **strategies(),
    "auto": partial(ours, "auto"),
    "cute": partial(ours, "cute"),
    "triton": partial(ours, "triton"),
    "cuda": partial(ours, "cuda"),
    "xla": partial(ours, "xla"),
    CONTEXT_PARALLEL: context_parallel,
    RING_FLASH: ring_flash_attention,
    YUNCHANG: yunchang_usp,
}
