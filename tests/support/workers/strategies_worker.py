"""Run by torchrun: each way to split a sequence, from torch, against what the oracle has computed of the whole one.

Arguments: a file of cases, which ``strategy_cases.py`` has written; "cpu" or "cuda"; the dtype of the shards; the sizes, as "2x2",
of the mesh dimensions "a" and "b"; then runs, each "strategy:case:layout:dimensions", as "ulysses_ring:window:striped:ab". Prints
"ok <run>" for each. If there are ranks for several such meshes, the runs are dealt out to them.
"""

import math
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ring_attn
from ring_attn import Ring

SHARED = ("sinks",)  # operands that all ranks hold whole
ROWS = {"bias": 2, "lse": 2}  # the dimension of the sequence, where it is not 1
BOUNDS = {torch.float64: {"rtol": 1e-10, "atol": 1e-11}, torch.float32: {"rtol": 1e-4, "atol": 5e-5}}


def check(case: dict, ring: Ring, strategy: str, dtype: torch.dtype) -> None:
    def held(name: str, whole: torch.Tensor) -> torch.Tensor:
        own = whole if name in SHARED else ring.shard(whole, dim=ROWS.get(name, 1))
        return own.to(ring.mesh.device_type, dtype if own.is_floating_point() else None)

    own = {name: held(name, x).requires_grad_(name in case["gradients"]) for name, x in case["tensors"].items()}
    out, lse = ring.attention(**own, **case["options"], strategy=strategy, return_lse=True)
    wanted = [name for name, x in own.items() if x.requires_grad]
    cotangents = [held(name, case["cotangents"][name]) for name in ("out", "lse")]
    gradients = dict(zip(wanted, torch.autograd.grad((out, lse), [own[name] for name in wanted], cotangents), strict=True))
    for name in SHARED:
        if name in gradients:
            for group in ring.processes.groups:
                dist.all_reduce(gradients[name], group=group)
    found, exact = {"out": out, "lse": lse, **gradients}, {**case["results"], **case["gradients"]}
    for name, x in found.items():
        torch.testing.assert_close(x, held(name, exact[name]), **BOUNDS[dtype], msg=lambda text, name=name: f"{name}: {text}")


def main(file: str, device: str, dtype: str, shape: str, *runs: str) -> None:
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    ring_attn.start()
    sizes = tuple(map(int, shape.split("x")))
    replicas = dist.get_world_size() // math.prod(sizes)
    mesh = init_device_mesh(device, (replicas, *sizes), mesh_dim_names=("rep", "a", "b")[: len(sizes) + 1])
    cases = torch.load(file)
    replica = mesh.get_local_rank("rep")
    for run in runs[replica::replicas]:
        strategy, case, layout, dims = run.split(":")
        check(cases[case], Ring(mesh, mesh_dim=tuple(dims), layout=layout), strategy, getattr(torch, dtype))
        if mesh.get_local_rank("a") == 0:
            print("ok", run, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
