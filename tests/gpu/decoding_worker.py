"""Decoding by torch's own launches, on all ranks of torchrun, one GPU each: against the oracle, against JAX's programs, and
captured in a CUDA graph.

torchrun --standalone --nproc-per-node 2 tests/gpu/decoding_worker.py
"""

import gc
import os
import warnings

import torch
import torch.distributed as dist
from decoding_cases import CASES, arrays, check
from generation_cases import SmallModel, prompts

import ring_attn
from ring_attn import Ring
from ring_attn.generation import KVCache, generate
from ring_attn.generation.step import DecodingStep
from torch_bridge.attention import decoding, peer_memory
from torch_bridge.call import call_cache, programs

KEYS = ("k", "v", "kv_segment_ids", "kv_position_ids")
LAUNCHES = decoding.launches
LENGTHS = torch.tensor([37, 5, 20])


def way(in_torch: bool) -> None:
    decoding.launches = LAUNCHES if in_torch else lambda *_: False
    programs._PROGRAMS.clear()
    call_cache.clear()


def decoding_of_call() -> decoding.Decoding:
    """Of the last call that was new."""
    made = next(reversed(programs._PROGRAMS.values())).program
    assert isinstance(made, decoding.Decoding), made
    return made


def read_each_other(rank: int, other: int) -> bool:
    """Whether the GPUs of two ranks do."""
    one, two = (number % torch.cuda.device_count() for number in (rank, other))
    return one == two or torch.cuda.can_device_access_peer(one, two)


def cases(rank: int, size: int) -> None:
    """Each rank has a part of the keys."""
    for name, case in CASES.items():
        given = arrays(case)
        part = {name: (x[:, rank::size] if name in KEYS else x).contiguous().cuda() for name, x in given.items()}
        out, lse = ring_attn.ring_attention(**part, **case.options, strategy="decode", return_lse=True)
        decoding_of_call()
        check(case, given, out.cpu(), lse.cpu())
        again, _ = ring_attn.ring_attention(**part, **case.options, strategy="decode", return_lse=True)
        assert torch.equal(out, again), name
        wanted = 1 < size <= peer_memory._MOST_RANKS and read_each_other(rank, (rank + 1) % size)
        assert (decoding_of_call()._peers is not None) == wanted, name


def generated(model: torch.nn.Module, **options: bool) -> torch.Tensor:
    ring = Ring(layout="zigzag")
    return generate(model, prompts().cuda(), KVCache(ring, max_length=120), 60, lengths=LENGTHS, **options)


def captured() -> None:
    """The same tokens by JAX's programs, by torch's launches, and by a graph; logits of the last two bit for bit; flat memory."""
    model = SmallModel(positions=11_000, dtype=torch.float32).cuda()
    way(in_torch=False)
    by_jax = generated(model)
    way(in_torch=True)
    assert torch.equal(generated(model, cuda_graph=False), by_jax)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that it cannot be captured is one
        assert torch.equal(generated(model), by_jax)
    caches = [KVCache(Ring(layout="zigzag"), max_length=11_000) for _ in range(2)]
    steps = [DecodingStep(model, cache, cuda_graph=graph) for cache, graph in zip(caches, (True, False), strict=True)]
    with torch.no_grad():
        for cache in caches:
            generate(model, prompts().cuda(), cache, 0, lengths=LENGTHS)
        token, memory = torch.tensor([1, 2, 3], device="cuda"), 0
        for number in range(10_000):
            if number == 7:
                for cache in caches:
                    cache.reorder(torch.tensor([2, 0, 0], device="cuda"))
            one = steps[0](token)
            if number < 20:
                assert torch.equal(one, steps[1](token)), number
            if number == 30:
                gc.collect()
                memory = torch.cuda.memory_allocated()
    gc.collect()
    assert steps[0]._graph is not None and torch.cuda.memory_allocated() == memory
    steps[0].close()


def short() -> None:
    """Prompts of one token, which make their layers in the first step; the second time all programs are there."""
    model, tokens = SmallModel(dtype=torch.float32).cuda(), prompts()[:, :1].cuda()
    plain = generate(model, tokens, KVCache(Ring(), max_length=40), 12, cuda_graph=False)
    for _ in range(2):
        assert torch.equal(generate(model, tokens, KVCache(Ring(), max_length=40), 12), plain)


