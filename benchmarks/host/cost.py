"""Where the host spends its time in a call of a short sequence, in microseconds.

    python -m benchmarks.host.cost --mesh local
    torchrun --standalone --nproc-per-node 4 -m benchmarks.host.cost

For each platform: how long the host takes to return from a forward and from a backward, on an idle device and in a row of calls;
how long the device computes; and how the host's time is split, told by marks in one and the same call. The marks themselves cost
about 0.2 us each. Before each sample of an idle device all processes are synchronised. Medians are rank 0's; "slowest" is the
largest median of all ranks. The last lines are the same as JSON, one for each platform.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

import ring_attn
from benchmarks.harness.team import ON_GPU, Team, hardware, software
from benchmarks.harness.timing import Timed, by_events, reason
from torch_bridge.backends import compiled, launch
from torch_bridge.call import autograd
from torch_bridge.call.programs import _PROGRAMS

Call = Callable[[], Any]
DIM, DTYPE = (128, torch.bfloat16) if ON_GPU else (8, torch.float32)
HEADS = (32, 8, 8) if ON_GPU else (2, 2, 2)
PLATFORMS = "auto,cuda,triton,cute" if ON_GPU else "auto"
LOOKUP, ENGINE, AUTOGRAD = "request lookup", "torch's autograd engine", "autograd function"
AROUND, CROSSING = "device, precision, peers", "streams, memory for results"
TO_JAX, DISPATCH, WAIT, CHECKS = "tensors to JAX", "dispatch", "torch waits for JAX", "back to torch, arrays freed"
STAGES = (LOOKUP, ENGINE, AUTOGRAD, AROUND, CROSSING, TO_JAX, DISPATCH, WAIT, CHECKS)


class Marks:
    """The stage that the host is in, from each mark to the next one."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, int]] = []

    def begin(self, stage: str) -> None:
        self.marks.append((stage, time.perf_counter_ns()))

    def within(self, function: Callable, stage: str, then: str) -> Callable:
        """The function as ``stage``; ``then`` is the stage after it."""

        def marked(*arguments: Any) -> Any:
            self.begin(stage)
            try:
                return function(*arguments)
            finally:
                self.begin(then)

        return marked

    def taken(self) -> dict[str, float]:
        """Microseconds of each stage since the first mark; forgets the marks."""
        times: defaultdict[str, float] = defaultdict(float)
        for (stage, since), (_, until) in zip(self.marks, self.marks[1:], strict=False):
            times[stage] += (until - since) / 1000
        self.marks.clear()
        return times


@contextmanager
def marked(marks: Marks, program: Any) -> Iterator[None]:
    """The stages of this program's calls, marked where one ends and the next begins."""
    way, convert, function = program.launcher, program.launcher.convert, autograd._Call
    crossed = type(way).__call__
    inner = convert._replace(
        to_array=marks.within(convert.to_array, TO_JAX, CROSSING), to_tensor=marks.within(convert.to_tensor, WAIT, CHECKS)
    )

    def of(compiled: launch.Compiled) -> launch.Compiled:
        return compiled._replace(function=marks.within(compiled.function, DISPATCH, CHECKS))

    def cross(self: Any, join: Any, compiled: launch.Compiled, tensors: Any) -> Any:
        return crossed(self, join, of(compiled), tensors)

    with (
        patch.object(function, "apply", marks.within(function.apply, AUTOGRAD, LOOKUP)),
        patch.object(function, "backward", staticmethod(marks.within(function.backward, AUTOGRAD, ENGINE))),
        patch.object(compiled.CompiledProgram, "_run", marks.within(compiled.CompiledProgram._run, AROUND, AUTOGRAD)),
        patch.object(type(way), "__call__", marks.within(cross, CROSSING, AROUND)),
        patch.object(way, "convert", inner),
    ):
        yield


def idle(team: Team, call: Call, samples: int, before: Call = lambda: None) -> list[float]:
    """Microseconds until the call returns, on an idle device. Results are freed outside the timed region."""
    taken = []
    for _ in range(samples + 3):
        team.ready()
        before()
        start = time.perf_counter_ns()
        kept = call()
        taken.append((time.perf_counter_ns() - start) / 1000)
        del kept
    return taken[3:]


