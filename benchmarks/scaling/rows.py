"""The rows of committed results that the cost model can predict, each as the call that was timed and how."""

import json
import re
import shlex
from argparse import ArgumentParser
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.report import RESULTS, Row
from benchmarks.harness.systems import Case
from benchmarks.one_gpu import choice as one_gpu_choice
from benchmarks.one_gpu import compare as one_gpu
from benchmarks.ring.overlap import ROTATING, STILL
from benchmarks.scaling.costs import Call
from jax_core.masks.static import make_mask

PLATFORMS = ("cuda", "triton", "cute")
UNITS = {"": 1, "k": 2**10, "M": 2**20}
ONE_GPU = {case.name: case for cases in one_gpu.CASES.values() for case in cases}
ONE_GPU["short-causal"] = Case("short-causal", 2048)  # of 2026-11-21
GATHERED = "2026-11-22T13"  # since then "auto" gathers shards shorter than 4096, if the sequence is short too
HOME_ROUNDED = "2026-11-22T20:30"  # until then dK and dV went home in float32


class Results(NamedTuple):
    """A folder of results. ``auto``: what "auto" took there, from how many query positions per GPU, the longest first."""

    name: str
    auto: tuple[tuple[int, str], ...] = ()

    @classmethod
    def parsed(cls, text: str) -> "Results":
        """``NAME`` or ``NAME=cuda@4096,triton@0``; the name of a folder of benchmarks/results."""
        name, _, rules = text.partition("=")
        found = (rule.partition("@") for rule in rules.split(",") if rule)
        return cls(Path(name).name, tuple((int(length or 0), platform) for platform, _, length in found))

    def __str__(self) -> str:
        rules = ",".join(f"{platform}@{length}" for length, platform in self.auto)
        return f"{self.name}={rules}" if rules else self.name

    def taken(self, length: int) -> str | None:
        return next((platform for least, platform in self.auto if length >= least), None)


@dataclass(frozen=True)
class Measured:
    """``calls``: of one sample. ``in_jax``: called without torch; ``by_clock``: timed by the wall clock. ``still_ms``: of an
    overlap, the same pass with nothing sent: there the model predicts what sending adds. ``alone``: one rank of a ring, whose
    transfers are left out."""

    platform: str
    results: str
    case: str
    phase: str
    call: Call
    ms: float
    spread: float
    calls: int
    in_jax: bool = False
    by_clock: bool = False
    still_ms: float | None = None
    alone: bool = False


def read(results: Results) -> tuple[list[Measured], list[str]]:
    """The rows of our own systems, and for each that the model does not cover, the reason."""
    data = json.loads((RESULTS / results.name / "results.json").read_text())
    found, left_out = [], []
    for row in (row for row in data["rows"] if "ms" in row and "samples" in row):
        made = measured(results, data, row)
        if isinstance(made, Measured):
            found.append(made)
        elif made:
            left_out.append(f"{results.name}: {row['case']}, {row['system']}: {made}")
    return found, list(dict.fromkeys(left_out))


def measured(results: Results, data: dict[str, Any], row: Row) -> Measured | str | None:
    """None for a peer's row, and for a pass with nothing sent, which is told with its rotating one; the reason for one of ours that
    is not covered."""
    rotating, name = row["system"] == ROTATING, row["system"].removesuffix(", in JAX")
    if not rotating and name.removeprefix("ring ") not in ("auto", "ring", *PLATFORMS):
        return None  # another strategy too
    call = call_of(row["case"], ranks_of(data), options_of(data["command"]).heads)
    if isinstance(call, str):
        return call
    if data["date"] < HOME_ROUNDED:
        call = replace(call, home_itemsize=4)
    calls = int(row["samples"].split(" x ")[1])
    figures = (results.name, row["case"], row["phase"], call, row["ms"], row["spread"], calls)
    if rotating:
        still = still_of(data, row)
        kernel = results.taken(call.length) or PLATFORMS[0]
        return "nothing to compare with" if still is None else Measured(kernel, *figures, True, True, still)
    platform = results.taken(call.length) if name in ("auto", "ring") else name.removeprefix("ring ")
    if name == "auto" and call.size > 1 and call.length < 4096 and data["date"] > GATHERED:
        return '"auto" is another strategy there'
    if platform is None:
        return f'what "auto" took is not known; say it: {results.name}=PLATFORM@LENGTH,...'
    alone = "a rank of" in row["case"]
    in_jax = alone or name != row["system"]
    by_clock = in_jax and "wall ms" not in row  # beside a time by events stands one by clock
    return Measured(platform, *figures, in_jax, by_clock, alone=alone)


def still_of(data: dict[str, Any], row: Row) -> float | None:
    """The milliseconds of the same pass with nothing sent."""
    same = (
        other for other in data["rows"] if (other["case"], other["system"], other["phase"]) == (row["case"], STILL, row["phase"])
    )
    return next((other["ms"] for other in same if "ms" in other), None)


def ranks_of(data: dict[str, Any]) -> int:
    """Of a run on several GPUs, which need not be all of its machine; else 1."""
    found = re.search(r"on (\d+) GPUs", data["title"])
    return int(found[1]) if found else 1


def options_of(command: str) -> Any:
    parser = ArgumentParser()
    parser.add_argument("--heads", nargs=3, type=int, default=[32, 8, 128])
    return parser.parse_known_args(shlex.split(command)[1:])[0]


def call_of(case: str, gpus: int, heads: list[int]) -> Call | str:
    """The call that a case's name stands for, on one GPU or in a ring."""
    query, kv, dim = heads
    if case in ONE_GPU:
        return call_of_one(ONE_GPU[case])
    if (found := re.fullmatch(r"(\S+) (\d+)([kM]?)", case)) and found[1] in one_gpu_choice.PARTS:
        return call_of_one(one_gpu_choice.make_case(found[1], number(found[2], found[3])))
    if found := re.fullmatch(r"(\d+)([kM]?) tokens", case):
        return Call(number(*found.groups()) // gpus, gpus, query, kv, dim, dim)
    if found := re.fullmatch(r"(\d+)([kM]?) tokens, a rank of (\d+)", case):
        return Call(number(*found.groups()[:2]) // int(found[3]), int(found[3]), query, kv, dim, dim)
    if found := re.fullmatch(r"(\d+)([kM]?) tokens a GPU, ring of (\d+)", case):
        return Call(number(*found.groups()[:2]), int(found[3]), query, kv, dim, dim)
    if found := re.fullmatch(r"overlap at (\d+)([kM]?) tokens a GPU", case):
        return Call(number(*found.groups()), gpus, query, kv, dim, dim)
    return "a case that the program does not know"


def call_of_one(case: Case) -> Call | str:
    if case.documents or case.softcap is not None:
        return "packed documents and soft caps are not in the model"
    mask = make_mask(causal=case.causal, window=None if case.window is None else (case.window - 1, 0))
    return Call(case.length, 1, case.heads, case.kv_heads, case.dim, case.dim, mask=mask)


def number(digits: str, unit: str) -> int:
    return int(digits) * UNITS[unit]
