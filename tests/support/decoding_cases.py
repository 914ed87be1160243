"""A few queries against keys in any order, beside the oracle's attention: for the kernels that torch launches."""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch

from jax_core.testing.oracle import reference_attention

BATCH, KEYS = 2, 70


@dataclass(frozen=True)
class Case:
    queries: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 8
    options: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32


CASES = {
    "one": Case(),
    "several, in order": Case(3, names=("segments", "positions"), options={"causal": True}),
    "window": Case(2, names=("positions",), options={"causal": True, "sliding_window": (20, 0)}),
    "window of two sides": Case(2, names=("positions",), options={"sliding_window": (9, 4)}),
    "chunk": Case(3, names=("segments", "positions"), options={"chunk_size": 16}),
    "soft cap": Case(options={"softcap": 2.0, "scale": -0.7}, names=("segments",)),
    "sinks": Case(names=("sinks", "segments")),
    "sinks of all heads": Case(names=("shared sinks",)),
    "slopes": Case(2, names=("alibi_slopes", "positions"), options={"causal": True}),
    "slopes of entries": Case(1, names=("slopes of entries", "positions")),
    "own heads, wide values": Case(kv_heads=4, dim=5, value_dim=24),
    "many rows": Case(20, heads=8, kv_heads=1, names=("positions",), options={"causal": True}),
    "float16": Case(2, dtype=torch.float16, names=("segments",)),
}


def arrays(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    made = {
        "q": normal(BATCH, case.queries, case.heads, case.dim),
        "k": normal(BATCH, KEYS, case.kv_heads, case.dim),
        "v": normal(BATCH, KEYS, case.kv_heads, case.value_dim),
    }
    if "segments" in case.names:
        made["q_segment_ids"] = torch.tensor([[0], [-1]]).expand(BATCH, case.queries).to(torch.int32).contiguous()
        made["kv_segment_ids"] = torch.randint(-1, 2, (BATCH, KEYS), generator=generator).to(torch.int32)
    if "positions" in case.names:
        last = torch.tensor([[KEYS - 4], [KEYS // 2]])
        made["q_position_ids"] = (last + torch.arange(case.queries)).to(torch.int32)
        made["kv_position_ids"] = torch.stack([torch.randperm(KEYS, generator=generator) for _ in range(BATCH)]).to(torch.int32)
    given = {
        "sinks": lambda: torch.randn(case.heads, generator=generator),
        "shared sinks": lambda: torch.randn(3, generator=generator),
        "alibi_slopes": lambda: torch.linspace(0.1, 0.4, case.heads),
        "slopes of entries": lambda: torch.rand(BATCH, case.heads, generator=generator),
    }
    kinds = {"shared sinks": "sinks", "slopes of entries": "alibi_slopes"}
    return made | {kinds.get(name, name): given[name]() for name in case.names if name in given}


def oracle(case: Case, given: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    names = {"sinks": "softmax_aux", "q": "query", "k": "key", "v": "value", "softcap": "logits_soft_cap", "scale": "softmax_scale"}
    wide = {names.get(name, name): (x.double() if x.is_floating_point() else x).numpy() for name, x in given.items()}
    options = {names.get(name, name): value for name, value in case.options.items()}
    with jax.enable_x64(True):
        found = reference_attention(wide.pop("query"), wide.pop("key"), wide.pop("value"), **wide, **options)
        return np.asarray(found.out), np.asarray(found.lse)


def check(case: Case, given: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor) -> None:
    wanted, of_lse = oracle(case, given)
    near = dict(atol=2e-6, rtol=2e-6) if case.dtype == torch.float32 else dict(atol=2e-3, rtol=2e-3)
    np.testing.assert_allclose(out.double().numpy(), wanted, **near)
    np.testing.assert_allclose(lse.double().numpy(), of_lse, **near)
    assert out.dtype == case.dtype and lse.dtype == torch.float32
