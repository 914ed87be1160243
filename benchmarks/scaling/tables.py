"""What benchmarks/scaling/README.md shows of the cost model: each table between two comments of that file, and the plot."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.harness.report import markdown, short
from benchmarks.scaling.costs import DIRECTIONS, Call, Machine, both, estimate, hop_times, ring_stages, simulate
from benchmarks.scaling.fit import SHARED, Bench, error, predicted
from benchmarks.scaling.rows import Measured

TOKENS = tuple(2**power for power in (16, 18, 20, 22, 24))
GPUS = tuple(2**power for power in range(3, 11))
BETWEEN = (50e9, 25e9)  # bytes a second
ALONE = 2**20  # tokens on one GPU: the rate that efficiencies are relative to
FASTEST_FIRST = ("cute", "cuda", "triton")
BENCHMARKED = tuple(2**power for power in (14, 16, 18, 20))
SAMPLE_MS = 40.0  # of benchmarks/ring/compare.py
LONGEST = 2**15  # tokens a GPU: transfers of longer shards are taken to be hidden
SIMULATED = 64  # GPUs: up to here every prediction is simulated too


class Told(NamedTuple):
    """``small``: mean and largest error on larger rings, fitted to machines of at most two GPUs alone."""

    machine: Machine
    bench: Bench
    errors: dict[str, float]
    rows: list[Measured]
    left_out: list[str]
    small: tuple[float, float]


def blocks(told: Told) -> dict[str, str]:
    lines: dict[str, Callable[[Told], list[str]]] = {
        "errors": errors, "fit": quality, "figures": figures, "hidden": hidden, "predictions": predictions, "limits": limits,
        "sensitivity": sensitivity,
        "eight": eight,
    }  # fmt: skip
    return {name: "\n".join(make(told)) for name, make in lines.items()}


def replaced(text: str, name: str, block: str) -> str:
    """``text`` with ``block`` between the comments of that name. Raises ValueError where they are missing."""
    begin, end = f"<!-- {name}: written by benchmarks/scaling/predict.py -->", "<!-- end -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"benchmarks/scaling/README.md must have {begin} and {end} after it, once")
    return pattern.sub(lambda _: f"{begin}\n{block}\n{end}", text)


def described(row: Measured) -> str:
    kernel = "rotating" if row.still_ms is not None else row.platform
    return f"{row.results}: {row.case}, {kernel}, {row.phase}{', in JAX' if row.in_jax and row.still_ms is None else ''}"


def spread(told: Told, rows: list[Measured]) -> str:
    found = np.abs([error(told.machine, told.bench, row) for row in rows])
    return f"{found.mean():.1%} on average, {found.max():.1%} at most ({len(rows)} rows)"


def tested(rows: list[Measured]) -> list[Measured]:
    return [row for row in rows if row.call.size > 2]


def errors(told: Told) -> list[str]:
    times, overlaps = ([row for row in tested(told.rows) if (row.still_ms is not None) is of] for of in (False, True))
    mean, worst = told.small
    cells = (
        (row.results, row.case, row.phase, f"{row.ms:.4g}", f"{predicted(told.machine, told.bench, row):.4g}",
         f"{error(told.machine, told.bench, row):+.1%}")
        for row in (*times, *overlaps)
    )  # fmt: skip
    return [
        f"Error of the times: {spread(told, times)}.",
        f"Error of passes with rotation, given those without: {spread(told, overlaps)}.",
        f"Fitted only to the runs on machines of one and two GPUs, error of the times: {mean:.1%} on average, {worst:.1%} at most.",
        "",
        *markdown(("results", "case", "phase", "measured ms", "predicted ms", "error"), cells),
    ]


def quality(told: Told) -> list[str]:
    """By number of ranks and platform; and the rows worst fitted."""
    rows = [row for row in told.rows if row.call.size <= 2]
    groups = sorted({(row.call.size, row.platform) for row in rows if row.still_ms is None})
    of = {key: [row for row in rows if (row.call.size, row.platform) == key and row.still_ms is None] for key in groups}
    lines = [f"- {platform}, {size} GPU{'s' if size > 1 else ''}: {spread(told, of[size, platform])}" for size, platform in groups]
    lines += [f"- overlap, 2 GPUs: {spread(told, [row for row in rows if row.still_ms is not None])}"]
    worst = sorted(rows, key=lambda row: -abs(error(told.machine, told.bench, row)))[:3]
    lines += [f"- worst: {'; '.join(f'{described(row)} {error(told.machine, told.bench, row):+.1%}' for row in worst)}"]
    return lines + [f"- left out: {reason}" for reason in told.left_out]


UNITS = {  # of each figure: how it is shown
    "product": ("rate of the products alone, TFLOP/s", lambda x: 1 / x / 1e12),
    "score": ("besides, ps a score", lambda x: x * 1e12),
    "edge": ("further scores a cut row", lambda x: x),
    "launch": ("launch, us a step", lambda x: x * 1e6),
    "joined": ("joining, bytes an element a step", lambda x: x),
    "host": ("host, us a call", lambda x: x * 1e6),
    "host_in_ring": ("host in a ring, us a call", lambda x: x * 1e6),
}


def figures(told: Told) -> list[str]:
    platforms = [(name, way) for name in told.machine.kernels for way in DIRECTIONS]
    lines = [
        (words, *(shown(unit(getattr(getattr(told.machine.kernels[name], way), key)), told.errors[f"{name}.{way}.{key}"])
                  for name, way in platforms))
        for key, (words, unit) in UNITS.items()
    ]  # fmt: skip
    shared = {name: getattr(told.machine, name) for name in SHARED}
    bench = {name: getattr(told.bench, name) for name in ("sample", "warming")}
    words = ", ".join(f"`{name}` {shown(value, told.errors[name])}" for name, value in (shared | bench).items())
    warm = ", ".join(f"{name} {value:.2f}" for name, value in told.bench.warm.items())
    return [
        *markdown(("", *(f"{name}, {way}" for name, way in platforms)), lines),
        "",
        f"Shared: {words} (seconds). How warm the GPUs were when a sample began: {warm}.",
    ]


def shown(value: float, relative: float) -> str:
    """With its standard error; a figure that may as well be 0 or twice as large is not determined."""
    return f"{value:.3g} ± {relative:.0%}" if relative < 0.5 else f"{value:.3g} (not determined)"


def fastest(machine: Machine) -> str:
    return next(name for name in FASTEST_FIRST if name in machine.kernels)


def with_link(machine: Machine, bandwidth: float) -> Machine:
    return replace(machine, between=replace(machine.between, bandwidth=bandwidth))


def hidden(told: Told) -> list[str]:
    """From how many tokens a GPU a zigzag causal step computes for longer than it sends."""
    platform = fastest(told.machine)
    links = {"within a host": told.machine.inside.bandwidth} | {f"between hosts, {rate / 1e9:.0f} GB/s": rate for rate in BETWEEN}
    cells = []
    for words, rate in links.items():
        machine = replace(told.machine, host_size=1, between=replace(told.machine.between, bandwidth=rate))
        cells.append((words, *(str(hidden_from(machine, platform, way)) for way in DIRECTIONS)))
    return [f"`{platform}`:", "", *markdown(("", *DIRECTIONS), cells)]


def hidden_from(machine: Machine, platform: str, direction: str) -> int:
    """Tokens a GPU, a multiple of 64, from which on all are hidden."""
    lengths = (64 * number for number in range(LONGEST // 64, 0, -1))
    return 64 + next((length for length in lengths if not is_hidden(machine, platform, length, direction)), 0)


def is_hidden(machine: Machine, platform: str, length: int, direction: str) -> bool:
    """In the third of four steps, which in the backward sends K, V and the travelling dK, dV."""
    stage = ring_stages(machine, platform, Call(length, 4), direction)[2]
    sending = sum(float(hop_times(machine, 4, send).max()) for send in stage.sends)
    return sending <= (1 - machine.sharing) * float(stage.compute.max())


def rates(machine: Machine, platform: str, tokens: int, gpus: int) -> tuple[float, float]:
    """TFLOP/s a GPU, forward and both, as benchmarks/ring/compare.py counts."""
    call = Call(tokens // gpus, gpus)
    tflop = 4 * call.heads * call.dim * tokens**2 / 2 / gpus / 1e12
    return tflop / estimate(machine, platform, call, "forward").total, 3.5 * tflop / both(machine, platform, call).total


Grid = dict[tuple[int, int], tuple[float, float]]  # by tokens and GPUs


def grid(machine: Machine, platform: str) -> Grid:
    return {(tokens, gpus): rates(machine, platform, tokens, gpus) for tokens in TOKENS for gpus in GPUS}


def predictions(told: Told) -> list[str]:
    platform = fastest(told.machine)
    alone = rates(told.machine, platform, ALONE, 1)
    lines = [f"`{platform}`; one GPU alone, {short(ALONE)} tokens: {alone[0]:.0f} / {alone[1]:.0f}."]
    for bandwidth in BETWEEN:
        found = grid(with_link(told.machine, bandwidth), platform)
        cells = ([str(gpus), *(_cell(found[tokens, gpus], alone) for tokens in TOKENS)] for gpus in GPUS)
        header = ("GPUs", *(f"{short(tokens)} tokens" for tokens in TOKENS))
        lines += ["", f"{bandwidth / 1e9:.0f} GB/s between hosts:", "", *markdown(header, cells)]
    return lines


def _cell(found: tuple[float, float], alone: tuple[float, float]) -> str:
    return f"{found[0]:.0f} / {found[1]:.0f} ({found[1] / alone[1]:.0%})"


def eight(told: Told) -> list[str]:
    """What benchmarks/ring/compare.py should read on one host of eight, whose samples begin on rested GPUs."""
    platforms = [name for name in FASTEST_FIRST if name in told.machine.kernels]
    cells = ([name, *(" / ".join(_as_benchmarked(told, name, tokens)) for tokens in BENCHMARKED)] for name in platforms)
    return markdown(("TFLOP/s a GPU", *(f"{short(tokens)} tokens" for tokens in BENCHMARKED)), cells)


def _as_benchmarked(told: Told, platform: str, tokens: int) -> Iterator[str]:
    call = Call(tokens // 8, 8)
    for phase, operations in (("forward", 1.0), ("both", 3.5)):
        once = Measured(platform, "", "", phase, call, ms=0.0, spread=0.0, calls=1)
        calls = max(1, round(SAMPLE_MS / predicted(told.machine, told.bench, once)))
        seconds = predicted(told.machine, told.bench, replace(once, calls=calls)) / 1000
        yield f"{operations * 4 * call.heads * call.dim * tokens**2 / 2 / 8 / seconds / 1e12:.0f}"


def limits(told: Told) -> list[str]:
    """Where more GPUs stop paying, and how far the closed form is from the simulation."""
    platform = fastest(told.machine)
    alone = rates(told.machine, platform, ALONE, 1)[1]
    cells = []
    for bandwidth in BETWEEN:
        machine = with_link(told.machine, bandwidth)
        for tokens in TOKENS:
            times = {gpus: both(machine, platform, Call(tokens // gpus, gpus)).total * 1000 for gpus in GPUS}
            best = min(times, key=lambda gpus: times[gpus])
            paying = [gpus for gpus in GPUS if rates(machine, platform, tokens, gpus)[1] >= 0.8 * alone]
            cells.append(
                (f"{bandwidth / 1e9:.0f}", short(tokens), str(max(paying, default="none")), f"{best}", f"{times[best]:.4g}")
            )
    header = ("GB/s", "tokens", "most GPUs at 80 % of one GPU's rate", "GPUs of the shortest time", "that time, ms")
    apart = max(abs(difference) for difference in simulated(told.machine, platform))
    return [
        *markdown(header, cells),
        "",
        f"The simulation and the closed form differ by at most {apart:.2%} in all of these up to {SIMULATED} GPUs.",
    ]


def sensitivity(told: Told) -> list[str]:
    """What the figures that the results do not determine are worth, forward and backward."""
    platform, machine = fastest(told.machine), told.machine
    slow = {link: replace(getattr(machine, link), latency=2 * getattr(machine, link).latency) for link in ("inside", "between")}
    kernel = machine.kernels[platform]
    quick = {way: replace(getattr(kernel, way), launch=getattr(kernel, way).launch / 2) for way in DIRECTIONS}
    joined = {way: replace(getattr(kernel, way), joined=getattr(kernel, way).joined / 2) for way in DIRECTIONS}
    variants = {
        "as fitted": machine,
        "transfers take no compute (`sharing` 0)": replace(machine, sharing=0.0),
        "latencies twice as long": replace(machine, **slow),
        "half the launch": replace(machine, kernels={platform: replace(kernel, **quick)}),
        "half the bytes of joining": replace(machine, kernels={platform: replace(kernel, **joined)}),
        "rested GPUs (`sustained` 1)": replace(machine, sustained=1.0),
    }
    places = ((2**16, 8), (2**18, 32), (2**20, 64), (2**20, 256), (2**24, 1024))
    header = ("TFLOP/s a GPU", *(f"{short(tokens)} on {gpus}" for tokens, gpus in places))
    return markdown(header, ((words, *(f"{rates(of, platform, *at)[1]:.0f}" for at in places)) for words, of in variants.items()))


def simulated(machine: Machine, platform: str) -> Iterator[float]:
    """Closed form over simulation, less 1."""
    for tokens in TOKENS:
        for gpus in (gpus for gpus in GPUS if gpus <= SIMULATED):
            for way in DIRECTIONS:
                call = Call(tokens // gpus, gpus)
                played = simulate(machine, ring_stages(machine, platform, call, way))
                yield estimate(machine, platform, call, way).device / played - 1


def plot(machine: Machine, path: Path) -> None:
    """Forward and backward together: a line for each number of tokens, a panel for each link between hosts."""
    platform = fastest(machine)
    figure = Figure(figsize=(10, 3.8), layout="tight")
    for panel, bandwidth in zip(figure.subplots(1, len(BETWEEN), sharey=True), BETWEEN, strict=True):
        found = grid(with_link(machine, bandwidth), platform)
        for tokens in TOKENS:
            panel.plot(GPUS, [found[tokens, gpus][1] for gpus in GPUS], marker="o", markersize=3, label=f"{short(tokens)} tokens")
        panel.set_xscale("log", base=2)
        panel.set_xticks(GPUS, [str(gpus) for gpus in GPUS])
        panel.set_xlabel("GPUs, 8 a host")
        panel.set_title(f"{bandwidth / 1e9:.0f} GB/s a GPU between hosts", fontsize=9)
        panel.grid(alpha=0.3)
        panel.set_ylim(bottom=0)
    figure.axes[0].set_ylabel("TFLOP/s a GPU, predicted")
    figure.axes[0].legend(fontsize=7)
    figure.suptitle(f"{platform}, causal, zigzag, 32:8 heads of 128, forward and backward", fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": None})