def in_a_row(team: Team, call: Call, calls: int = 50) -> float:
    """Microseconds a call where the host does nothing else; the device's time where that is longer."""
    team.ready()
    for _ in range(calls // 5):
        call()
    start = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - start) / 1000 / calls


def on_device(team: Team, call: Call, calls: int = 20) -> float:
    """Microseconds a call on the device, which begins when the host has sent all calls."""
    team.ready()
    with patch("benchmarks.harness.timing.HEAD_START", 60_000_000):
        return by_events(Timed(call), calls) * 1000


def split(team: Team, program: Any, call: Call, first: str, samples: int) -> dict[str, float]:
    """The median of each stage."""
    marks, found = Marks(), []
    with marked(marks, program):

        def noted() -> Any:
            results = call()
            marks.begin("")
            found.append(marks.taken())
            return results

        idle(team, noted, samples, lambda: marks.begin(first))
    used = [stage for stage in STAGES if any(stage in times for times in found)]
    return {stage: statistics.median(times[stage] for times in found[3:]) for stage in used}


def passes(platform: str, mesh: str | None, inputs: list[torch.Tensor]) -> tuple[dict[str, tuple[Call, str]], Any]:
    """The forward and the backward, with the stage that each begins in; and their program."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    attention = partial(ring_attn.ring_attention, causal=True, layout="zigzag", platform=platform, mesh=mesh)
    known = set(_PROGRAMS)
    out = attention(*leaves)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, leaves, dout, retain_graph=True)
    program = next(made.program for key, made in _PROGRAMS.items() if key not in known)
    return {
        "forward": (lambda: attention(*leaves), LOOKUP),
        "backward": (lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), ENGINE),
    }, program


def figures(team: Team, platform: str, options: argparse.Namespace, inputs: list[torch.Tensor]) -> dict[str, dict[str, float]]:
    calls, program = passes(platform, options.mesh, inputs)
    found = {}
    for name, (call, first) in calls.items():
        whole = statistics.median(idle(team, call, options.samples))
        found[name] = {
            "idle device": whole,
            "  slowest rank": team.slowest(whole),
            "in a row": in_a_row(team, call),
            **({"on the device": on_device(team, call)} if ON_GPU else {}),
            **{f"  {stage}": us for stage, us in split(team, program, call, first, options.samples).items()},
        }
    return found


def show(team: Team, platform: str, found: dict[str, dict[str, float]]) -> None:
    forward, backward = found["forward"], found["backward"]
    team.say(f"\n{platform + ', microseconds':40} {'forward':>9} {'backward':>9}")
    for name in dict.fromkeys((*forward, *backward)):
        cells = (f"{row[name]:9.1f}" if name in row else f"{'':9}" for row in (forward, backward))
        team.say(f"{name:40} {' '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", choices=["local"], help="each process alone; without it, a ring of all")
    parser.add_argument("--platforms", default=PLATFORMS, help="separated by commas; one that refuses the call is left out")
    parser.add_argument("--tokens", type=int, default=2048 if ON_GPU else 16, help="of each process")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--anew", action="store_true", help="each tensor's array is made anew, as where its memory is another's")
    parser.add_argument("--copied", action="store_true", help="results are copied, as where JAX cannot write them in place")
    options = parser.parse_args()
    team = Team()
    launch._OnGpu.in_place = not options.copied
    if options.anew:
        launch._MOST_USES = 1
    inputs = [torch.randn(1, options.tokens, count, DIM, device=team.device, dtype=DTYPE) for count in HEADS]
    team.say(f"{team.size} x {hardware()}; {software()}")
    team.say(f"{options.tokens} tokens a process, causal, zigzag, {DTYPE}, mesh={options.mesh}")
    lines = []
    for platform in options.platforms.split(","):
        try:
            found = figures(team, platform, options, inputs)
        except Exception as error:  # the other platforms are still to be seen; a refusal is the same on all ranks
            team.say(f"\n{platform}: left out ({reason(error)})")
            continue
        show(team, platform, found)
        lines.append(json.dumps({"platform": platform, "processes": team.size, **found}))
    team.say("\n" + "\n".join(lines))
    team.close()


if __name__ == "__main__":
    main()
