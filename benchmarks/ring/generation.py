"""Generation from a long prompt: how long the prompt takes, and each token after it, on rings of 1, 2, 4, ... GPUs, beside torch's
SDPA on one GPU.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.ring.generation [--sizes 262144 1048576] [--output FOLDER]

The model is the attention part of a Llama: a few layers of norm, projections, rotary embedding and attention with 32:8 heads of
128, bfloat16, random weights; with `--mlp` and `--vocabulary` all of it. Its keys and values are random, and the same for every
system, so that long prompts need no run of the model; `--prefill` says for which sizes it is run all the same. One new token of
each entry at a time. In milliseconds, for the slowest rank:

prefill     the model on the whole prompt, which fills the cache
token       the model on one new token; without `--vocabulary` the logits are left out
step        the same as `generate` runs it (`DecodingStep`), captured; and "step, host", until it returns
attention   one layer's attention of it, with the token's key and value stored, in a row of calls
host        until such a call returns, on an idle device
error       of the attention's output: its root mean square difference from attention in float32, over its size

"..., graph": the same calls, captured once in a CUDA graph. "floor of 2": what a ring's attention of a token can hardly be faster
than, torch's flash attention of a rank's keys with a group's heads as queries, one all-gather, joined in torch; it keeps no token.

Rings of fewer than all GPUs run side by side, so that all GPUs work. On a CPU: --sizes 512 --heads 4 2 16 --layers 1. The shapes of
Llama-3.1-8B: --layers 32 --mlp 14336 --vocabulary 128256 --systems "ring of 2" sdpa.
"""

import argparse
import faulthandler
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.report import Report, default_folder, short
from benchmarks.harness.team import GIB, ON_GPU, Team, tidy
from benchmarks.harness.timing import Timed, reason, take_turns
from benchmarks.ring.caches import SDPA, Floor, Ours, Sdpa, System
from benchmarks.ring.llama import Stack
from ring_attn import Ring
from ring_attn.generation.step import DecodingStep
from torch_bridge.start import runtime

PHASES = ("token", "attention")


