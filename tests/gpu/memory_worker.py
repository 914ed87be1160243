"""Whose memory it is while the device is far behind the host: on a ring of all processes of torchrun, one GPU each.

    torchrun --standalone --nproc-per-node 2 tests/gpu/memory_worker.py CHECK

Freed blocks are taken again and overwritten at once; every result must have the bits of a host that waits after each call.
"""

import gc
import os
import random
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import ring_attn
from torch_bridge.backends import launch
from torch_bridge.call import call_cache, programs
from torch_bridge.call.host_copy import HostCopy
from torch_bridge.start.jax_memory import trim_jax_memory

MIB = 2**20
BEHIND = 40_000_000  # clock cycles: about 20 ms
Tensors = list[torch.Tensor]
Attention = Callable[..., torch.Tensor]


class Case:
    """A call with values of its own, and the bits of its results."""

    def __init__(self, rank: int, heads_first: bool = False, dtype: torch.dtype = torch.bfloat16, **options: object) -> None:
        generator = torch.Generator("cuda").manual_seed(7 + rank)
        normal = partial(torch.randn, generator=generator, device="cuda", dtype=dtype)
        shapes = [(1, heads, 2048, 64) if heads_first else (1, 2048, heads, 64) for heads in (4, 2, 2)]
        self.values, self.dout = [normal(shape) for shape in shapes], normal(shapes[0])
        self.options = dict(options, qkv_format="bhsd") if heads_first else options
        self.quiet: Tensors = []

    def given(self) -> Tensors:
        return [x.clone().requires_grad_() for x in self.values]

    def attention(self, *qkv: torch.Tensor) -> torch.Tensor:
        return ring_attn.ring_attention(*qkv, deterministic=True, **self.options)  # type: ignore[arg-type,return-value]

    def results(self, given: Tensors, run: Attention | None = None) -> Tensors:
        """The output and the gradients of two layers, the second one's queries being the first one's output."""
        run = run or self.attention
        out = run(run(*given), *given[1:])
        return [out.detach(), *torch.autograd.grad(out, given, self.dout.clone())]

    def wait_for_the_bits(self) -> None:
        for _ in range(2):
            self.quiet = self.results(self.given())
            torch.cuda.synchronize()


class Wrong:
    """Counts, on the device, the results that have other bits than they should: of each case, the output's and the gradients'."""

    def __init__(self, made: list[Case]) -> None:
        self.counts = {id(case): torch.zeros(4, dtype=torch.int64, device="cuda") for case in made}

    def compare(self, case: Case, found: Tensors) -> None:
        for number, (got, want) in enumerate(zip(found, case.quiet, strict=True)):
            self.counts[id(case)][number] += (_bits(got) != _bits(want)).any()

    def check(self) -> None:
        counts = [count.tolist() for count in self.counts.values()]
        assert not any(map(any, counts)), f"so many results are wrong, of each case out, dq, dk, dv: {counts}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def poison(like: Tensors) -> None:
    """The caching allocator gives out what was freed last: the memory of the tensors just dropped."""
    taken = [torch.full_like(x, torch.nan) for x in like * 2]
    del taken


