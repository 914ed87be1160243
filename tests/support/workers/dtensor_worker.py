"""Run by torchrun with 4 processes: ring_attention of DTensors on a 2 x 2 mesh is that of the whole tensors in one process."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import ring_attn
from ring_attn import ring_attention, shard

BATCH, SEQUENCE, HEADS, WHOLE = Shard(0), Shard(1), Shard(2), Replicate()
LENGTH = 16


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole() -> dict[str, torch.Tensor]:
    return {
        "q": normal(2, LENGTH, 4, 8),
        "k": normal(2, LENGTH, 2, 8, seed=1),
        "v": normal(2, LENGTH, 2, 5, seed=2),
        "sinks": normal(4, seed=3),
        "shared sinks": normal(2, seed=4),
        "alibi_slopes": normal(4, seed=5).abs(),
        "bias": normal(1, 4, LENGTH, LENGTH, seed=6),
        "mask": normal(2, 1, LENGTH, LENGTH, seed=7) > -1,
        "q_segment_ids": (torch.arange(LENGTH) // 5).expand(2, LENGTH),
        "q_position_ids": torch.arange(LENGTH),
    }


def dense(q, k, v, sinks=None, alibi_slopes=None, bias=0, mask=None, q_segment_ids=None, q_position_ids=None, **options):
    """The same attention on one process, written out."""
    group, steps = q.shape[2] // k.shape[2], torch.arange(LENGTH)
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    batch, head, rows, columns = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None], steps[:, None], steps
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5 + bias
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * (rows - columns).abs()
    seen = torch.ones(2, 4, LENGTH, LENGTH, dtype=torch.bool) if mask is None else mask.expand(2, 4, LENGTH, LENGTH)
    seen = seen & (columns <= rows) if options.get("causal") else seen
    seen = seen & options["mask_mod"](batch, head, rows, columns) if "mask_mod" in options else seen
    if q_segment_ids is not None:
        seen = seen & (q_segment_ids[:, None, :, None] == q_segment_ids[:, None, None, :])
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        each = (sinks[:, None] if len(sinks) == 4 else sinks.expand(4, -1))[None, :, None].expand(2, -1, LENGTH, -1)
        scores = torch.cat([scores, each], -1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1)[..., :LENGTH], v), scores.logsumexp(-1)


def run(mesh: DeviceMesh, attention: Callable, placements: dict[str, list], options: dict) -> None:
    """Compares results and gradients. ``placements``: of the tensors that are given as DTensors; those with None go in whole."""
    leaves = {name: x.requires_grad_(x.is_floating_point()) for name, x in whole().items() if name in placements}
    given = {
        name: x
        if placements[name] is None
        else distribute_tensor(x.detach(), mesh, placements[name]).requires_grad_(x.requires_grad)
        for name, x in leaves.items()
    }
    drops = "dropout_p" in options
    expected = ring_attention(mesh="local", return_lse=True, **leaves, **options) if drops else dense(**renamed(leaves), **options)
    results = attention(**renamed(given), return_lse=True, **options)
    wanted = [name for name, x in leaves.items() if x.requires_grad]
    theirs = torch.autograd.grad(sum(x.sin().sum() for x in expected), [leaves[name] for name in wanted])
    ours = torch.autograd.grad(sum(x.sin().sum() for x in results), [given[name] for name in wanted])
    for found, exact in zip((*results, *ours), (*expected, *theirs), strict=True):
        same = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(same, exact, rtol=1e-10, atol=1e-10)


def renamed(tensors: dict) -> dict:
    return {name.removeprefix("shared "): x for name, x in tensors.items()}


def qkv(*placements):
    return {name: list(placements) for name in "qkv"}


CASES = {
    "all replicated": (qkv(WHOLE, WHOLE), dict(causal=True)),
    "batch x ring": (qkv(BATCH, SEQUENCE), dict(causal=True)),
    "ring x heads, held by all": (
        qkv(SEQUENCE, HEADS)
        | {"k": [SEQUENCE, WHOLE], "sinks": [WHOLE, WHOLE], "alibi_slopes": [WHOLE, WHOLE], "q_segment_ids": [Shard(1), WHOLE]},
        dict(causal=True),
    ),
    "a ring over both": (
        qkv(SEQUENCE, SEQUENCE) | {"sinks": [WHOLE, WHOLE], "bias": [Shard(2), Shard(2)], "q_segment_ids": [Shard(1), Shard(1)]},
        dict(causal=True),
    ),
    "ring x heads, split": (
        qkv(SEQUENCE, HEADS) | {"sinks": [WHOLE, Shard(0)], "bias": [Shard(2), Shard(1)], "mask": [Shard(2), WHOLE]},
        {},
    ),
    "batch x heads": (
        qkv(BATCH, HEADS) | {"mask": [Shard(0), WHOLE], "bias": None, "shared sinks": None, "q_position_ids": None},
        dict(mask_mod=lambda batch, head, q, k: q - k < 2 + batch + 2 * head),
    ),
    "dropout": (qkv(BATCH, HEADS), dict(dropout_p=0.5, dropout_seed=3)),
}


def check_layouts(mesh: DeviceMesh) -> None:
    """Zigzag shards made into DTensors; bhsd; another mesh beside the DTensors'."""
    tensors = {name: x for name, x in whole().items() if name in ("q", "k", "v")}
    exact, _ = dense(**tensors, causal=True)
    ring = dict(mesh=mesh, mesh_dim="ring", layout="zigzag")
    local = {name: shard(x, **ring) for name, x in tensors.items()}
    split = {name: DTensor.from_local(x, mesh["ring"], [SEQUENCE]) for name, x in local.items()}
    out = ring_attention(**split, causal=True, layout="zigzag")
    torch.testing.assert_close(out.to_local(), shard(exact, **ring))
    by_heads = {
        name: distribute_tensor(x, mesh["heads"], [Shard(1)]) for name, x in ((n, x.transpose(1, 2)) for n, x in local.items())
    }
    out = ring_attention(**by_heads, causal=True, qkv_format="bhsd", **ring)
    assert out.placements == (Shard(1),)
    torch.testing.assert_close(out.full_tensor().transpose(1, 2), shard(exact, **ring))


