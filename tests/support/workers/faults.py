"""Two or more ranks, one of which deviates from the others as the first argument says.

Prints "ended after N s: TYPE: MESSAGE" for a call that raised, and "works" once a later call of the ring has run.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from rings import rotation
from state_torch import stepwise, stepwise_ssd
from torch.utils.checkpoint import checkpoint

import ring_attn
from ring_attn.training.shared_state import SharedState
from torch_bridge.backends.dlpack import to_jax
from torch_bridge.failures import peers, watchdog
from torch_bridge.mesh import jax_mesh, rings
from torch_bridge.start import runtime

LIMIT = 3.0  # seconds, for deaths and for waits
X = torch.ones(1, 8, 2, 4)


def start(**options) -> None:
    runtime.start(peer_timeout=LIMIT, **options)


def call(q: torch.Tensor = X, k: torch.Tensor = X, v: torch.Tensor = X, **options) -> None:
    ring_attn.ring_attention(q, k, v, **options)


def told(function: Callable[..., object] = call, *arguments: object, **options) -> None:
    """A call that must raise, and be the end of this process unless it raises ValueError."""
    begun = time.monotonic()
    try:
        function(*arguments, **options)
    except Exception as error:
        print(f"ended after {time.monotonic() - begun:.1f} s: {type(error).__name__}: {error}", flush=True)
        if isinstance(error, runtime.PeerFailure):
            time.sleep(LIMIT)  # a process that ends would count as a dead peer and end the others too
            sys.exit(3)
    else:
        print("did not raise", flush=True)


class Event:
    """Of a device."""

    def __init__(self, ends: float):
        self.ends = ends

    def query(self) -> bool:
        return time.monotonic() > self.ends


def launch(seconds: float) -> None:
    """A call that the device ends after so many seconds."""
    with watchdog.watch(rings.resolve(None), "forward", "a call") as watched:
        watched.event = Event(time.monotonic() + seconds)


def device_stalls(rank: int) -> None:
    start(device_timeout=LIMIT)
    launch(float("inf") if rank == 1 else 0)
    time.sleep(2 * LIMIT)
    told()


def device_waits(rank: int) -> None:
    """One device waits for a rank that compiles for longer than the limit."""
    start(device_timeout=LIMIT / 2)
    dist.barrier()  # their waits begin together
    if rank == 1:
        preparing = peers.mark_busy()
        time.sleep(2 * LIMIT)
        peers.mark_idle(preparing)
    launch(2 * LIMIT if rank == 0 else 0)
    works()


def hosts_stall(rank: int) -> None:
    """Both, in C++. What is compiled may take longer than the limit."""
    start(device_timeout=LIMIT)
    with watchdog.watch(rings.resolve(None), "forward", "a call", limited=True):
        with peers.state.host.compiling():
            time.sleep(2 * LIMIT)
        print("compiled for long", flush=True)
        time.sleep(10 * LIMIT)


def host_and_device_stall(rank: int) -> None:
    """One has given the call to its device, which waits for the other."""
    start(device_timeout=LIMIT)
    with watchdog.watch(rings.resolve(None), "forward", "a call", limited=True) as watched:
        if rank == 1:
            time.sleep(10 * LIMIT)
        watched.event = Event(float("inf"))
    time.sleep(10 * LIMIT)


def lasts(rank: int) -> None:
    """Nobody is at fault: the host of one rank takes long in a call, and the device of the other."""
    peers.state.patience = 1.0
    start(device_timeout=2 * LIMIT)
    with watchdog.watch(rings.resolve(None), "forward", "a long call") as watched:
        time.sleep(1.5 * LIMIT * rank)
        watched.event = Event(time.monotonic() + 1.5 * LIMIT * (1 - rank))
    time.sleep(1.5 * LIMIT * (1 - rank))
    works()


def forward_alone(rank: int) -> None:
    """One rank makes a forward of a sharded model, and its first call of the job, while the other does something else."""
    runtime.start.__kwdefaults__["peer_timeout"] = LIMIT  # as where nobody calls start
    if rank == 0:
        told(SharedState(ring_attn.Ring()).compare, {"input_ids": torch.arange(4)}, torch.arange(4), torch.nn.Linear(2, 2))
    time.sleep(2 * LIMIT)


def untraceable(b, h, i, j):
    return i >= j if i else j >= i


def invalid_first(rank: int) -> None:
    """The first call of the job, before any start."""
    told(**({"k": X[..., :3]} if rank == 1 else {}))
    works()


def invalid_new(rank: int) -> None:
    start()
    call()
    told(causal=True, **({"q": X[..., :3]} if rank == 1 else {}))
    told(softcap=2.0, **({"k": [1, 2]} if rank == 1 else {}))
    told(chunk_size=3, **({"q_segment_ids": torch.full((1, 8), 2**40)} if rank == 1 else {}))
    told(mask_mod=untraceable if rank == 1 else (lambda b, h, i, j: i >= j))
    told(sliding_window=3, **({"unknown": 1} if rank == 1 else {}))
    works()


def invalid_everywhere(rank: int) -> None:
    """Each rank raises its own error."""
    start()
    told(k=X[..., :3], scale="rank" if rank else "other")
    works()


def invalid_known(rank: int) -> None:
    """The others are already in the program."""
    start()
    call()
    if rank == 1:
        time.sleep(0.5)
    told(**({"k": X[..., :3]} if rank == 1 else {}))
    time.sleep(3 * LIMIT)


def invalid_early(rank: int) -> None:
    """The others enter a program that they know after the error has been reported to them."""
    start()
    call()
    if rank != 1:
        time.sleep(0.5)
    told(**({"k": X[..., :3]} if rank == 1 else {}))
    works()


def skips_a_batch(rank: int) -> None:
    """Rank 1 catches the error of its call and goes on to the next batch at once, with the others inside the one it left out."""
    start()
    for batch in range(6):
        if rank == 1 and batch == 3:
            time.sleep(0.5)
        values = torch.full_like(X, batch)
        try:
            out = ring_attn.ring_attention(X, X[..., :3] if rank == 1 and batch == 3 else X, values)
        except ValueError as error:
            print(f"batch {batch} was left out: {error}", flush=True)
        else:
            print(f"batch {batch} is {'right' if torch.allclose(out, values) else 'WRONG'}", flush=True)


def invalid_unshard(rank: int) -> None:
    """One rank's own check fails: of the tensor, of the call, of a module's padding mask."""
    assert torch.equal(ring_attn.unshard(torch.full((1, 2), rank), layout="zigzag"), torch.tensor([[0, 1, 1, 0]]))
    gather = ring_attn.unshard
    told(gather, [1, 2] if rank == 1 else X)
    told(gather, X, **({"unknown": 1} if rank == 1 else {}))
    told(gather, X, dim=7 if rank == 1 else 1)
    module = ring_attn.RingAttention(8, 2, batch_first=True)
    rows, padding = torch.ones(1, 4, 8), torch.ones(1, 3 if rank == 1 else 4)
    told(module, rows, rows, rows, key_padding_mask=padding)
    gather(X.clone().requires_grad_()).sum().backward()
    works()


def no_unshard(rank: int) -> None:
    """Rank 1 does not take part in the second sum of gradients."""
    start()
    for step in range(2):
        whole = ring_attn.unshard(X.clone().requires_grad_()).sum()
        if rank == 1 and step == 1:
            time.sleep(4 * LIMIT)
        else:
            whole.backward()


def fails_inside(rank: int) -> None:
    """An error that occurs while the program runs, such as running out of memory."""
    start()
    ring = rings.resolve()
    runtime.start(ring)
    program, local = rotation(ring, 1), to_jax(torch.ones(4, 2))
    try:
        with runtime.watch(ring, "forward"):
            if rank == 1:
                time.sleep(0.5)
                raise MemoryError("no room")
            jax_mesh.to_local(program(jax_mesh.to_global(ring, local))).block_until_ready()
    except MemoryError:
        time.sleep(3 * LIMIT)


def apart(rank: int) -> None:
    """Rank 1 runs a program that all ranks know, the others a new one."""
    start()
    call(causal=True)
    told(causal=rank == 1)


def stops(rank: int) -> None:
    start()
    call(causal=True)
    if rank == 1:
        time.sleep(4 * LIMIT)
        told(causal=True)
    else:
        told(causal=True)


def skips_a_backward(rank: int) -> None:
    """Rank 1 leaves one out, and its later calls are paired with others of rank 0, of the same sizes."""
    start()
    q, begun = X.clone().requires_grad_(), time.monotonic()

    def steps() -> None:
        for step in range(10_000):
            out = ring_attn.ring_attention(q, X, X)
            if (rank, step) != (1, 5):
                out.sum().backward()
            assert time.monotonic() - begun < 5 * LIMIT
            time.sleep(0.05)

    told(steps)


def never_calls(rank: int) -> None:
    start()
    if rank == 1:
        time.sleep(4 * LIMIT)
    else:
        told()


def never_starts(rank: int) -> None:
    if rank == 1:
        time.sleep(4 * LIMIT)
    else:
        start(start_timeout=LIMIT)


def slow(rank: int) -> None:
    """Rank 1 pauses for less than the limit; then all ranks are in the same program for longer than the limit."""
    start()
    call()
    time.sleep(LIMIT / 2 * rank)
    ring = rings.resolve()
    program, local = rotation(ring, 1), to_jax(torch.ones(4, 2))
    with runtime.watch(ring, "forward"):
        time.sleep(2 * LIMIT * rank)
        jax_mesh.to_local(program(jax_mesh.to_global(ring, local))).block_until_ready()
    works()


class _Slow(torch.autograd.Function):
    """Takes longer than the limit on rank 1, as kernels that tune themselves may."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> torch.Tensor:
        assert ctx.saved_tensors  # which a checkpoint computes again
        time.sleep(2 * LIMIT * dist.get_rank())
        return dx


