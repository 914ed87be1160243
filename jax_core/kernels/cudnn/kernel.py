"""cuDNN's fused attention under the kernel contract.

A call computes one rectangle of scores, whole or causal, so a pair of shards is one call:

- a rank's own shard is causal in its own numbering, in the contiguous and the zigzag layout alike;
- of two ranks' contiguous shards all is visible or nothing. Which is known on the device alone, so it is computed, and dropped
  where it is hidden: the ring's last rank sees every shard, and the others wait for it in any case;
- of two ranks' zigzag shards two tiles of equal size are visible (`tiles.py`).

What this costs in accuracy: cuDNN gives a pair's output and gradients in 16 bits. The output is joined in float32 from partials
that were rounded once each; their weights sum to one, so the error does not grow with the ring. Each pair's share of the gradients
is rounded once before float32 sums the shares.

cuDNN's backward adds up dQ in any order, so two runs may differ in the last bits, unless XLA is told otherwise, at some cost: the
compiler option ``xla_gpu_exclude_nondeterministic_ops=True``.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jax_core.block import Extras, Grads, Partial, Problem, Rows, Scores
from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.cudnn import calls, tiles

_OTHERS = 'use platform="triton" or "auto"'
_NOT_TAKEN = {
    "bias": "a bias",
    "mask": "a mask",
    "q_segment_ids": "segment ids",
    "kv_segment_ids": "segment ids",
    "q_position_ids": "position ids",
    "kv_position_ids": "position ids",
    "alibi_slopes": "ALiBi slopes",
}


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    if any(number is not None for params in (forward, backward) for number in vars(params).values()):
        return "cuDNN chooses its tiles itself; leave fwd_params and bwd_params without numbers"
    checks = (_dtype_reason, _scores_reason, _extras_reason, _mask_reason, _ring_reason, _length_reason)
    reason = next((reason for check in checks if (reason := check(problem))), None)
    return reason or calls.missing() or _dim_reason(problem)


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    del problem
    return FwdParams(), BwdParams()


def _dtype_reason(problem: Problem) -> str | None:
    name = jnp.dtype(problem.dtype).name
    return None if name in ("float16", "bfloat16") else f"the cuDNN kernel takes float16 and bfloat16, got {name}; {_OTHERS}"


def _scores_reason(problem: Problem) -> str | None:
    scores = problem.scores
    if scores.scale <= 0:
        return f"cuDNN's softmax needs a positive softmax_scale, got {scores.scale}; {_OTHERS}"
    if scores.softcap is not None:
        return f"the cuDNN kernel has no logits_soft_cap; {_OTHERS}"
    if scores.dropout_prob:
        return f"cuDNN's dropout has a pattern of its own, which depends on the ring; {_OTHERS}"
    if scores.predicates:
        return f"the cuDNN kernel has no mask functions; {_OTHERS}"
    if scores.logits_dtype not in (None, "float32"):
        return f"cuDNN keeps logits in float32, got logits_dtype {scores.logits_dtype}; {_OTHERS}"
    if scores.precision is not None:
        return f"cuDNN's products have one precision, got {scores.precision}; leave precision None, or {_OTHERS}"
    return None


def _extras_reason(problem: Problem) -> str | None:
    if problem.lse_gradient:
        return 'cuDNN\'s backward has no gradient of the LSE; return_lse=False, or use platform="triton"'
    names = [name for name in _NOT_TAKEN if name in problem.extras]
    return f"the cuDNN kernel does not take {_NOT_TAKEN[names[0]]}; {_OTHERS}" if names else None


def _mask_reason(problem: Problem) -> str | None:
    mask = problem.scores.mask
    if mask.chunk is not None:
        return f"the cuDNN kernel has no chunk_size; {_OTHERS}"
    if not mask.causal:
        return f"cuDNN's window is causal: causal=True, or {_OTHERS}" if (mask.left, mask.right) != (None, None) else None
    if _window(mask.left, problem.size * problem.q_length) is None:
        return None
    if problem.size > 1:
        return f"the cuDNN kernel has no window in a ring; {_OTHERS}"
    return f"cuDNN's window needs as many keys as queries; {_OTHERS}" if problem.q_length > problem.k_length else None


def _ring_reason(problem: Problem) -> str | None:
    if problem.size == 1 or not problem.scores.mask.causal:
        return None
    if problem.layout == "striped":
        return f'in a causal ring the cuDNN kernel needs layout="zigzag" or "contiguous", got "striped"; or {_OTHERS}'
    if problem.q_length != problem.k_length:
        lengths = f"{problem.q_length} and {problem.k_length}"
        return f"in a causal ring the cuDNN kernel needs query and key shards of one length, got {lengths}; {_OTHERS}"
    return None


def _length_reason(problem: Problem) -> str | None:
    tiled = problem.size > 1 and problem.layout == "zigzag" and problem.scores.mask.causal
    if max(problem.q_length, problem.k_length) > (2 if tiled else 1):
        return None
    return f"cuDNN's backward does not take a single query and a single key; {_OTHERS}"


def _dim_reason(problem: Problem) -> str | None:
    dims, capability = (problem.dim, problem.value_dim), calls.capability()
    widest = 256 if capability // 10 == 9 else 128
    if any(dim % 8 for dim in dims):
        return f"cuDNN needs head dims that are multiples of 8, got {dims[0]} and {dims[1]}; {_OTHERS}"
    if max(dims) > widest and (capability // 10 != 10 or dims != (192, 128)):
        return f"cuDNN's head dims on this GPU are at most {widest}, got {dims[0]} and {dims[1]}; {_OTHERS}"
    if dims[0] != dims[1] and capability < 90:
        return f"cuDNN's value dim is its head dim on this GPU, got {dims[0]} and {dims[1]}; {_OTHERS}"
    return None


def forward(
    q, k, v, q_runs, k_runs, *, own: bool, scores: Scores, extras: Extras, carry: Partial | None, out_dtype, config: FwdParams
) -> Partial:
    del extras, config  # unsupported() lets none through
    before = _before(q_runs, k_runs)
    if own or not scores.mask.causal:
        found = [Partial(*calls.forward(q, k, v, **_settings(scores, q.shape[1])))]
    elif len(q_runs) == 1:
        out, lse = calls.forward(q, k, v, scale=scores.scale)
        found = [Partial(out, jnp.where(before, lse, -jnp.inf))]
    else:
        pieces = tiles.query_tiles(q, before), tiles.key_tiles(k, before), tiles.key_tiles(v, before)
        found = tiles.partials(*calls.forward(*pieces, scale=scores.scale), before)
    if carry is None:  # the first pair is a rank's own
        return found[0]._replace(out=found[0].out.astype(out_dtype))
    return tiles.join([carry, *found], out_dtype)


def backward(
    q, k, v, rows: Rows, q_runs, k_runs, *, own: bool, scores: Scores, extras: Extras, dq, fused: bool, config: BwdParams
) -> Grads:
    del extras, fused, config  # one sweep in any case
    before = _before(q_runs, k_runs)
    dout = rows.dout.astype(q.dtype)
    if own or not scores.mask.causal:
        grads = _wide(calls.backward(q, k, v, rows.out, dout, rows.lse, **_settings(scores, q.shape[1])))
    elif len(q_runs) == 1:
        grads = _wide(calls.backward(q, k, v, rows.out, dout, rows.lse, scale=scores.scale))
        # Not multiplied by 0: the weights of hidden keys may be infinite, as the LSE does not count them.
        grads = tuple(jnp.where(before, grad, 0) for grad in grads)
    else:
        queries, out, dout = (tiles.query_tiles(x, before) for x in (q, rows.out, dout))
        keys, values = (tiles.key_tiles(x, before) for x in (k, v))
        found = calls.backward(queries, keys, values, out, dout, tiles.row_tiles(rows.lse, before), scale=scores.scale)
        grads = tiles.query_gradient(found[0], before), *(tiles.key_gradient(grad, before) for grad in found[1:])
    share, dk, dv = grads
    return Grads(share if dq is None else dq + share, dk, dv, None, None)


def _before(q_runs, k_runs):
    """Do the keys stand before the queries in the sequence? (The first runs say it of both layouts.)"""
    return k_runs[0].start < q_runs[0].start


def _settings(scores: Scores, q_length: int) -> dict[str, Any]:
    """Of a call over whole shards of one rank, or of two that see all of each other."""
    return dict(scale=scores.scale, causal=scores.mask.causal, window=_window(scores.mask.left, q_length))


def _window(left: int | None, q_length: int) -> int | None:
    """The keys that a query sees with its own, or None where the window hides none."""
    return None if left is None or left >= q_length - 1 else left + 1


def _wide(grads) -> tuple[jax.Array, ...]:
    return tuple(grad.astype(jnp.float32) for grad in grads)
