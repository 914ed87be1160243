"""Under torchrun: whether the ranks agree, which strategies and kernels can run on a ring of them and are right, and how fast one
hop of it is."""

import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn.doctor.finding import Finding
from ring_attn.doctor.kernels import dense, error, figures, inputs, oracle, results, verdict
from ring_attn.doctor.versions import installed

if TYPE_CHECKING:
    from ring_attn.ring import Ring

LIMIT = 300.0  # seconds
HOP = 2**26  # bytes
HOPS = 5
_SETTINGS = ("RING_ATTN_", "NCCL_", "XLA_", "JAX_")


def check(limit: float = LIMIT) -> Iterator[Finding]:
    """On all ranks alike. ``limit``: for each finding, in seconds. A collective that does not come to its end is left behind, and
    said. The next finding is looked for once the caller asks for it, having printed the last: a crash takes nothing with it."""
    findings: Queue[Finding | None] = Queue()
    threading.Thread(target=_collect, args=(findings,), daemon=True).start()
    while True:
        try:
            finding = findings.get(timeout=limit)
        except Empty:
            yield Finding("ranks", "wrong", f"timed out after {limit:g} s: a rank has not come, or cannot be reached")
            return
        if finding is None:
            return
        yield finding
        findings.task_done()


def _collect(findings: "Queue[Finding | None]") -> None:
    for finding in _findings():
        findings.put(finding)
        findings.join()
    findings.put(None)


def _findings() -> Iterator[Finding]:
    try:
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else None
        if gpu is not None:
            torch.cuda.set_device(gpu)
        dist.init_process_group("gloo" if gpu is None else "nccl", timeout=timedelta(seconds=LIMIT), device_id=gpu)
        yield _agreement()
        yield from _ring()
        yield _hop()
    except Exception as error:
        yield Finding("ranks", "wrong", f"{type(error).__name__}: {error}")


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _agreement() -> Finding:
    settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
    local = {**installed(), **settings, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"}
    every: list[dict[str, object]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, local)
    names = sorted({name for one in every for name in one})
    other = [name for name in names if len({one.get(name) for one in every}) > 1]
    if other:
        differences = "; ".join(f"{name}: {', '.join(str(one.get(name)) for one in every)}" for name in other)
        return Finding("ranks", "wrong", f"{len(every)} ranks differ in {differences}; give all the same")
    return Finding("ranks", "right", f"{len(every)} ranks with the same versions, devices and settings")


def _ring() -> Iterator[Finding]:
    """Each strategy and each kernel that can run, forward and gradients; why the others cannot."""
    from ring_attn import Ring, explain

    arrays = inputs()
    ring = Ring(layout="zigzag")
    shards = [ring.shard(x) for x in arrays]
    # It starts JAX, which the oracle needs. Asked in 16 bits, which all kernels take.
    explanation = explain(*(x.bfloat16() for x in shards[:3]), causal=True, **ring.arguments())
    exact = oracle(*arrays)
    usual = error(results(dense, *arrays), exact)
    choices = [("strategy", "strategy", {explanation.strategy: None, **explanation.strategies})]
    if explanation.kernel is not None:
        choices.append(("kernel", "platform", {explanation.kernel: None, **explanation.kernels}))
    for kind, option, reasons in choices:
        for name, refusal in reasons.items():
            check = f"{kind} {name}, {ring.size} ranks"
            if refusal is not None:
                yield Finding(check, "note", f"cannot run this: {refusal}")
                continue
            try:
                our_error = _tried(ring, {option: name}, shards, exact)
            except Exception as failure:
                yield Finding(check, "wrong", f"{type(failure).__name__}: {failure}")
                continue
            yield Finding(check, verdict(our_error, usual), f"{figures(our_error, usual)} on one")


def _tried(ring: "Ring", options: dict[str, Any], shards: list[Tensor], exact: list[Tensor]) -> float:
    """The error of a call on the ring, and of its gradients."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = ring.attention(q, k, v, causal=True, **options)
        return out

    return error([ring.unshard(x) for x in results(attend, *shards)], exact)


def _hop() -> Finding:
    rank, size = dist.get_rank(), dist.get_world_size()
    sent, received = (torch.ones(HOP, dtype=torch.uint8, device=_device()) for _ in range(2))
    least = float("inf")
    for _ in range(HOPS):
        dist.barrier()
        begun = time.perf_counter()
        pair = [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(pair if size > 1 else []):
            work.wait()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - begun)
    slowest = torch.tensor(least, device=_device())
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return Finding(
        "a hop", "note", f"{HOP / 2**30 / float(slowest):.1f} GiB/s to the next rank, both ways at once, on the slowest rank"
    )
