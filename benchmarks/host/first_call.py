"""What the first call of a job costs, in seconds, part by part. Run it twice: the second job finds what the first has kept.

    for job in 1 2; do RING_ATTN_CACHE=/tmp/first python -m benchmarks.host.first_call; done
    for job in 1 2; do RING_ATTN_CACHE=/tmp/first torchrun --standalone --nproc-per-node 4 -m benchmarks.host.first_call; done

The indented parts of a call are JAX's own: what it takes to trace the Python, to lower it (Triton's and CuTe's kernels are compiled
there), and to compile the program or to read it from disk. --profile lists the functions in which the first forward's time goes,
which it makes longer. The figures are rank 0's; the last line is the same as JSON.
"""

import argparse
import cProfile
import json
import os
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

PARTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled, or read",
    "/jax/compilation_cache/cache_retrieval_time_sec": "of that read from disk",
}


class Clock:
    """Seconds of each step, and within it of the parts that JAX tells."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.events: defaultdict[str, int] = defaultdict(int)
        self.step = ""

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        self.step, start = step, time.perf_counter()
        yield
        self.seconds[step] = time.perf_counter() - start

    def listen(self) -> None:
        import jax

        jax.monitoring.register_event_duration_secs_listener(self._duration)
        jax.monitoring.register_event_listener(self._event)

    def _duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in PARTS:
            self.seconds[f"{self.step}: {PARTS[event]}"] += duration_secs

    def _event(self, event: str, **_: str | int) -> None:
        for word in ("cache_hits", "cache_misses"):
            self.events[word] += event.endswith(word)


def first_calls(clock: Clock, options: argparse.Namespace) -> int:
    """Makes the calls; returns this process's rank."""
    with clock.timed("import torch"):
        import torch
        import torch.distributed as dist
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    with clock.timed("torch's device and process group"):
        if on_gpu:
            torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        if "WORLD_SIZE" in os.environ:
            dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    with clock.timed("import ring_attn"):
        import ring_attn
    with clock.timed("import jax"):
        import jax
    clock.listen()
    with clock.timed("start (JAX beside torch)"):
        ring_attn.start()
    with clock.timed("JAX's device"):
        jax.local_devices()
    call = calls(options, device)
    wait: Callable[[], Any] = torch.cuda.synchronize if on_gpu else tuple
    profile = cProfile.Profile()
    for name in ("first", "second"):
        with clock.timed(f"{name} forward"), profile if options.profile and name == "first" else nullcontext():
            out, leaves = call()
            wait()
        with clock.timed(f"{name} backward"):
            torch.autograd.grad(out.sum(), leaves)
            wait()
    rank = dist.get_rank() if dist.is_initialized() else 0
    if options.profile and rank == 0:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(60).sort_stats("tottime").print_stats(25)
    return rank


def calls(options: argparse.Namespace, device: Any) -> Callable[[], Any]:
    import torch

    from ring_attn import ring_attention

    heads, dim, dtype = ((32, 8, 8), 128, torch.bfloat16) if device.type == "cuda" else ((4, 2, 2), 16, torch.float32)
    leaves = [torch.randn(1, options.tokens, count, dim, device=device, dtype=dtype).requires_grad_() for count in heads]
    return lambda: (ring_attention(*leaves, causal=True, layout="zigzag", platform=options.platform), leaves)


def show(clock: Clock, options: argparse.Namespace) -> None:
    import jax

    from benchmarks.harness.team import hardware, software

    settings: Any = jax.config
    print(f"{hardware()}; {software()}")
    print(f"platform={options.platform}, {options.tokens} tokens a process, kept in {settings.jax_compilation_cache_dir}")
    for step in (name for name in clock.seconds if ": " not in name):
        print(f"{step:40} {clock.seconds[step]:8.2f}")
        for part in PARTS.values():
            if f"{step}: {part}" in clock.seconds:
                print(f"  {part:38} {clock.seconds[f'{step}: {part}']:8.2f}")
    total = sum(seconds for name, seconds in clock.seconds.items() if name in ("first forward", "start (JAX beside torch)"))
    print(f"{'first call of the job: start, forward':40} {total:8.2f}")
    print(f"programs found on disk: {clock.events['cache_hits']}, compiled and kept: {clock.events['cache_misses']}")
    print(json.dumps({"platform": options.platform, "seconds": clock.seconds, **clock.events}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--tokens", type=int, default=2048, help="of each process")
    parser.add_argument("--profile", action="store_true", help="the first forward's functions by their time")
    options = parser.parse_args()
    clock = Clock()
    if first_calls(clock, options) == 0:
        show(clock, options)


if __name__ == "__main__":
    main()
