"""The checks one after another, and what is printed of them."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ring_attn.doctor.finding import Finding

COLOURS = {"right": "green", "wrong": "bold red", "note": "cyan"}
WIDTH = 30  # of the longest name of a check


def run(options: argparse.Namespace) -> int:
    """Exit code 0 if nothing is wrong, else 1. Under torchrun every rank takes part and rank 0 prints, each finding as it comes: a
    check that ends the process hides none of those before it."""
    printing = os.environ.get("RANK", "0") == "0"
    terminal = Console(width=None if sys.stdout.isatty() else 160)
    findings = []
    for finding in _looked(_checks(options.limit), terminal, quiet=options.json or not printing):
        findings.append(finding)
        if printing and not options.json:
            terminal.print(_row(finding))
    wrong = [finding.check for finding in findings if finding.verdict == "wrong"]
    if printing and options.json:
        print(json.dumps({"ok": not wrong, "findings": [finding._asdict() for finding in findings]}, indent=1))
    elif printing:
        terminal.print(f"[bold red]wrong: {', '.join(wrong)}[/]" if wrong else "[green]nothing is wrong[/]")
    sys.stdout.flush()
    return int(bool(wrong))


def _checks(limit: float) -> Iterator[tuple[str, Callable[[], Iterable[Finding]]]]:
    """What each looks at, and how; modules that load torch or JAX are loaded when their turn comes."""
    import torch

    from ring_attn.doctor import kernels, ranks, traps, versions

    yield "versions", versions.check
    yield "traps", traps.check
    if "RANK" in os.environ:
        yield "ranks", lambda: ranks.check(limit)
    else:
        yield "kernels against float64", lambda: kernels.check(torch.cuda.device_count(), limit)


def _looked(checks: Iterable[tuple[str, Callable[[], Iterable[Finding]]]], terminal: Console, quiet: bool) -> Iterator[Finding]:
    """With a bar that says which check is running, in a terminal; findings are printed above it."""
    console = terminal if sys.stdout.isatty() else Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    checks = list(checks)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("", total=len(checks))
        for name, look in checks:
            progress.update(task, description=name)
            yield from look()
            progress.advance(task)


def _row(finding: Finding) -> Table:
    row = Table(show_header=False, box=None, pad_edge=False)
    row.add_column(min_width=WIDTH)
    row.add_row(finding.check, f"[{COLOURS[finding.verdict]}]{finding.verdict:5}[/]", escape(finding.text))
    return row
