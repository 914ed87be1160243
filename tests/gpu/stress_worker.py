"""Stress test of memory safety between torch's and JAX's allocators and between streams. Reports any result that is not
bit-identical to that of an undisturbed run.

    python tests/gpu/stress_worker.py
    torchrun --standalone --nproc-per-node 8 tests/gpu/stress_worker.py [--iterations 1000] [--results copied]

Calls follow one another on three torch streams in turn, without the host waiting. Inputs are freed as soon as they are passed, and
their memory is filled with NaN at once, while JAX may still be reading it; outputs are dropped at once, or read late on a separate
stream; meanwhile JAX fills its own memory; now and then the caches are emptied and Python's garbage collector runs. Every result
is compared on the device. The ranks of a ring make the same calls, each at its own pace.

`--results in_place` is what the library does, `copied` what it does if JAX wrote results into its own memory all the
same. `shared` gives torch that memory without a copy: nothing then keeps JAX from reusing it, and the run should detect that.
On a CPU, where there are no streams, the remaining parts run at a small size.
"""

import argparse
import gc
import random
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import ring_attn
from benchmarks.harness.team import ON_GPU, Team, hardware, software
from torch_bridge.backends import launch
from torch_bridge.backends.dlpack import DEFAULT_STREAM

PASSES = ("forward", "both", "dropped")  # "dropped": a forward whose results are discarded
LATE = 3_000_000  # maximum delay of a reader or a rank in clock cycles: about 2 ms


@dataclass(frozen=True)
class Case:
    """A call and its input values. `given` makes new tensors from them for one call."""

    options: dict[str, Any]
    numbers: dict[str, torch.Tensor]
    dout: torch.Tensor

    def given(self) -> dict[str, torch.Tensor]:
        made = {name: x.clone() for name, x in self.numbers.items()}
        return {name: x.requires_grad_() if x.is_floating_point() else x for name, x in made.items()}


def make_cases(tokens: int, device: torch.device) -> list[Case]:
    """Cases that cover the temporaries a call may make of its tensors: other memory layouts, narrower ids, a seed."""

    def normal(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(device, dtype)

    def qkv(seed: int, dtype: torch.dtype, heads_first: bool = False) -> dict[str, torch.Tensor]:
        shapes = [(1, heads, tokens, 64) if heads_first else (1, tokens, heads, 64) for heads in (8, 2, 2)]
        return {name: normal(seed + i, *shape, dtype=dtype) for i, (name, shape) in enumerate(zip("qkv", shapes, strict=True))}

    ids = (torch.arange(tokens, device=device) // (tokens // 4))[None]
    cases: list[tuple[dict, dict]] = [
        (dict(causal=True, layout="zigzag"), qkv(0, torch.bfloat16)),
        (dict(causal=True, qkv_format="bhsd"), qkv(10, torch.bfloat16, heads_first=True)),
        (dict(dropout_p=0.2, dropout_seed=11), qkv(20, torch.float32) | {"q_segment_ids": ids}),
    ]
    return [Case(options, numbers, normal(99, *numbers["q"].shape, dtype=numbers["q"].dtype)) for options, numbers in cases]


def results(case: Case, which: str, platform: str) -> list[torch.Tensor]:
    """The results of one call; its inputs are freed on return."""
    given: dict[str, Any] = case.given()
    out, lse = ring_attn.ring_attention(**given, **case.options, platform=platform, deterministic=True, return_lse=True)
    if which != "both":
        return [out.detach(), lse.detach()]
    leaves = [x for x in given.values() if x.requires_grad]
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, case.dout.clone())]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


