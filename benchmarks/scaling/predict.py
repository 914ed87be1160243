"""Fits the cost model of a ring to committed results, and predicts rings over many hosts. No GPU is needed.

    python -m benchmarks.scaling.predict [RESULTS ...]            # fits; writes the figures, README.md's tables and its plot
    python -m benchmarks.scaling.predict --check RESULTS ...      # holds the shipped figures against other results; writes nothing

RESULTS names a folder of benchmarks/results, and says what "auto" took there from how many query positions per GPU:
`2026-11-21-ring-2xH200=cuda@4096,triton@0`. Rows of one GPU and of rings of two are fitted; larger rings only test the fit. Rows
that the model does not cover are told.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.report import RESULTS
from benchmarks.scaling import costs, tables
from benchmarks.scaling.fit import ASSUMED, Bench, Fit, error, fit, predicted
from benchmarks.scaling.rows import Measured, Results, read

ROOT = Path(__file__).parents[2]
FIGURES = costs.FIGURES / "costs_h200.json"
DOCUMENT = ROOT / "benchmarks/scaling/README.md"
PLOT = ROOT / "benchmarks/scaling/scaling.png"
FITTED_UP_TO = 2  # ranks
THEN = "=cuda@4096,triton@0"  # what "auto" took on that day
USED = (
    "2026-11-21-one-gpu" + THEN,
    "2026-11-21-ring-2xH200" + THEN,
    "2026-11-21-ring-4xH200" + THEN,
    "2026-11-21-ring-4xH200-scaling" + THEN,
)


def rows_of(results: Sequence[Results]) -> tuple[list[Measured], list[str]]:
    found = [read(one) for one in results]
    return [row for rows, _ in found for row in rows], [reason for _, reasons in found for reason in reasons]


def complete(rows: Sequence[Measured]) -> set[str]:
    """The platforms that were timed in both directions on one or two GPUs."""
    ways = (
        {row.platform for row in rows if is_fitted(row) and row.phase in phases} for phases in (("forward",), ("backward", "both"))
    )
    return set.intersection(*ways)


def is_fitted(row: Measured) -> bool:
    return row.call.size <= FITTED_UP_TO


def provenance(results: Sequence[Results], fitted: Fit) -> dict[str, Any]:
    runs = [json.loads((RESULTS / one.name / "results.json").read_text()) for one in results]
    newest = max(runs, key=lambda run: run["date"])
    return {
        "device": newest["gpus_before"][0]["name"],
        "date": newest["date"],
        "versions": newest["versions"],
        "results": [str(one) for one in results],
        "fitted": f"rows of at most {FITTED_UP_TO} ranks, by benchmarks/scaling/predict.py",
        "assumed": ASSUMED,
        "relative standard errors": {
            name: None if np.isinf(spread) else round(spread, 3) for name, spread in fitted.errors.items()
        },
        "bench": fitted.bench._asdict(),
    }


def shipped() -> tuple[costs.Machine, Bench, list[Results]]:
    """The figures in the package, how their results were timed, and which those are."""
    machine, source = costs.load()
    return machine, Bench(**source["bench"]), [Results.parsed(text) for text in source["results"]]


def summary(errors: Sequence[float]) -> tuple[float, float]:
    """Mean and largest, of absolute values."""
    return float(np.mean(np.abs(errors))), float(np.max(np.abs(errors)))


def without_larger(results: Sequence[Results], rows: Sequence[Measured]) -> tuple[float, float]:
    """The error on larger rings of a fit to the results of machines of at most two GPUs alone."""
    large = {row.results for row in rows if not is_fitted(row)}
    small = fit([row for row in rows if row.results not in large])
    tested = [row for row in rows if not is_fitted(row) and row.still_ms is None and row.platform in small.machine.kernels]
    return summary([error(small.machine, small.bench, row) for row in tested])


def refit(results: Sequence[Results]) -> None:
    rows, left_out = rows_of(results)
    known = complete(rows)
    left_out += sorted(
        {f"{row.platform}: not timed in both directions on one or two GPUs" for row in rows if row.platform not in known}
    )
    rows = [row for row in rows if row.platform in known]
    found = fit([row for row in rows if is_fitted(row)])
    data = {"machine": asdict(found.machine), "provenance": provenance(results, found)}
    FIGURES.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    told = tables.Told(found.machine, found.bench, found.errors, rows, left_out, without_larger(results, rows))
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, block in tables.blocks(told).items():
        text = tables.replaced(text, name, block)
    DOCUMENT.write_text(text, encoding="utf-8")
    tables.plot(found.machine, PLOT)
    print(text[text.index("<!--") :])


def check(results: Sequence[Results]) -> None:
    machine, bench, _ = shipped()
    rows, left_out = rows_of(results)
    covered = [row for row in rows if row.platform in machine.kernels]
    left_out += sorted({f"{row.results}: {row.platform} has no figures yet" for row in rows if row not in covered})
    for row in covered:
        off = error(machine, bench, row)
        print(f"{tables.described(row):76} {row.ms:10.3f} ms, predicted {predicted(machine, bench, row):10.3f} {off:+7.1%}")
    print("\n".join(f"left out: {reason}" for reason in left_out))
    if covered:
        mean, worst = summary([error(machine, bench, row) for row in covered])
        print(f"error of {len(covered)} rows: {mean:.1%} on average, {worst:.1%} at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", default=list(USED), metavar="RESULTS")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    results = [Results.parsed(text) for text in options.results]
    check(results) if options.check else refit(results)


if __name__ == "__main__":
    main()
