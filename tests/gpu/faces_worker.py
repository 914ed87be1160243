"""The ways into the ring that programs written for one GPU take, on all GPUs in bfloat16: each against the same on one in float32.

    torchrun --standalone --nproc-per-node 2 tests/gpu/faces_worker.py

``context_parallel_sdpa``, sums of gradients that begin in the backward, the functions named as flash-attn's, generation from a
cache, and what ``cp`` says where ranks differ.
Exit status 1 if an error is larger than twice what torch's SDPA makes in bfloat16 on one GPU, or a mistake is not told.
"""

import sys
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.team import Team, tidy
from ring_attn import Ring, context_parallel_sdpa, flash, sync_gradients
from ring_attn.generation import KVCache, generate
from ring_attn.sharding.reduction import sum_over_ring
from ring_attn.training import early_sums
from tests.gpu.models_worker import apart
from tests.support.generation_cases import SmallModel

TOKENS, HEADS, KV_HEADS, DIM = 4096, 8, 2, 128


def main() -> int:
    team, wrong = Team(), 0
    for check in (sdpa, overlapped_sums, flash_attn_func, flash_attn_varlen_func, generation, other_batches):
        said = check(team)
        fine = team.agreed(not said.startswith("WRONG"))
        wrong += not fine
        team.say(f"{check.__name__}: {said}")
        tidy()
    team.close()
    return 1 if wrong else 0


class Block(nn.Module):
    """Attention as models for one GPU write it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(256, (HEADS + 2 * KV_HEADS) * DIM), nn.Linear(HEADS * DIM, 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            h.unflatten(-1, (-1, DIM)).transpose(1, 2) for h in self.inner(x).split([HEADS * DIM] + [KV_HEADS * DIM] * 2, -1)
        )
        return self.outer(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


def sdpa(team: Team) -> str:
    ring = Ring(layout="zigzag")

    def run(dtype: torch.dtype, part: Callable[[Tensor], Tensor] = lambda x: x, whole: Callable[[Tensor], Tensor] = lambda x: x):
        model, x = Block().to(team.device, dtype), normal(team, 2, TOKENS, 256, seed=1).to(dtype)
        out = model(part(x))
        (out.float() * part(normal(team, 2, TOKENS, 256, seed=2))).sum().backward()
        return model, whole(out.detach())

    exact, usual = (results(*run(dtype)) for dtype in (torch.float32, torch.bfloat16))
    with context_parallel_sdpa(ring=ring):
        model, out = run(torch.bfloat16, ring.shard, ring.unshard)
    sync_gradients(model, ring=ring)
    return verdict(results(model, out), usual, exact)


def overlapped_sums(team: Team) -> str:
    """Of gradients' copies, in buckets of 64 KiB, while the backward goes on; against sums of the gradients after it."""
    ring, apart_by, begun = Ring(layout="zigzag"), 0.0, 0
    model = nn.Sequential(*(Block() for _ in range(4))).to(team.device, torch.bfloat16)
    with patch.object(early_sums, "_BUCKET", 2**16), context_parallel_sdpa(ring=ring):
        for step in range(8):
            model.zero_grad()
            x = ring.shard(normal(team, 2, TOKENS, 256, seed=step)).bfloat16()
            model(x).float().square().mean().backward()
            begun += sum(len(sums._begun) for sums in early_sums.early_sums(model.parameters()))
            if step == 6:
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            after = [sum_over_ring(x.grad, ring.processes, "the test's sum", "") for x in model.parameters()]
            sync_gradients(model, ring=ring, overlap=True)
            apart_by = max(apart_by, *(apart(x.grad, want) for x, want in zip(model.parameters(), after, strict=True)))
    fine = apart_by <= (0 if team.size == 2 else 1e-2) and (begun > 0 or team.size == 1)
    return f"{'' if fine else 'WRONG: '}{begun} buckets began in 8 backwards; {apart_by:.1e} from sums after them"