def refused(message: str, over: DeviceMesh, placements: dict[str, list], kind=ValueError, **options) -> None:
    tensors = whole()
    given = {
        name: distribute_tensor(tensors[name], over, places) if places else tensors[name] for name, places in placements.items()
    }
    try:
        ring_attention(**given, **options)
    except kind as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"{placements} was taken")


def check_refusals(mesh: DeviceMesh) -> None:
    partial = DTensor.from_local(whole()["q"], mesh, [SEQUENCE, Partial()])
    try:
        ring_attention(partial, partial, partial)
    except ValueError as error:
        assert "q must be replicated, or sharded over batch, sequence or heads; got Partial" in str(error), error
    else:
        raise AssertionError("Partial was taken")
    refused("got Shard(dim=3) on mesh dimension 'heads'; call .redistribute()", mesh, qkv(SEQUENCE, Shard(3)))
    turned = dict(mesh=mesh, mesh_dim=("heads", "ring"))
    refused("mesh dimension 'ring', 'heads', a ring of global ranks [0, 1, 2, 3]", mesh, qkv(SEQUENCE, SEQUENCE), **turned)
    refused("k must be Shard(dim=1)", mesh, qkv(SEQUENCE, HEADS) | {"k": [WHOLE, HEADS]})
    refused("must all be DTensors or none; k is none", mesh, qkv(SEQUENCE, HEADS) | {"k": None})
    refused("mesh= is a ring of global ranks", mesh, qkv(SEQUENCE, HEADS), mesh=mesh, mesh_dim="heads")
    refused("the sequence of these DTensors is not sharded", mesh, qkv(WHOLE, HEADS), mesh=mesh, mesh_dim="ring")
    refused("say where it is: mesh=", mesh["heads"], qkv(HEADS))
    builder = dict(mask_builder=lambda *sizes: None)
    refused("mask_builder is called for all heads", mesh, qkv(SEQUENCE, HEADS), kind=NotImplementedError, **builder)
    four = init_device_mesh("cpu", (4,), mesh_dim_names=("heads",))
    refused("dimension 2 of k, of size 2, must divide over the 4 processes", four, qkv(HEADS))


def check_a_compiled_model(mesh: DeviceMesh) -> None:
    """Lengths that change, in one graph; the ranks meet in each new program."""
    torch.manual_seed(0)
    module = ring_attn.RingAttention(16, 4, batch_first=True, mesh=mesh, mesh_dim="ring", causal=True, sinks=True)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for length in (8, 6, 4):
        x, padding = normal(1, length, 16).float().requires_grad_(), torch.arange(length)[None] >= length - 1
        ours, theirs = (run(x, x, x, key_padding_mask=padding)[0] for run in (compiled, module))
        torch.testing.assert_close(ours, theirs)
        wanted = [x, *module.parameters()]
        torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), wanted) for out in (ours, theirs)))


def main() -> None:
    dist.init_process_group("gloo")
    ring_attn.start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    for name, (placements, options) in CASES.items():
        run(mesh, ring_attention, placements, options)
        if dist.get_rank() == 0:
            print(f"ok {name}", flush=True)
    check_layouts(mesh)
    check_refusals(mesh)
    check_a_compiled_model(mesh)
    torch._dynamo.reset()
    compiled = torch.compile(ring_attention, backend="aot_eager", fullgraph=True)
    run(mesh, compiled, *CASES["ring x heads, split"])
    if dist.get_rank() == 0:
        print("ok compiled", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
