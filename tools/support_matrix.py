"""The tables of docs/support.md, from what kernels and strategies declare: `python -m tools.support_matrix` writes them.

A kernel or strategy may still refuse a shape, a device or a combination; the call's error says why (``unsupported``).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_core.request.dispatch import KERNELS, STRATEGIES
from tools import marks

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
FEATURES = {
    "causal": ("causal",),
    "sliding window, to both sides": ("left", "right"),
    "chunks (Llama 4)": ("chunk",),
    "segment ids, packed documents": ("q_segment_ids", "kv_segment_ids"),
    "position ids": ("q_position_ids", "kv_position_ids", "any_position"),
    "boolean mask": ("mask",),
    "mask functions": ("predicates",),
    "soft cap": ("softcap",),
    "bias, and its gradient": ("bias",),
    "ALiBi": ("alibi_slopes",),
    "attention sinks": ("softmax_aux",),
    "dropout": ("dropout_prob", "dropout_seed"),
    "gradient of the log-sum-exp": ("lse_gradient",),
    "the same bits in every run": ("deterministic",),
    "second derivative (JAX)": ("second_derivative",),
    "`balance` plans": ("plan",),
    "bfloat16": ("bfloat16",),
    "float16": ("float16",),
    "float32": ("float32",),
    "float64": ("float64",),
}
LAYOUTS = {name: (name,) for name in ("contiguous", "zigzag", "striped")}


def tables() -> dict[str, str]:
    """By the name that stands in the page's marks."""
    around = STRATEGIES["ring"].DONE_BY_STRATEGY
    kernels = {name: kernel.CAPABILITIES | around for name, kernel in KERNELS.items()}
    strategies = {name: strategy.CAPABILITIES for name, strategy in STRATEGIES.items()}
    return {"kernels": _table(FEATURES, kernels), "strategies": _table(FEATURES | LAYOUTS, strategies)}


def _table(rows: Mapping[str, tuple[str, ...]], columns: Mapping[str, Any]) -> str:
    """Rows with the same answers share a line, columns with the same answers a column. The line with the most columns is first."""
    alike = _alike({name: tuple(set(needed) <= has for needed in rows.values()) for name, has in columns.items()})
    answers = _alike(dict(zip(rows, zip(*alike, strict=True), strict=True)))
    cells = [["; ".join(names), *("yes" if there else "-" for there in answer)] for answer, names in answers.items()]
    cells.sort(key=lambda line: -line.count("yes"))
    lines = [["", *(", ".join(f"`{name}`" for name in names) for names in alike.values())], ["---"] * (len(alike) + 1), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _alike(answers: Mapping[str, tuple[bool, ...]]) -> dict[tuple[bool, ...], list[str]]:
    """The names with the same answers, by these."""
    names_of: dict[tuple[bool, ...], list[str]] = {}
    for name, answer in answers.items():
        names_of.setdefault(answer, []).append(name)
    return names_of


def written(page: str) -> str:
    return marks.written(page, tables(), "tools/support_matrix.py")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