def results(model: nn.Module, out: Tensor) -> list[Tensor]:
    return [out, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*swapped, is_causal=True, enable_gqa=True).transpose(1, 2)


def flash_attn_func(team: Team) -> str:
    ring = Ring(layout="zigzag")
    return against_torch(team, ring, attend, lambda *qkv: flash.zigzag_ring_flash_attn_func(*qkv, causal=True))


def flash_attn_varlen_func(team: Team) -> str:
    """Three documents; one process attends to each by itself."""
    ring, ends = Ring(layout="contiguous"), [0, 1000, 3000, TOKENS]
    offsets = torch.tensor(ends, dtype=torch.int32, device=team.device)

    def one_by_one(*qkv: Tensor) -> Tensor:
        pieces = zip(*(x.split([1000, 2000, TOKENS - 3000], 1) for x in qkv), strict=True)
        return torch.cat([attend(*piece) for piece in pieces], 1)

    def packed(*qkv: Tensor) -> Tensor:
        return flash.flash_attn_varlen_func(*(x[0] for x in qkv), offsets, offsets, 2000, 2000, causal=True)[None]

    return against_torch(team, ring, one_by_one, packed)


def against_torch(team: Team, ring: Ring, whole: Callable[..., Tensor], sharded: Callable[..., Tensor]) -> str:
    qkv = [normal(team, 1, TOKENS, heads, DIM, seed=seed) for seed, heads in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    upstream = normal(team, 1, TOKENS, HEADS, DIM, seed=3)

    def run(attention: Callable[..., Tensor], dtype: torch.dtype, part: Callable[[Tensor], Tensor] = lambda x: x) -> list[Tensor]:
        operands = [part(x).to(dtype).contiguous().requires_grad_() for x in qkv]
        out = attention(*operands)
        return [out.detach(), *torch.autograd.grad(out, operands, part(upstream).to(dtype))]

    exact, usual = (run(whole, dtype) for dtype in (torch.float32, torch.bfloat16))
    return verdict([ring.unshard(x) for x in run(sharded, torch.bfloat16, ring.shard)], usual, exact)


def generation(team: Team) -> str:
    """Greedy tokens in float32, where a token is the first by far more than rounding."""
    prompts = torch.randint(64, (3, 1500), generator=torch.Generator().manual_seed(4)).to(team.device)
    model = SmallModel(dtype=torch.float32).to(team.device)
    alone, together = (generate(model, prompts, KVCache(Ring(mesh), max_length=1600), 60) for mesh in ("local", None))
    same = (alone == together).float().mean().item()
    return f"{'' if same == 1 else 'WRONG: '}{same:.0%} of 180 tokens as on one GPU"


def other_batches(team: Team) -> str:
    """Each rank has a batch of its own, which is told a forward later."""
    import transformers

    from ring_attn.integrations.transformers import context_parallel

    sizes = dict(vocab_size=64, hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).to(team.device)
    cp = context_parallel(model)
    ids = torch.randint(64, (1, 256), generator=torch.Generator().manual_seed(team.rank)).to(team.device)
    try:
        for _ in range(2):
            model(**cp.shard({"input_ids": ids, "labels": ids}))
    except ValueError as error:
        return f"told: {error}" if "inputs differ" in str(error) else f"WRONG: {error}"
    return "WRONG: nothing was told"


def normal(team: Team, *shape: int, seed: int) -> Tensor:
    """The same on all ranks, and representable in bfloat16."""
    return torch.randn(shape, device=team.device, generator=torch.Generator(team.device).manual_seed(seed)).bfloat16().float()


def verdict(have: list[Tensor], usual: list[Tensor], exact: list[Tensor]) -> str:
    errors = [(apart(x, want), apart(other, want)) for x, other, want in zip(have, usual, exact, strict=True)]
    wrong = "" if all(mine <= 2 * torchs for mine, torchs in errors) else "WRONG: "
    return wrong + "  ".join(f"{mine:.1e} ({torchs:.1e})" for mine, torchs in errors)


if __name__ == "__main__":
    sys.exit(main())
