"""Where the host spends its time in a call, in microseconds: how long each part keeps Python busy, whatever the device does.

    python benchmarks/host_cost.py
    torchrun --standalone --nproc-per-node 8 benchmarks/host_cost.py

One process alone, or a ring of all. Before each sample the device is idle and the processes are synchronised, so nothing waits for
a full queue. The medians are rank 0's; "slowest" is the largest median of all ranks. Parts marked `public` are the public functions
of JAX and torch for the same step, for comparison: no call uses them.
"""

import argparse
import statistics
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import torch

import ring_attn
from team import ON_GPU, Team, hardware, software
from torch_bridge import crossing, dlpack, mesh, runtime
from torch_bridge.programs import _PROGRAMS
from torch_bridge.request import ARRAYS, Form

Part = Callable[..., Any] | tuple[Callable[[], Any], Callable[..., Any]]  # or with an untimed setup first
DIM, DTYPE = (128, torch.bfloat16) if ON_GPU else (8, torch.float32)
HEADS = (32, 8, 8) if ON_GPU else (2, 2, 2)


def median(team: Team, part: Part, samples: int) -> float:
    """Microseconds. The part's results are freed outside the timed region."""
    prepare, run = part if isinstance(part, tuple) else (tuple, lambda _: part())
    names = dict(prepare=prepare, run=run, ready=team.ready)
    times = timeit.repeat("kept = run(given)", "given = prepare(); ready()", repeat=samples + 3, number=1, globals=names)
    return statistics.median(times[3:]) * 1e6


def whole_calls(inputs: list[torch.Tensor]) -> dict[str, Part]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    attention = partial(ring_attn.ring_attention, causal=True, layout="zigzag")
    out = attention(*leaves)
    dout = torch.randn_like(out)
    return {
        "forward": lambda: attention(*inputs),
        "forward, with a graph": lambda: attention(*leaves),
        "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    }


def parts(inputs: list[torch.Tensor]) -> dict[str, Part]:
    """The parts of the forward, in order."""
    shape = tuple(inputs[0].shape)
    program: Any = next(made.program for made in _PROGRAMS.values() if made.request.results[0].shape == shape)
    operands = [*inputs, *[None] * (len(ARRAYS) - len(inputs))]
    way: Any = program.crossing
    compiled, query = program.compiled_forward, inputs[0]
    stream = (torch.cuda.current_stream().cuda_stream or dlpack.DEFAULT_STREAM) if ON_GPU else None

    def arrays() -> list[jax.Array | None]:
        tensors = [*operands, *(homes(compiled.results) if way.in_place else ())]
        return [None if x is None else program.join(way.convert.to_array(x, None)) for x in tensors]

    result = jax.block_until_ready(compiled.function(*arrays()))[0]
    local = result.addressable_data(0)
    return {
        "the program: all between torch's tensors": lambda: program.forward(operands),
        **(gpu_parts(way, query, compiled.results) if ON_GPU else {}),
        "one tensor to JAX": lambda: way.convert.to_array(query, None),
        "  public: jax.dlpack.from_dlpack": lambda: jax.dlpack.from_dlpack(query),
        "one global array": lambda: program.join(local),
        "  public: make_array_from_single_device_arrays": lambda: public_global(program.ring, local),
        "dispatch": (arrays, lambda arrays: compiled.function(*arrays)),
        "one result to torch": lambda: way.convert.to_tensor(result, stream),
        "  public: torch.from_dlpack": lambda: torch.from_dlpack(local),
        "watching the peers": lambda: runtime.watch(program.ring, "forward").__enter__().__exit__(None, None, None),
    }


def homes(forms: tuple[Form, ...]) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in forms]


def gpu_parts(way: Any, query: torch.Tensor, forms: tuple[Form, ...]) -> dict[str, Part]:
    stream = torch.cuda.current_stream()
    return {
        "memory for the results": lambda: homes(forms),
        "JAX's stream waits for torch's": lambda: way.after(stream),
        "that, and one tensor to JAX with the event": lambda: way.convert.to_array(query, way.after(stream)),
        "an event recorded": lambda: torch.cuda.Event().record(stream),
        "  a copy of one result, where it is needed": lambda: query.clone(),
    }


def public_global(ring: mesh.Ring, local: jax.Array) -> jax.Array:
    if ring.size == 1:
        return local
    shape = (ring.size * local.shape[0], *local.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, mesh.sharding(ring, local.platform()), [local])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048 if ON_GPU else 16, help="of each process")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--copied", action="store_true", help="results are copied, as where JAX cannot write them in place")
    options = parser.parse_args()
    team = Team()
    crossing._OnGpu.in_place = not options.copied
    inputs = [torch.randn(1, options.tokens, count, DIM, device=team.device, dtype=DTYPE) for count in HEADS]
    team.say(f"{team.size} x {hardware()}; {software()}\n{options.tokens} tokens a process, causal, zigzag, {DTYPE}\n")
    team.say(f"{'microseconds of the host':50} {'median':>8} {'slowest':>8}")
    for table in (whole_calls, parts):
        for name, part in table(inputs).items():
            mine = median(team, part, options.samples)
            team.say(f"{name:50} {mine:8.1f} {team.slowest(mine):8.1f}")
        team.say("")
    team.close()


if __name__ == "__main__":
    main()