def not_captured() -> None:
    """A model that asks the device for a number runs as it is, on torch's stream, and nothing is left of the capture."""
    model, tokens, device = SmallModel(dtype=torch.float32).cuda(), prompts().cuda(), torch.device("cuda")
    plain = generate(model, tokens, KVCache(Ring(), max_length=60), 6, lengths=LENGTHS, cuda_graph=False)

    def asking(*given: object) -> torch.Tensor:
        logits = model(*given)
        logits.sum().item()
        return logits

    before = torch.cuda.current_stream(device)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = generate(asking, tokens, KVCache(Ring(), max_length=60), 6, lengths=LENGTHS)
    assert any("cannot be captured in a CUDA graph" in str(each.message) for each in told), told
    assert torch.equal(found, plain)
    assert torch.cuda.current_stream(device) == before
    assert torch.rand(8, device=device).isfinite().all()
    torch.empty(64 * 2**20, device=device)
    held = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held  # the allocator is in no capture
    assert torch.equal(generate(model, tokens, KVCache(Ring(), max_length=60), 6, lengths=LENGTHS), plain)


@torch.no_grad()
def two_streams() -> None:
    """Two models take turns on streams of their own, without a wait of the host's: the logits that each has alone. Captured, and as
    they are."""
    models = [SmallModel(dtype=torch.float32).cuda() for _ in range(2)]
    models[1].load_state_dict({name: -x for name, x in models[1].state_dict().items()})
    token = torch.tensor([1, 2, 3], device="cuda")

    def steps(cuda_graph: bool = True) -> list[DecodingStep]:
        caches = [KVCache(Ring(layout="zigzag"), max_length=400) for _ in models]
        for model, cache in zip(models, caches, strict=True):
            generate(model, prompts().cuda(), cache, 0, lengths=LENGTHS)
        return [DecodingStep(model, cache, cuda_graph) for model, cache in zip(models, caches, strict=True)]

    alone = [[step(token).clone() for _ in range(200)] for step in steps()]
    for cuda_graph in (True, False):
        together, streams = [[], []], [torch.cuda.Stream() for _ in models]
        made = steps(cuda_graph)
        torch.cuda.synchronize()
        for _ in range(200):
            for step, stream, said in zip(made, streams, together, strict=True):
                with torch.cuda.stream(stream):
                    said.append(step(token).clone())
        torch.cuda.synchronize()
        for one, other in zip(alone, together, strict=True):
            assert all(map(torch.equal, one, other))


@torch.no_grad()
def two_graphs() -> None:
    """Of two that live, one ends: the other's next logits are those of no graph."""
    model, token = SmallModel(dtype=torch.float32).cuda(), torch.tensor([1, 2, 3], device="cuda")
    caches = [KVCache(Ring(layout="zigzag"), max_length=400) for _ in range(3)]
    for cache in caches:
        generate(model, prompts().cuda(), cache, 0, lengths=LENGTHS)
    first, second, plain = (DecodingStep(model, cache, graph) for cache, graph in zip(caches, (True, True, False), strict=True))
    for number in range(40):
        if number == 20:
            first.close()
            taken = [torch.full((2**18,), torch.nan, device="cuda") for _ in range(64)]  # what it has given back
        if number < 20:
            first(token)
        assert torch.equal(second(token), plain(token)), number
    assert second._graph is not None and len(taken) == 64
    second.close()


def compiled() -> None:
    """By inductor, with graphs of its own around attention: the same tokens, also where the whole step was to be captured."""
    model = SmallModel(dtype=torch.float32).cuda()
    plain = generated(model, cuda_graph=False)
    faster = torch.compile(model, mode="reduce-overhead")
    assert torch.equal(generated(faster, cuda_graph=False), plain)
    assert torch.equal(generated(faster), plain)


def refused() -> None:
    """What JAX computes is not captured in silence."""
    q = torch.randn(1, 256, 2, 64, device="cuda")
    ring_attn.ring_attention(q, q, q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            ring_attn.ring_attention(q, q, q)
    except RuntimeError as error:
        assert "cannot be captured in a CUDA graph" in str(error), error
    else:
        raise AssertionError("a ring call was captured")
    ring_attn.ring_attention(q, q, q)
    torch.cuda.synchronize()


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    decoding._SHORTEST_PART = 16
    for most in (0, peer_memory._MOST_RANKS):  # NCCL gathers, and GPUs read each other's memory
        way(in_torch=True)
        peer_memory._MOST_RANKS = most
        cases(dist.get_rank(), dist.get_world_size())
    print("cases", flush=True)
    captured()
    print("captured", flush=True)
    for check_one in (short, not_captured, two_streams, two_graphs, compiled, refused):
        check_one()
        print(check_one.__name__, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