class Run:
    """The processes, the model, and what was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        faulthandler.dump_traceback_later(options.hard_end, exit=True)
        self.start, self.options, self.team = time.monotonic(), options, Team()
        self.report = Report(options.output if self.team.rank == 0 else None, f"Generation on {self.team.size} GPUs")
        torch.manual_seed(0)
        with self.team.device:
            stack = Stack(options.layers, tuple(options.heads), options.mlp, options.vocabulary)
            self.stack = stack.to(torch.bfloat16).requires_grad_(False)
        self.groups = {size: self.team.group(size) for size in options.rings or self._sizes()}

    def _sizes(self) -> list[int]:
        return [2**power for power in range(self.team.size.bit_length()) if self.team.size % 2**power == 0]

    def random(self, seed: int, *shape: int) -> Tensor:
        generator = torch.Generator(self.team.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.team.device, dtype=torch.bfloat16)

    def may_begin(self, what: str) -> bool:
        begin = self.team.agreed(time.monotonic() - self.start < self.options.budget)
        self.report.say(f"[{time.monotonic() - self.start:5.1f} s] {what}{'' if begin else ': left out for lack of time'}")
        return begin

    def guarded(self, case: str, name: str, phase: str, call: Callable[[], Any]) -> Any:
        """What ``call`` returns; None on all ranks, and the reason in the report, if it fails on one."""
        found, problem = None, None
        try:
            found = call()
        except Exception as error:
            problem = reason(error)
        if self.team.agreed(problem is None):
            return found
        self.report.add(case=case, system=name, phase=phase, failed=problem or "it failed on another rank")
        return None

    def systems(self, tokens: int) -> Iterator[tuple[str, System]]:
        for size, group in self.groups.items():
            if self.wanted(f"ring of {size}"):
                yield f"ring of {size}", Ours(Ring(group, layout="zigzag"), self.options.entries, tokens)
            if ON_GPU and size > 1 and self.wanted(f"floor of {size}"):
                yield f"floor of {size}", Floor(Ring(group, layout="zigzag"), tokens)
        for name, backend in SDPA.items():
            if (ON_GPU or backend is None) and self.wanted(name):
                yield name, Sdpa(backend, tokens)

    def wanted(self, name: str) -> bool:
        return self.options.systems is None or name in self.options.systems


def measure(run: Run, tokens: int) -> None:
    case, ready = f"{short(tokens)} tokens", {}
    heads, kv_heads, dim = run.options.heads
    entries = run.options.entries
    new = [run.random(99 + number, entries, 1, count, dim) for number, count in enumerate((heads, kv_heads, kv_heads))]
    truth = run.guarded(case, "in float32", "error", partial(exact, run, tokens, new))  # while there is room for it
    if truth is None:
        return
    for name, system in run.systems(tokens):
        if run.guarded(case, name, "fill", partial(filled, run, system, tokens)):
            ready[name] = system
        del system
    for name, system in list(ready.items()):
        out = run.guarded(case, name, "error", partial(attended, run, system, new))
        if out is None or run.guarded(case, name, "token", partial(token, run, system)) is None:
            del ready[name]
            continue
        apart = float((out.float() - truth).square().mean().sqrt() / truth.square().mean().sqrt())
        run.report.add(case=case, system=name, phase="error", error=run.team.slowest(apart), GiB=system.nbytes / GIB)
    x, place = run.random(7, entries, 1, heads * dim), torch.full((entries, 1), tokens, device=run.team.device)
    calls = {
        "token": lambda system: partial(run.stack, x, place, system.attend),
        "attention": lambda system: partial(system.attend, 0, *new),
    }
    for phase in PHASES:
        timed = {name: Timed(calls[phase](system)) for name, system in ready.items()}
        for name, system in ready.items() if ON_GPU else ():
            replay = run.guarded(case, f"{name}, graph", phase, partial(captured, calls[phase](system)))
            timed |= {} if replay is None else {f"{name}, graph": Timed(replay)}
        times, failed = take_turns(run.team, timed, run.options.rounds, 40.0)
        for name, taken in times.items():
            run.report.add(case=case, system=name, phase=phase, **taken.figures() | {"ms": run.team.slowest(taken.median)})
        for name, error in failed.items():
            run.report.add(case=case, system=name, phase=phase, failed=reason(error))
    for name, system in ready.items():
        ms = run.guarded(case, name, "host", partial(on_the_host, run, partial(system.attend, 0, *new)))
        if ms is not None:
            run.report.add(case=case, system=name, phase="host", ms=run.team.slowest(ms))
    for name, system in ready.items():
        if isinstance(system, Ours):
            run.guarded(case, name, "step", partial(steps, run, case, name, system, x))


def steps(run: Run, case: str, name: str, system: Ours, x: Tensor) -> None:
    """A token by the library's own step, and the host's part of it."""
    system.cache.set_counts(dict.fromkeys(system.cache.counts(), 0))  # all layers in step again
    step = DecodingStep(lambda _, places, cache: run.stack(x, places, system.attend), system.cache)
    tokens = torch.zeros(len(x), dtype=torch.int64, device=x.device)

    def call() -> Any:
        system.again()
        return step(tokens)

    try:
        call(), call()
        times, failed = take_turns(run.team, {name: Timed(call)}, run.options.rounds, 40.0)
        for error in failed.values():
            raise error
        run.report.add(case=case, system=name, phase="step", ms=run.team.slowest(times[name].median))
        run.report.add(case=case, system=name, phase="step, host", ms=run.team.slowest(on_the_host(run, call)))
    finally:
        step.close()


def attended(run: Run, system: System, new: list[Tensor]) -> Tensor:
    """The first layer's; all layers then have as many tokens."""
    first, *_ = [system.attend(layer, *new) for layer in range(run.options.layers)]
    return first


