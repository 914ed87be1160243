"""The checks one after another, and what is printed of them."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ring_attn.doctor.finding import Finding

COLOURS = {"right": "green", "wrong": "bold red", "note": "cyan"}


def run(options: argparse.Namespace) -> int:
    """Exit code 0 if nothing is wrong, else 1. Under torchrun every rank takes part and rank 0 prints."""
    quiet = options.json or os.environ.get("RANK", "0") != "0"
    found = list(_shown(_checks(options.limit), quiet))
    wrong = any(finding.verdict == "wrong" for finding in found)
    if os.environ.get("RANK", "0") == "0":
        if options.json:
            print(json.dumps({"ok": not wrong, "findings": [finding._asdict() for finding in found]}, indent=1))
        else:
            _print(found)
    sys.stdout.flush()
    return int(wrong)


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


def _shown(checks: Iterable[tuple[str, Callable[[], Iterable[Finding]]]], quiet: bool) -> Iterator[Finding]:
    """With a bar that says which check is running, in a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    checks = list(checks)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task("", total=len(checks))
        for name, look in checks:
            progress.update(task, description=name)
            yield from look()
            progress.advance(task)


def _print(found: list[Finding]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(show_header=False, box=None, pad_edge=False)
    for finding in found:
        table.add_row(finding.check, f"[{COLOURS[finding.verdict]}]{finding.verdict}[/]", finding.text)
    console.print(table)
    wrong = [finding.check for finding in found if finding.verdict == "wrong"]
    console.print(f"[bold red]wrong: {', '.join(wrong)}[/]" if wrong else "[green]nothing is wrong[/]")