def slow_operator(rank: int) -> None:
    """Between the ring's backward and the convolution's, in layers with a state; then one whose backward raises on all ranks."""
    start()

    def late(operator: Any, slow: bool = True) -> Any:
        @wraps(operator)
        def call(*given: Any, **states: Any) -> tuple[torch.Tensor, torch.Tensor]:
            y, state = operator(*given, **states)
            if not slow and y.requires_grad:
                y.register_hook(lambda _: 1 / 0)
            return _Slow.apply(y) if slow else y, state

        return call

    x = ring_attn.causal_conv1d(torch.randn(1, 4, 8, requires_grad=True), torch.ones(8, 2)).unflatten(2, (2, 4))
    k, v = torch.randn(2, 1, 4, 2, 4, requires_grad=True)
    beta = torch.rand(1, 4, 2)
    for layer, operator, others in (
        (ring_attn.gated_delta_rule, stepwise, (k, v, -beta, beta)),
        (ring_attn.ssd, stepwise_ssd, (beta, -torch.ones(2), k, v)),
    ):
        called = partial(layer, operator=late(operator))
        checkpoint(called, x, *others, use_reentrant=False).sum().backward(retain_graph=True)
        with suppress(ZeroDivisionError):
            layer(k, *others, operator=late(operator, slow=False)).sum().backward()
        layer(k, *others, operator=operator)
        assert not peers.state.preparing, "a backward that has raised is over"
    works()


def patient(rank: int) -> None:
    """A pause longer than the peer limit, which the program has announced."""
    start(wait_timeout=10 * LIMIT)
    call()
    time.sleep(2 * LIMIT * rank)
    works()


def every_call(rank: int) -> None:
    """All ranks know both programs."""
    start(check="every_call")
    q = X.clone().requires_grad_()
    call(causal=True)
    call(causal=False)
    told(causal=rank == 1)
    ring_attn.ring_attention(q, X, X).sum().backward()
    works()


def check_apart(rank: int) -> None:
    try:
        start(check=("every_call", "new_programs")[rank])
    except ValueError as error:
        print(f"refused: {error}", flush=True)


def late(rank: int) -> None:
    """Rank 1 comes to its first call when rank 0 has given up; rank 0, whose process holds torch's store, lives on."""
    if rank == 1:
        time.sleep(2 * LIMIT)
        told()
        return
    try:
        start(start_timeout=LIMIT)
    except runtime.PeerFailure:
        print("gave up", flush=True)
    time.sleep(4 * LIMIT)


def works() -> None:
    call()
    assert not peers.state.failed  # every failure is resolved, and forgotten
    print("works", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](dist.get_rank())


if __name__ == "__main__":
    main()
