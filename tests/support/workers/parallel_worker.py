"""Run by torchrun with 4 processes: heads x ring on a 2 x 2 mesh give the outputs and gradients of one process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ring_attn
from ring_attn import RingAttention, ring_attention, shard
from ring_attn.parallel import HeadParallel

WIDTH, LENGTH, LAYOUT = 16, 16, "zigzag"


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = RingAttention(WIDTH, 4, batch_first=True, **options)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, **masks):
        h = self.norm(x)
        x = x + self.attention(h, h, h, **masks)[0]
        return x + self.down(self.up(x).relu())


class OwnProjections(nn.Module):
    """A model that calls the function on the heads that it has."""

    def __init__(self, **ring):
        super().__init__()
        self.qkv, self.out, self.ring = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.Linear(WIDTH, WIDTH), ring

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (-1, 4)) for project in self.qkv)
        return self.out(ring_attention(q, k, v, causal=True, **self.ring).flatten(2))


def made(kind: type[nn.Module], **options) -> nn.Module:
    torch.manual_seed(1)
    model = kind(**options).double()
    for number, parameter in enumerate(model.parameters()):  # biases and sinks too
        parameter.data = normal(*parameter.shape, seed=number) / 3
    return model


PLAN = {"attention": HeadParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE_PLAN = {"attention": HeadParallel(input_layouts=Shard(1), output_layouts=Shard(1))}
CASES = {
    "grouped heads with sinks": (Block, PLAN, dict(num_kv_heads=2, sinks=True, causal=True), {}),
    "several sinks, slopes, a window": (
        Block,
        PLAN,
        dict(sinks=2, alibi_slopes=nn.Parameter(normal(4).abs()), sliding_window=5, bias=False, num_kv_heads=2),
        dict(q_segment_ids=(torch.arange(LENGTH) // 7).expand(2, LENGTH)),
    ),
    "masks, and a key and a value more": (
        Block,
        PLAN,
        dict(add_bias_kv=True, add_zero_attn=True, alibi_slopes=normal(4).abs(), softcap=5.0),
        dict(attn_mask=normal(LENGTH, LENGTH, seed=3), key_padding_mask=(torch.arange(LENGTH) > 12).expand(2, LENGTH)),
    ),
    "dropout": (Block, PLAN, dict(dropout=0.5, causal=True), {}),
    "the function on local heads": (
        OwnProjections,
        {**{f"qkv.{number}": ColwiseParallel() for number in range(3)}, "out": RowwiseParallel()},
        {},
        {},
    ),
}


def check(mesh: DeviceMesh, kind: type[nn.Module], plan: dict, options: dict, masks: dict) -> nn.Module:
    ring = dict(mesh=mesh, mesh_dim="ring", layout=LAYOUT)
    whole, split = made(kind, **options, mesh="local"), made(kind, **options, **ring)
    split = parallelize_module(split, mesh["heads"], plan)
    x = normal(2, LENGTH, WIDTH, seed=7).requires_grad_()
    part = shard(x.detach(), **ring).requires_grad_()
    parts = {name: shard(mask, dim=-2 if name == "attn_mask" else -1, **ring) for name, mask in masks.items()}
    results = []
    for model, given, with_masks in ((whole, x, masks), (split, part, parts)):
        torch.manual_seed(5)  # dropout draws its seed here
        out = model(given, **with_masks)
        out.sin().sum().backward()
        results.append(out)
    same(results[1], shard(results[0], **ring))
    same(part.grad, shard(x.grad, **ring))
    compare_gradients(mesh, whole, split)
    return split


def compare_gradients(mesh: DeviceMesh, whole: nn.Module, split: nn.Module) -> None:
    attention = getattr(whole, "attention", None)
    found = {name: full(parameter.grad) for name, parameter in split.named_parameters()}
    for gradient in found.values():
        dist.all_reduce(gradient, group=mesh.get_group("ring"))
    if attention is not None:
        names = [f"attention.{name}_proj_weight" for name in "qkv"]
        found["attention.in_proj_weight"] = torch.cat([found.pop(name) for name in names])
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    for name, gradient in expected.items():
        same(found[name], gradient, name)


def full(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def same(found: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10, msg=lambda text: f"{name}: {text}")


def check_state_dicts(mesh: DeviceMesh) -> None:
    """A packed one loads into a split module, and a split one into a packed module."""
    options = dict(num_kv_heads=2, sinks=True, mesh="local")
    packed, other = (made(RingAttention, embed_dim=WIDTH, num_heads=4, **options) for _ in range(2))
    split = parallelize_module(made(RingAttention, embed_dim=WIDTH, num_heads=4, **options), mesh["heads"], HeadParallel())
    for parameter in split.parameters():
        assert isinstance(parameter, DTensor)
        parameter.data.zero_()
    split.load_state_dict(packed.state_dict())
    saved = {name: full(x) for name, x in split.state_dict().items()}
    assert "in_proj_weight" not in saved and torch.equal(saved["k_proj_weight"], packed.in_proj_weight[WIDTH : WIDTH + 8])
    for parameter in other.parameters():
        parameter.data.zero_()
    other.load_state_dict(saved)
    for name, x in packed.state_dict().items():
        assert torch.equal(other.state_dict()[name], x), name
    assert split.q_proj_weight.to_local().shape == (WIDTH // 2, WIDTH)


def check_sequence_parallel(mesh: DeviceMesh) -> None:
    """Inputs and outputs that the processes of the heads share as parts of the sequence."""
    ring = dict(mesh=mesh, mesh_dim="ring", layout=LAYOUT)
    whole, split = (made(Block, causal=True, **place).attention for place in (dict(mesh="local"), ring))
    split = parallelize_module(split, mesh["heads"], SEQUENCE_PLAN["attention"])
    x = normal(2, LENGTH, WIDTH, seed=7)
    own = shard(x, **ring).chunk(2, 1)[mesh.get_local_rank("heads")].clone().requires_grad_()
    x.requires_grad_()
    out, expected = split(own, own, own)[0], whole(x, x, x)[0]
    same(out, shard(expected, **ring).chunk(2, 1)[mesh.get_local_rank("heads")])
    out.sin().sum().backward()
    expected.sin().sum().backward()
    same(own.grad, shard(x.grad, **ring).chunk(2, 1)[mesh.get_local_rank("heads")])


def check_refusals(mesh: DeviceMesh) -> None:
    cases = {
        "num_kv_heads, 1 here, must divide over the 2 processes": RingAttention(WIDTH, 4, num_kv_heads=1),
        "use mask_mod": RingAttention(WIDTH, 4, mask_builder=lambda *sizes: None),
        "got Linear": nn.Linear(2, 2),
    }
    for message, module in cases.items():
        try:
            parallelize_module(module, mesh["heads"], HeadParallel())
        except (ValueError, NotImplementedError) as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"{module} was taken")


def main() -> None:
    dist.init_process_group("gloo")
    ring_attn.start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    for name, case in CASES.items():
        check(mesh, *case)
        if dist.get_rank() == 0:
            print(f"ok {name}", flush=True)
    check_state_dicts(mesh)
    check_sequence_parallel(mesh)
    check_refusals(mesh)
    if dist.get_rank() == 0:
        print("ok the rest", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