class Stress:
    def __init__(self, options: argparse.Namespace, team: Team):
        self.rank, self.device, self.platform = team.rank, team.device, options.platform
        self.cases = make_cases(options.tokens, team.device)
        self.quiet = [results(case, "both", self.platform) for case in self.cases]
        self.streams = [torch.cuda.Stream() for _ in range(3)] if ON_GPU else [None]
        self.reader = torch.cuda.Stream() if ON_GPU else None
        self.wrong = [torch.zeros((), dtype=torch.int64, device=team.device) for _ in range(len(self.streams) + 1)]
        if ON_GPU:
            torch.cuda.synchronize()

    def run(self, iterations: int) -> int:
        shared, local = random.Random(0), random.Random(self.rank)  # for what ranks must agree on, and for the rest
        for number in range(iterations):
            case, which = shared.randrange(len(self.cases)), PASSES[number % len(PASSES)]
            self.one(number % len(self.streams), case, which, local)
            if number % 40 == 39:
                gc.collect()
            if ON_GPU and number % 100 == 99:
                torch.cuda.empty_cache()
        return int(sum(wrong.cpu() for wrong in self.wrong))

    def one(self, turn: int, case: int, which: str, local: random.Random) -> None:
        stream = self.streams[turn]
        with torch.cuda.stream(stream) if stream else nullcontext():
            if ON_GPU and local.random() < 0.3:
                torch.cuda._sleep(local.randrange(LATE))
            found = results(self.cases[case], which, self.platform)
            self.fill_what_is_free(case)
            if which == "dropped":
                return
            if self.reader and local.random() < 0.5:
                self.read_late(found, case, local)
            else:
                self.compare(found, case, self.wrong[turn])
        if local.random() < 0.3:
            self.fill_in_jax()

    def fill_what_is_free(self, case: int) -> None:
        """The caching allocator first reuses what was freed last: the memory of the call's tensors."""
        shapes = [x.shape for x in self.cases[case].numbers.values()] * 2
        for dtype in (torch.bfloat16, torch.float32):
            filled = [torch.full(shape, torch.nan, dtype=dtype, device=self.device) for shape in shapes]
            del filled

    def fill_in_jax(self) -> None:
        """A user's JAX program, whose result takes the free memory of JAX's allocator."""
        import jax.numpy as jnp

        largest = max(x.numel() for x in self.cases[0].numbers.values())
        for _ in range(3):
            jnp.full(largest, jnp.nan, jnp.bfloat16)

    def read_late(self, found: list[torch.Tensor], case: int, local: random.Random) -> None:
        """Follows torch's rules: the other stream waits for this one, and `record_stream` informs the allocator."""
        assert self.reader
        self.reader.wait_stream(torch.cuda.current_stream())
        for tensor in found:
            tensor.record_stream(self.reader)
        with torch.cuda.stream(self.reader):
            torch.cuda._sleep(local.randrange(LATE))
            self.compare(found, case, self.wrong[-1])

    def compare(self, found: list[torch.Tensor], case: int, wrong: torch.Tensor) -> None:
        for got, want in zip(found, self.quiet[case], strict=False):
            wrong += (bits(got) != bits(want)).any()


def choose_memory(results: str) -> None:
    def shared(self, arrays, homes, stream):
        event = torch.cuda.Event()
        event.record(stream)
        return launch.Outcome([self.convert.to_tensor(x, stream.cuda_stream or DEFAULT_STREAM) for x in arrays], event)

    launch._OnGpu.in_place = results == "in_place"
    if results == "shared":
        launch._OnGpu._settle = shared  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000 if ON_GPU else 100)
    parser.add_argument("--tokens", type=int, default=2048 if ON_GPU else 64, help="of each process")
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--results", choices=("in_place", "copied", "shared"), default="in_place")
    options = parser.parse_args()
    team = Team()
    choose_memory(options.results)
    begin = time.monotonic()
    stress = Stress(options, team)
    prepared = time.monotonic()
    wrong = team.total(stress.run(options.iterations))
    team.say(f"{team.size} x {hardware()}; {software()}")
    team.say(f"quiet run {prepared - begin:.0f} s, stress {time.monotonic() - prepared:.0f} s")
    work = f"{options.iterations} iterations on {team.size} process(es), results {options.results}"
    team.say(f"{work}: {wrong} differ from the quiet run")
    team.close()
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