def token(run: Run, system: System) -> Tensor:
    heads, _, dim = run.options.heads
    return run.stack(run.random(7, run.options.entries, 1, heads * dim), system.position(), system.attend)


def captured(call: Callable[[], Tensor]) -> Callable[[], Any]:
    """The call's work on the device, in a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    graph.replay()
    return graph.replay


def filled(run: Run, system: System, tokens: int) -> bool:
    _, kv_heads, dim = run.options.heads
    for layer in range(run.options.layers):
        system.fill(layer, *(run.random(2 * layer + side, run.options.entries, tokens, kv_heads, dim) for side in (0, 1)))
    return True


def exact(run: Run, tokens: int, new: list[Tensor]) -> Tensor:
    """The attention of the first layer to the prompt and itself, in float32."""
    _, kv_heads, dim = run.options.heads
    q, k, v = (x.float() for x in new)
    kept = (run.random(side, run.options.entries, tokens, kv_heads, dim) for side in (0, 1))
    k, v = (torch.cat([x, one], 1).float() for x, one in zip(kept, (k, v), strict=True))
    scores = torch.einsum("bqhgd,bkhd->bhgqk", q.unflatten(2, (kv_heads, -1)), k) / dim**0.5
    return torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(-1), v).flatten(2, 3)


def on_the_host(run: Run, call: Callable[[], Tensor], calls: int = 20) -> float:
    taken = []
    for _ in range(calls):
        run.team.ready()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[calls // 2] * 1000


def measure_prefill(run: Run, tokens: int) -> None:
    """Twice each: the first compiles."""
    case, (heads, _, dim) = f"{short(tokens)} tokens", run.options.heads
    x = run.random(5, run.options.entries, tokens, heads * dim)
    for name, system in run.systems(tokens):
        times = []
        for _ in range(2):
            run.team.ready()
            began = time.perf_counter()
            if run.guarded(case, name, "prefill", partial(prefilled, run, system, x)) is None:
                break
            times.append((time.perf_counter() - began) * 1000)
        if len(times) == 2:
            run.report.add(case=case, system=name, phase="prefill", ms=run.team.slowest(times[1]))
        tidy()


def prefilled(run: Run, system: System, x: Tensor) -> System:
    new = system.prefill(run.stack, x)
    if ON_GPU:
        torch.cuda.synchronize(run.team.device)
    return new


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", type=int, default=[2**18, 2**20], help="tokens before the measured ones")
    parser.add_argument("--prefill", nargs="*", type=int, default=[2**18], help="prompts that the model is run on")
    parser.add_argument("--rings", nargs="*", type=int, help="sizes; by default all that divide the number of GPUs")
    parser.add_argument("--heads", nargs=3, type=int, default=[32, 8, 128], metavar=("QUERY", "KV", "DIM"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--entries", type=int, default=1)
    parser.add_argument("--mlp", type=int, default=0, help="the width within MLPs; 0: none")
    parser.add_argument("--vocabulary", type=int, default=0, help="0: no logits")
    parser.add_argument("--systems", nargs="*", help="by name; all by default")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which nothing more is begun")
    parser.add_argument("--hard-end", type=float, default=480.0, help="seconds after which the job stops whatever it does")
    parser.add_argument("--output", type=Path, default=default_folder("generate"))
    return parser.parse_args(given)


@torch.no_grad()
def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    run = Run(options)
    runtime.start(device=run.team.device)  # on all ranks at once, whichever part comes first
    for part, sizes in ((measure, run.options.sizes), (measure_prefill, run.options.prefill)):
        for tokens in sizes:
            if run.may_begin(f"{part.__name__} of {short(tokens)} tokens"):
                part(run, tokens)
                tidy()
    run.team.ready()
    run.report.note("seconds", round(time.monotonic() - run.start, 1))
    run.report.finish()
    run.team.close()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
