"""The kernels for 16 bits in a ring, against Triton's in float32: output, LSE and gradients, as root mean square errors.

    torchrun --standalone --nproc-per-node 4 tests/gpu/sixteen_bits_worker.py [--platforms ...] [--strategies ...] [--cases ...]

bfloat16, 4096 tokens in all if nothing else is said; strategies of two axes on a mesh of 2 x half the ranks.
Exit status 1 if an error is larger than twice that of Triton's ring in bfloat16. Without a GPU the xla kernel takes Triton's place.
"""

import argparse
import sys
from itertools import product
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import ring_attn
from benchmarks.harness.team import ON_GPU, Team
from benchmarks.ring.systems import OF_TWO_AXES
from ring_attn import shard

TOKENS = 4096
PLAIN = "triton" if ON_GPU else "xla"
KINDS = ("out", "lse", "dq", "dk", "dv")
CASES: dict[str, dict[str, Any]] = {
    "zigzag": dict(layout="zigzag", causal=True),
    "contiguous": dict(layout="contiguous", causal=True),
    "full": dict(layout="contiguous", causal=False),
    "two sequences": dict(layout="zigzag", causal=True, batch=2),
    "no shared heads": dict(layout="zigzag", causal=True, kv_heads=8),
    "dim 64": dict(layout="zigzag", causal=True, dim=64),
    "documents": dict(layout="zigzag", causal=True, documents=5),
    "window": dict(layout="zigzag", causal=True, sliding_window=(300, 0)),
    # Has crashed jaxlib 0.11.2, which compiled the backward.
    "short window": dict(layout="zigzag", causal=True, sliding_window=(206, 0), tokens=1024, batch=2),
    "soft cap": dict(layout="zigzag", causal=True, softcap=20.0),
    "deterministic": dict(layout="zigzag", causal=True, deterministic=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--platforms", nargs="*", default=["cute"])  # cuDNN has no gradient of the LSE, which is compared
    parser.add_argument("--strategies", nargs="*", default=["ring"])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    team, wrong = Team(), 0
    for name in options.cases:
        exact, plain = (attempt(team, CASES[name], dtype, PLAIN, "ring") for dtype in (torch.float32, torch.bfloat16))
        for strategy, platform in product(options.strategies, options.platforms):
            try:
                found = attempt(team, CASES[name], torch.bfloat16, platform, strategy)
            except NotImplementedError as refusal:
                team.say(f"{name:16} {strategy:12} {platform:8} refused: {str(refusal)[:110]}")
                continue
            figures = [(error(team, x, want), error(team, usual, want)) for x, usual, want in zip(found, plain, exact, strict=True)]
            bad = any(not have <= 2 * usual + 1e-6 for have, usual in figures)
            wrong += bad
            shown = "  ".join(f"{kind} {have:.1e} ({usual:.1e})" for kind, (have, usual) in zip(KINDS, figures, strict=True))
            team.say(f"{name:16} {strategy:12} {platform:8} {'WRONG ' if bad else ''}{shown}")
    team.close()
    return 1 if wrong else 0


def attempt(team: Team, case: dict[str, Any], dtype: torch.dtype, platform: str, strategy: str) -> list[torch.Tensor]:
    """This rank's output, LSE and gradients, in float32."""
    options = dict(case, strategy=strategy, **where(team, strategy))
    usual = {"tokens": TOKENS, "batch": 1, "kv_heads": 2, "dim": 128, "documents": 0}
    tokens, batch, kv_heads, dim, documents = (options.pop(name, value) for name, value in usual.items())
    if dtype == torch.float32:
        options.pop("deterministic", None)
    place = lambda x: shard(x, layout=options["layout"]).contiguous()  # noqa: E731
    generator = torch.Generator(team.device).manual_seed(0)

    def normal(heads: int) -> torch.Tensor:
        whole = torch.randn(batch, tokens, heads, dim, device=team.device, generator=generator)
        return place(whole.to(torch.bfloat16).to(dtype))

    q, k, v, dout = normal(8), normal(kv_heads), normal(kv_heads), normal(8)
    if documents:
        ids = torch.arange(tokens, device=team.device, dtype=torch.int32)[None] * documents // tokens
        options["q_segment_ids"] = place(ids)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = ring_attn.ring_attention(q, k, v, return_lse=True, platform=platform, **options)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    return [x.detach().float() for x in (out, lse, *gradients)]


def where(team: Team, strategy: str) -> dict[str, Any]:
    """The arguments that say which ranks share the sequence."""
    if strategy not in OF_TWO_AXES:
        return {}
    mesh = init_device_mesh(team.device.type, (2, team.size // 2), mesh_dim_names=("outer", "inner"))
    return {"mesh": mesh, "mesh_dim": ("outer", "inner")}


def error(team: Team, got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the worst rank, relative."""
    sums = torch.stack([(got - want).square().sum(), want.square().sum()])
    return team.slowest((sums[0] / sums[1]).sqrt().nan_to_num(nan=torch.inf).item())  # a maximum may pass over what is no number


if __name__ == "__main__":
    sys.exit(main())
