"""Lengths of the documents of packed batches, as data sets have them."""

import numpy as np

TOTAL = 32768


def filled(draw, total=TOTAL) -> list[int]:
    """Lengths drawn until the batch is full."""
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(int(np.clip(draw(), 1, total - sum(lengths))))
    return lengths


def mixes() -> dict[str, list[int]]:
    generator = np.random.default_rng(0)
    return {
        "conversations": filled(lambda: generator.lognormal(6, 1)),
        "web pages and books": filled(lambda: 64 * (1 + generator.pareto(1.1))),
        "long documents": filled(lambda: generator.lognormal(7.5, 1.5)),
        "one long, many short": [TOTAL // 2] + [512] * (TOTAL // 1024),
        "equal": [2048] * (TOTAL // 2048),
        "two": [TOTAL // 3, TOTAL - TOTAL // 3],
        "one": [TOTAL],
    }
