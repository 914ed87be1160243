"""torch and JAX on one GPU: whose memory results are, and that the host waits for nothing. `make test-gpu` runs it."""

import time
from functools import partial

import pytest
import torch

import ring_attn
from benchmarks.cpu.compare import sdpa
from ring_attn.recurrence.sums import over_tokens, weighted_over_tokens
from torch_bridge.backends.dlpack import to_jax, to_torch

pytestmark = pytest.mark.gpu

LATE = 400_000_000  # clock cycles: about 0.2 s


def qkv(length=512, dtype=torch.bfloat16, grad=True):
    return [torch.randn(1, length, heads, 64, device="cuda", dtype=dtype, requires_grad=grad) for heads in (4, 2, 2)]


def test_nothing_is_copied_on_either_way():
    ring_attn.start()
    tensor = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert to_torch(array).data_ptr() == tensor.data_ptr()


def results(attention, inputs, dout):
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_errors_are_at_most_twice_those_of_torch(dtype):
    """Of output and gradients against float64: the largest, beside torch's SDPA in the same dtype."""
    *inputs, dout = (torch.randn(2, 1000, 4, 64, device="cuda").to(dtype) for _ in range(4))
    exact = results(sdpa, [x.double() for x in inputs], dout.double())

    def errors(attention):
        return [float((got - want).abs().max()) for got, want in zip(results(attention, inputs, dout), exact, strict=True)]

    mine, theirs = errors(partial(ring_attn.ring_attention, mesh="local", causal=True)), errors(sdpa)
    print(f"out, dq, dk, dv: ring_attn {mine}, torch SDPA {theirs}")
    assert all(a <= 2 * b + 1e-6 for a, b in zip(mine, theirs, strict=True)), (mine, theirs)


def test_results_are_in_memory_of_torch():
    """JAX has written them there: none had to be copied."""
    from torch_bridge.backends.launch import launcher

    q, k, v = qkv()
    before = torch.cuda.memory_allocated()
    out, lse = ring_attn.ring_attention(q, k, v, causal=True, return_lse=True)
    assert torch.cuda.memory_allocated() - before >= out.nbytes + lse.nbytes
    gradients = torch.autograd.grad(out.float().sum() + lse.sum(), (q, k, v))
    assert [gradient.shape for gradient in gradients] == [x.shape for x in (q, k, v)]
    way = launcher(q.device)
    assert way.in_place and way._copied is None
    pointers = {out.data_ptr(), lse.data_ptr(), *(gradient.data_ptr() for gradient in gradients)}
    segments = [(segment["address"], segment["address"] + segment["total_size"]) for segment in torch.cuda.memory_snapshot()]
    assert all(any(start <= pointer < end for start, end in segments) for pointer in pointers)


def test_memory_is_torchs_again_when_results_are_dropped():
    q, k, v = qkv(4096, grad=False)
    ring_attn.ring_attention(q, k, v)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        ring_attn.ring_attention(q, k, v)
    ring_attn.ring_attention(*qkv(16, grad=False))  # JAX clears away behind itself in its next call
    assert torch.cuda.memory_allocated() - before < q.nbytes


@pytest.mark.parametrize("first", [True, False], ids=["own stream", "default stream"])
def test_the_host_waits_for_nothing(first):
    """Ids of 64 bits, a seed, a mask function's arrays, and the copies of a layout that is not contiguous are on the way."""
    import jax.numpy as jnp

    rank_of = jnp.arange(512) % 7

    def mask_mod(batch, head, q_pos, k_pos):
        return rank_of[q_pos] >= rank_of[k_pos] - 3

    q, k, v = qkv()
    ids = (torch.arange(512, device="cuda") // 100)[None]
    options = dict(q_segment_ids=ids, dropout_p=0.1, dropout_seed=2**40, mask_mod=mask_mod, qkv_format="bhsd")

    def call():
        out = ring_attn.ring_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    call()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if first else torch.cuda.default_stream()):
        begin = time.perf_counter()
        torch.cuda._sleep(LATE)
        call()
        returned = time.perf_counter() - begin
        torch.cuda.synchronize()
    assert returned < 0.8 * (time.perf_counter() - begin)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_torch_sees_no_wait():
    inputs = qkv()
    ring_attn.ring_attention(*inputs, causal=True).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ring_attn.ring_attention(*inputs, causal=True, dropout_p=0.0).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_call_comes_in_its_place_on_the_current_stream():
    q, k, v = qkv(grad=False)
    wanted = ring_attn.ring_attention(q, k, v)
    late = [torch.zeros_like(x) for x in (q, k, v)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LATE)
        for x, value in zip(late, (q, k, v), strict=True):
            x.copy_(value)
        out = ring_attn.ring_attention(*late)
        for x in late:
            x.fill_(torch.nan)
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_over_tokens(dtype):
    """Of a view, as of an operator's wide output; and weighted, of two heads a group."""
    # float32's products may be of TF32; sums of 16 bits are rounded to float32 alone, what is weighted to their dtype.
    bound = 1e-3 if dtype == torch.float32 else 1e-5
    wide, b = torch.randn(2, 3000, 4, 96, device="cuda").to(dtype), torch.randn(2, 3000, 4, 32, device="cuda").to(dtype)
    sums, wanted = over_tokens(wide[..., 32:], b), torch.einsum("pthm,pthn->phmn", wide[..., 32:].double(), b.double())
    assert sums.dtype == torch.float32 and (sums - wanted).norm() < bound * wanted.norm()
    a, weights = wide[:, :, ::2], torch.rand(2, 4, 3000, device="cuda")
    sums = weighted_over_tokens(a, b, weights)
    wanted = torch.einsum("pthm,pthn,pht->phmn", *(x.double() for x in (a.repeat_interleave(2, 2), b, weights)))
    assert sums.dtype == torch.float32 and (sums - wanted).norm() < max(bound, 2 * torch.finfo(dtype).eps) * wanted.norm()


def test_ids_that_do_not_fit_are_an_assertion_of_the_device():
    """In a process of its own: such an assertion ends every use of the GPU."""
    import subprocess
    import sys

    code = (
        "import torch, ring_attn\n"
        "x = torch.randn(1, 64, 2, 64, device='cuda')\n"
        "ids = torch.full((1, 64), 2**40, device='cuda')\n"
        "ring_attn.ring_attention(x, x, x, q_segment_ids=ids)\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0 and "q_segment_ids must fit in int32" in done.stdout + done.stderr
