"""Which of this library's kernels is the fastest where: what `auto`'s table of choices is made from.

    python -m benchmarks.one_gpu.choice [--parts 32:8x128 16x64 window segments softcap] [--lengths 512 ...] [--output FOLDER]

Every platform at every number of tokens on one GPU, causal, called from torch: forward, and forward and backward together. The two
first parts have no other feature; the other three are those of 32:8 heads of 128 with one feature each. Besides the usual results,
`choice.md` has a line for each case, with the fastest marked.
"""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product

from benchmarks.harness.report import Row, markdown, short
from benchmarks.harness.systems import Case
from benchmarks.one_gpu.bench import Bench, arguments
from benchmarks.one_gpu.systems import PLATFORMS

LENGTHS = (512, 1024, 2048, 4096, 8192, 32768)
FROM = {"window": 2048, "segments": 2048, "softcap": 2048}  # the shortest at which a feature is measured
WINDOW, SOFTCAP = 1024, 50.0  # Gemma 3's, Gemma 2's
SHARES = (3, 17, 6, 1, 21, 5, 9, 2)  # of the documents: sixty-fourths of the sequence
PHASES = ("forward", "both")
GROUPED = Case("32:8x128", 0, heads=32, kv_heads=8)
PARTS = ("32:8x128", "16x64", "window", "segments", "softcap")


def make_case(part: str, length: int) -> Case:
    case = replace(GROUPED, name=f"{part} {short(length)}", length=length)
    if part == "16x64":
        return replace(case, heads=16, kv_heads=16, dim=64)
    if part == "segments":
        return replace(case, documents=tuple(length * share // 64 for share in SHARES))
    return replace(case, window=WINDOW if part == "window" else None, softcap=SOFTCAP if part == "softcap" else None)


def main() -> None:
    options = read_arguments()
    bench = Bench(options, "The fastest kernel by length and feature, one GPU")
    chosen = [make_case(part, length) for part, length in product(options.parts, options.lengths) if length >= FROM.get(part, 0)]
    cases = ((case.name, partial(bench.measure, case, options.systems, PHASES)) for case in chosen)
    bench.run(cases, partial(tell, bench))


def read_arguments() -> argparse.Namespace:
    parser = arguments(__doc__, "one-gpu-choice", rounds=5, sample_ms=15.0)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--lengths", nargs="*", type=int, default=list(LENGTHS), help="tokens")
    parser.add_argument("--systems", nargs="*", choices=(*PLATFORMS, "xla", "auto"), default=list(PLATFORMS))
    return parser.parse_args()


def tell(bench: Bench) -> None:
    told = "\n".join(choices(bench.report.rows, bench.options.systems))
    bench.report.say(told)
    (bench.options.output / "choice.md").write_text(told + "\n")


def choices(rows: list[Row], systems: Iterable[str]) -> list[str]:
    """A line for each case and phase: every system's milliseconds, the fastest of them in bold."""
    systems = list(systems)
    found = {(row["case"], row["phase"], row["system"]): row["ms"] for row in rows if "ms" in row}
    lines = []
    for case, phase in dict.fromkeys((case, phase) for case, phase, _ in found):
        times = {name: found[case, phase, name] for name in systems if (case, phase, name) in found}
        fastest = min(times, key=lambda name: times[name])
        shown = {name: f"**{time:.3f}**" if name == fastest else f"{time:.3f}" for name, time in times.items()}
        lines.append([case, phase, *(shown.get(name, "") for name in systems), fastest])
    return markdown(("case", "phase", *(f"{name} ms" for name in systems), "fastest"), lines)


if __name__ == "__main__":
    main()