def cases(rank: int) -> list[Case]:
    ids = (torch.arange(2048, device="cuda") // 700)[None]  # int64: narrowed for the call
    made = [
        Case(rank, causal=True, layout="zigzag"),
        Case(rank, heads_first=True, causal=True),  # its operands are copied for JAX
        Case(rank, dtype=torch.float32, dropout_p=0.2, dropout_seed=11, q_segment_ids=ids),
    ]
    for case in made:
        case.wait_for_the_bits()
    return made


def storm(rank: int, iterations: int, run: Attention | None = None) -> None:
    """Inputs are dropped as soon as they are passed, intermediate results by autograd in the middle of a backward."""
    made, chance = cases(rank), random.Random(rank)
    wrong = Wrong(made)
    for number in range(iterations):
        case = made[number % len(made)]
        if number % 10 == 0:
            torch.cuda._sleep(BEHIND)
        found = case.results(case.given(), run and partial(run, case))
        poison([*case.values, *found])
        wrong.compare(case, found)
        if chance.random() < 0.02:
            gc.collect()
        if chance.random() < 0.02:
            torch.cuda.empty_cache()
    wrong.check()


def on_two_streams(rank: int) -> None:
    """Operands of another stream than the current one, by torch's own rule: record_stream."""
    made = cases(rank)
    wrong = Wrong(made)
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    for number in range(600):
        case = made[number % len(made)]
        if number % 10 == 0:
            torch.cuda._sleep(BEHIND)
        with torch.cuda.stream(other):
            given = case.given()
        current.wait_stream(other)
        found = case.results(given)
        for x in given:
            x.record_stream(current)
        del given, x
        with torch.cuda.stream(other):
            poison(case.values)
        wrong.compare(case, found)
    wrong.check()


def in_checkpoints(rank: int) -> None:
    def run(case: Case, *qkv: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda *x: case.attention(*(y * 1.0 for y in x)), *qkv, use_reentrant=False)  # type: ignore[no-any-return]

    storm(rank, 300, run)


def offloaded(rank: int) -> None:
    def run(case: Case, *qkv: torch.Tensor) -> torch.Tensor:
        with save_on_cpu(pin_memory=True):
            return case.attention(*qkv)

    storm(rank, 150, run)


def moved(rank: int) -> None:
    """What goes to the host leaves no more of itself behind than a few copies, however far ahead the host is; and comes back."""
    count, layers, before = 2**24, 12, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda._sleep(4 * 10**8)  # 0.2 s, in which the host does all of this
    copies = [HostCopy(torch.full((count,), number, device="cuda", dtype=torch.float32)) for number in range(layers)]
    copies[0].fetch()  # and is never used
    copies[0] = copies[1]
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for number in range(layers - 1, 0, -1):
        found = copies.pop().on_device()
        copies[-1].fetch()
        wrong += (found != number).sum()
        del found
    assert int(wrong) == 0, f"rank {rank}: {int(wrong)} values"
    most = torch.cuda.max_memory_allocated() - before
    assert most <= 6 * 4 * count, f"rank {rank}: {most / (4 * count)} of {layers} at once"


def compiled(rank: int) -> None:
    run = torch.compile(lambda case, *qkv: case.attention(*(x * 1.0 for x in qkv)))
    storm(rank, 150, run)


def copied(rank: int) -> None:
    """JAX writes its results into its own memory, as it does where it cannot use torch's."""
    way, kept = launch._OnGpu, launch._OnGpu.in_place
    try:
        for in_place in (False, kept):
            way.in_place = in_place
            call_cache.clear()  # a program that has been made takes its results' memory, or does not
            programs._PROGRAMS.clear()
            storm(rank, 3 if in_place else 300)
    finally:
        way.in_place = kept


def in_threads(rank: int) -> None:
    """Ranks must make their calls in one order, so each thread is a ring of one."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                storm(rank, 200, lambda case, *qkv: ring_attn.ring_attention(*qkv, **case.options, deterministic=True))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def synchronized(rank: int) -> None:
    """Another thread waits for the device again and again, which no capture of a stream would survive."""
    done, device = threading.Event(), torch.cuda.current_device()

    def wait() -> None:
        torch.cuda.set_device(device)
        while not done.wait(1e-4):
            torch.cuda.synchronize()

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        storm(rank, 300)
    finally:
        done.set()
        waiting.join()


@contextmanager
def pool(allocator: object = None) -> Iterator[None]:
    private = torch.cuda.MemPool(*([] if allocator is None else [allocator]))
    with torch.cuda.use_mem_pool(private):
        yield


PLUGGABLE = """
#include <cuda_runtime_api.h>
#include <sys/types.h>
extern "C" void* take(ssize_t size, int device, cudaStream_t stream) {
    void* pointer = nullptr;
    cudaMallocAsync(&pointer, size, stream);
    return pointer;
}
extern "C" void give(void* pointer, ssize_t size, int device, cudaStream_t stream) { cudaFreeAsync(pointer, stream); }
"""


def in_a_pool(rank: int) -> None:
    """The storm in a private pool, and in one of a pluggable allocator."""
    with pool():
        storm(rank, 300)
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "pluggable.cpp"), Path(folder, "pluggable.so")
        source.write_text(PLUGGABLE)
        subprocess.run(["nvcc", "-shared", "-Xcompiler", "-fPIC", "-o", str(library), str(source)], check=True)
        own = torch.cuda.memory.CUDAPluggableAllocator(str(library), "take", "give")
        with pool(own.allocator()):
            storm(rank, 300)


def after_a_failure(rank: int) -> None:
    """One rank's call is invalid while others are under way: it raises on all, and nothing of it is held."""
    made = cases(rank)
    wrong = Wrong(made)
    for number in range(40):
        case = made[number % len(made)]
        torch.cuda._sleep(BEHIND)
        before = case.results(case.given())
        try:
            given = [x.clone() for x in case.values]
            window = (-5, -5) if rank == dist.get_world_size() - 1 else (number, 0)  # a new program: the ranks compare it
            ring_attn.ring_attention(*given, deterministic=True, **case.options, sliding_window=window)  # type: ignore[arg-type]
            failed = False
        except ValueError:
            failed = True
        del given
        assert failed
        poison(case.values)
        wrong.compare(case, before)
        wrong.compare(case, case.results(case.given()))
    wrong.check()


def held(rank: int) -> None:
    """At the host's return checkpointed calls hold their outputs, and no more than one call's operands besides."""
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v = (normal(1, 8192, heads, 128).requires_grad_() for heads in (32, 8, 8))
    attention = partial(ring_attn.ring_attention, causal=True, layout="zigzag")

    def calls(count: int) -> Tensors:
        kept = [q]
        for _ in range(count):
            kept.append(checkpoint(lambda x: attention(x * 1.0, k * 1.0, v * 1.0), kept[-1], use_reentrant=False))
        return kept[1:]

    torch.autograd.grad(calls(2)[-1].sum(), (q, k, v))  # compiles
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda._sleep(20 * BEHIND)
    outputs = calls(8)
    forward = torch.cuda.memory_allocated() - before
    outputs_only, operands = 8 * q.nbytes, q.nbytes + k.nbytes + v.nbytes
    event = torch.cuda.Event()
    event.record()
    assert not event.query(), "the device was not behind"
    print(f"rank {rank}: {forward / MIB:.0f} MiB at the host's return, outputs {outputs_only / MIB:.0f}", flush=True)
    assert forward <= outputs_only + operands
    torch.cuda._sleep(20 * BEHIND)
    torch.cuda.reset_peak_memory_stats()
    gradients = torch.autograd.grad(outputs.pop().sum(), (q, k, v))
    del outputs
    after = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    print(f"rank {rank}: backward {after / MIB:.0f} MiB at the host's return, peak {peak / MIB:.0f}", flush=True)
    assert after <= sum(x.nbytes for x in gradients) + operands
    import jax

    torch.cuda.synchronize()
    views = launch.launcher(q.device)._views._arrays.values()  # which own nothing
    assert {id(x) for x in jax.live_arrays()} <= {id(x) for x in views}, jax.live_arrays()


def out_of_memory(rank: int) -> None:
    """torch finds no room for a call's results while JAX keeps memory it does not use; and the other way round."""
    import jax.numpy as jnp

    attention = partial(ring_attn.ring_attention, causal=True, layout="zigzag")
    q, k, v = (torch.randn(1, 16384, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8))
    wanted = attention(q, k, v)
    large = jnp.zeros(4 * 1024 * MIB, jnp.uint8)
    large.block_until_ready()
    del large
    torch.cuda.empty_cache()
    rest: Tensors = []
    while (free := torch.cuda.mem_get_info()[0]) > 32 * MIB:  # torch takes at least 20 for less than 10
        rest.append(torch.empty(free // 2, dtype=torch.uint8, device="cuda"))
    reserved = torch.cuda.memory_reserved()
    found = attention(q, k, v)
    assert torch.equal(found, wanted)
    grown = torch.cuda.memory_reserved() - reserved
    print(f"rank {rank}: torch's results found {grown / MIB:.0f} MiB that JAX had kept", flush=True)
    assert grown > 0, "there was room"
    trim_jax_memory(q.device)
    while (free := torch.cuda.mem_get_info()[0]) > 32 * MIB:
        rest.append(torch.empty(free // 2, dtype=torch.uint8, device="cuda"))
    reserved = torch.cuda.memory_reserved()
    del rest, found  # all is in torch's cache now
    assert torch.equal(attention(q, k, v), wanted)
    assert torch.cuda.memory_reserved() < reserved, "JAX had room"


CHECKS = {
    "held": held,
    "storm": lambda rank: storm(rank, 3000),
    "two streams": on_two_streams,
    "checkpoints": in_checkpoints,
    "offloaded": offloaded,
    "moved": moved,
    "compiled": compiled,
    "copied": copied,
    "threads": in_threads,
    "synchronized": synchronized,
    "pools": in_a_pool,
    "failure": after_a_failure,
    "out of memory": out_of_memory,
}


def left_out(ranks: int, gpus: int) -> dict[str, str]:
    """The checks that do not suit so many ranks, and why."""
    if ranks == 1:
        return {"failure": "a ring of one has no other rank that could fail"}
    shared = {"out of memory": "each rank would fill the other's GPU"} if ranks > gpus else {}
    return {"threads": "the threads of two ranks would make their calls in two orders", **shared}


def main(names: list[str]) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    rank = dist.get_rank()
    unfit = left_out(dist.get_world_size(), torch.cuda.device_count())
    failed = 0
    for name in names or [name for name in CHECKS if name not in unfit]:
        try:
            CHECKS[name](rank)
            torch.cuda.synchronize()
            print(f"rank {rank}: {name}: ok", flush=True)
        except Exception:
            failed = 1
            traceback.print_exc()
            print(f"rank {rank}: {name}: FAILED", flush=True)
    case = Case(rank, causal=True)
    case.results(case.given())
    dist.barrier()
    print("the end: the device is behind, and the interpreter does not wait for it", flush=True)
    torch.cuda._sleep(5 * BEHIND)
    case.results(case.given())
    sys.exit(failed)


if __name__ == "__main__":
    main(sys.argv[1:])
