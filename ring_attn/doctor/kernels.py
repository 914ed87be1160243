"""One attention of each kernel against the oracle in float64, forward and every gradient, beside torch's SDPA.

``python -m ring_attn.doctor.kernels`` does it on the first GPU that is visible, or on the CPU, and prints lines of JSON: a crash or
a hang of a kernel is then that process's own, and hides none before it.
"""

import json
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ring_attn.doctor.child import from_process
from ring_attn.doctor.finding import Finding, Verdict

LIMIT = 300.0  # seconds, of which the most are compilation
RUNS = 5
ROUNDING = 5e-6  # of float32, in which small shapes may be exact by chance


def check(devices: int, limit: float = LIMIT) -> Iterator[Finding]:
    """``devices``: how many GPUs are visible; 0 for the CPU."""
    for index in range(devices) if devices else (None,):
        environment = {} if index is None else {"CUDA_VISIBLE_DEVICES": str(index)}
        where = "CPU" if index is None else f"GPU {index}"
        reports, became = from_process("ring_attn.doctor.kernels", limit, environment)
        yield from (Finding(f"{each['kernel']}, {where}", each["verdict"], each["text"]) for each in reports)
        if became is not None:
            yield Finding(f"kernels, {where}", "wrong", became)


def main() -> None:
    for each in chain(_tried(), [None]):
        print(json.dumps(each), flush=True)


def _tried() -> Iterator[dict[str, str]]:
    import ring_attn

    arrays = inputs()
    # It starts JAX, which the oracle needs. Asked in 16 bits, which all kernels take.
    explanation = ring_attn.explain(*(x.bfloat16() for x in arrays[:3]), causal=True, mesh="local")
    exact = oracle(*arrays)
    usual = error(results(dense, *arrays), exact)
    usual_ms = _milliseconds(lambda: results(dense, *arrays))
    for name, refusal in [(explanation.kernel, None), *explanation.kernels.items()]:
        if refusal is not None:
            yield {"kernel": str(name), "verdict": "note", "text": f"cannot run here: {refusal}"}
            continue

        def ours(q: Tensor, k: Tensor, v: Tensor, name: Any = name) -> Tensor:
            return ring_attn.ring_attention(q, k, v, causal=True, mesh="local", platform=name)

        try:
            our_error = error(results(ours, *arrays), exact)
            ms = _milliseconds(lambda ours=ours: results(ours, *arrays))  # type: ignore[misc]
        except Exception as failure:
            yield {"kernel": str(name), "verdict": "wrong", "text": f"{type(failure).__name__}: {failure}"}
            continue
        text = f"{figures(our_error, usual)}; {ms:.2f} ms, SDPA {usual_ms:.2f} (forward and backward)"
        yield {"kernel": str(name), "verdict": verdict(our_error, usual), "text": text}


def figures(ours: float, usual: float) -> str:
    return f"error {ours:.1e} of the largest, torch's SDPA {usual:.1e}"


def verdict(ours: float, usual: float) -> Verdict:
    """``usual``: the error of torch's own attention in the same dtype."""
    return "right" if ours <= 2 * usual + ROUNDING else "wrong"


def inputs() -> list[Tensor]:
    """q, k, v and a cotangent ``[batch, seq, heads, dim]``."""
    gpu = torch.cuda.is_available()
    length, heads, kv_heads, dim = (4096, 8, 2, 128) if gpu else (512, 4, 2, 32)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, length, count, dim) for count in (heads, kv_heads, kv_heads, heads)]
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def oracle(*arrays: Tensor) -> list[Tensor]:
    """The output and the gradients in float64, on the CPU, by the oracle that the tests have. JAX must have been started by a call
    of the library before."""
    from jax_core.testing.oracle import reference_gradients

    return [torch.from_numpy(x) for x in reference_gradients(*(x.double().cpu().numpy() for x in arrays), causal=True)]


def results(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, cotangent: Tensor) -> list[Tensor]:
    """The output and the gradients."""
    operands = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attend(*operands)
    return [out.detach(), *torch.autograd.grad(out, operands, cotangent)]


def error(results: list[Tensor], exact: list[Tensor]) -> float:
    """The largest difference of a position's vector ``[heads, dim]``, relative to the largest such vector of each result. (Of
    single numbers it is twice SDPA's where gradients are rounded on each rank before they are summed.)"""

    def largest(x: Tensor) -> Tensor:
        return x.flatten(2).norm(dim=2).max()

    return max(float(largest(a.double().cpu() - b) / largest(b)) for a, b in zip(results, exact, strict=True))


def _milliseconds(run: Callable[[], object]) -> float:
    """The least of a few runs, by the wall clock."""
    least = float("inf")
    for _ in range(RUNS):
        begun = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - begun)
    return 1000 * least


if __name__ == "__main__":
    main()
