"""One rank of the module tests. Run by tests/ring_attn/test_module.py under torch.distributed.run, on any number of ranks.

The sharded module must give what nn.MultiheadAttention gives on the whole sequence: the shard of its output, and gradients
that add up over the ranks to its gradients.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ring_attn.module.attention import RingAttention
from ring_attn.sharding.sequence import shard
from tests.support.healthy import gloo_world

BATCH, EMBED, HEADS = 2, 16, 4


class Case(NamedTuple):
    """``call`` holds masks of the whole sequence, ``ring`` the arguments that only RingAttention has."""

    layout: str
    module: dict[str, Any]
    call: dict[str, torch.Tensor]
    ring: dict[str, Any]


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def padding(length):
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[1, -5:] = True
    return mask


def infinite(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, float("-inf"))


def cases(length):
    scattered = random(length, length, seed=1) > 0.7
    scattered[:, 0] = False
    added = random(length, length, seed=2).requires_grad_()
    heads = random(BATCH * HEADS, length, length, seed=3)
    float_padding = (random(BATCH, length, seed=4) + infinite(padding(length))).requires_grad_()
    extra = {"add_bias_kv": True, "add_zero_attn": True}
    return [
        Case("zigzag", extra, {"key_padding_mask": padding(length), "attn_mask": scattered}, {"causal": True}),
        Case("zigzag", {"batch_first": True}, {"attn_mask": added, "key_padding_mask": float_padding}, {}),
        Case("contiguous", {}, {"attn_mask": heads, "key_padding_mask": infinite(padding(length))}, {}),
    ]


def rows_of(case, name, mask):
    dim = -1 if name == "key_padding_mask" else -2
    return shard(mask.detach(), dim=dim, layout=case.layout).requires_grad_(mask.requires_grad)


def whole(case, x, upstream):
    """Output and gradients of nn.MultiheadAttention on the whole sequence."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64, **case.module)
    x = x.clone().requires_grad_()
    call = dict(case.call)
    if case.ring.get("causal"):
        call["attn_mask"] = call["attn_mask"] | torch.ones(len(upstream), len(upstream), dtype=torch.bool).triu(1)
    out, _ = module(x, x, x, need_weights=False, **call)
    out.backward(upstream if not case.module.get("batch_first") else upstream.transpose(0, 1))
    return module, out.detach(), x.grad


def check(case, rank, size, mesh):
    length = 8 * size
    dim = 1 if case.module.get("batch_first") else 0
    x, upstream = random(length, BATCH, EMBED, seed=5), random(length, BATCH, EMBED, seed=6)
    x = x.transpose(0, 1) if dim else x
    for mask in case.call.values():
        mask.grad = None
    theirs, expected, expected_grad = whole(case, x, upstream)
    held = {"dim": dim, "layout": case.layout}
    ours = RingAttention(EMBED, HEADS, dtype=torch.float64, layout=case.layout, mesh=mesh, **case.module, **case.ring)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    own = shard(x, **held).requires_grad_()
    masks = {name: rows_of(case, name, mask) for name, mask in case.call.items()}
    out, _ = ours(own, own, own, **masks)
    out.backward(shard(upstream.transpose(0, 1) if dim else upstream, **held))
    close(out.detach(), shard(expected, **held), case, "output")
    close(own.grad, shard(expected_grad, **held), case, "input")
    for name, mask in masks.items():
        if mask.requires_grad:
            close(mask.grad, rows_of(case, name, case.call[name].grad), case, name)
    for name, parameter in ours.named_parameters():
        dist.all_reduce(parameter.grad)
        close(parameter.grad, theirs.get_parameter(name).grad, case, name)


def close(actual, expected, case, name):
    where = f"{case.layout}, {sorted(case.module)}, {sorted(case.call)}, {name}"
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{where}: {text}")


def check_grouped_heads_and_dropout(rank, size):
    """Compares the ring with the same module on the whole sequence in one process, including dropout, sinks and window."""
    length = 8 * size
    options = {"num_kv_heads": 2, "sinks": 2, "dropout": 0.3, "sliding_window": (5, 3), "dtype": torch.float64}
    torch.manual_seed(1)
    local = RingAttention(EMBED, HEADS, mesh="local", **options)
    ring = RingAttention(EMBED, HEADS, layout="striped", **options)
    ring.load_state_dict(local.state_dict(), strict=True)
    x, upstream = random(length, BATCH, EMBED, seed=7).requires_grad_(), random(length, BATCH, EMBED, seed=8)
    torch.manual_seed(2)
    expected, _ = local(x, x, x)
    expected.backward(upstream)
    held = {"dim": 0, "layout": "striped"}
    own = shard(x.detach(), **held).requires_grad_()
    torch.manual_seed(2)
    out, _ = ring(own, own, own)
    out.backward(shard(upstream, **held))
    torch.testing.assert_close(out.detach(), shard(expected.detach(), **held), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(own.grad, shard(x.grad, **held), rtol=1e-9, atol=1e-9)
    for name, parameter in ring.named_parameters():
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, local.get_parameter(name).grad, rtol=1e-9, atol=1e-9)


def main():
    with gloo_world("module") as (rank, size):
        meshes = (None, init_device_mesh("cpu", (size,)))
        for index, case in enumerate(cases(8 * size)):
            check(case, rank, size, meshes[index % 2])
        check_grouped_heads_and_dropout(rank, size)


if __name__ == "__main__":
    main()
