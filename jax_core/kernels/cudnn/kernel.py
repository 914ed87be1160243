"""cuDNN's fused attention under the kernel contract.

A call computes one rectangle of scores, full or causal, so a pair of shards is one call:

- a rank's own shard is causal in local indices, in both the contiguous and the zigzag layout;
- two different ranks' contiguous shards are fully visible or fully hidden. Only the device knows which, so the pair is always
  computed, and the result dropped if it is hidden: the ring's last rank sees every shard, and the others wait for it anyway;
- of two different ranks' zigzag shards two tiles of equal size are visible (`tiles.py`).

The cost in accuracy: cuDNN returns a pair's output and gradients in 16 bits. The output is merged in float32 from partials that
were each rounded once; their weights sum to one, so the error does not grow with the ring. Each pair's share of the gradients is
rounded once before the shares are summed in float32.

cuDNN's backward sums dQ in any order, so two runs may differ in the last bits. The XLA option
``xla_gpu_exclude_nondeterministic_ops=True`` prevents this, at some cost.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Extras, Grads, Partial, Problem, Residuals, Runs, Scores
from jax_core.kernels.cudnn import calls, tiles

CONTINUES = True
HANDLES = frozenset("causal left logits_dtype fused_backward float16 bfloat16".split())


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    if any(number is not None for params in (forward, backward) for number in vars(params).values()):
        return "cuDNN chooses its tiles itself; leave fwd_params and bwd_params without numbers"
    checks = (_scores_reason, _mask_reason, _ring_reason, _length_reason)
    reason = next((reason for check in checks if (reason := check(problem))), None)
    return reason or calls.missing() or _dim_reason(problem)


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    del problem
    return FwdParams(), BwdParams()


def _scores_reason(problem: Problem) -> str | None:
    scores = problem.scores
    if scores.scale <= 0:
        return f"cuDNN's softmax needs a positive softmax_scale, got {scores.scale}"
    if scores.logits_dtype not in (None, "float32"):
        return f"cuDNN keeps logits in float32, got logits_dtype {scores.logits_dtype}"
    return None


def _mask_reason(problem: Problem) -> str | None:
    mask = problem.scores.mask
    if not mask.causal:
        return None if mask.left is None else "cuDNN's window is causal: causal=True"
    if _window(mask.left, problem.size * problem.q_length) is None:
        return None
    if problem.size > 1:
        return "the cuDNN kernel has no window in a ring"
    return "cuDNN's window needs as many keys as queries" if problem.q_length > problem.k_length else None


def _ring_reason(problem: Problem) -> str | None:
    if problem.size == 1 or not problem.scores.mask.causal:
        return None
    if problem.layout == "striped":
        return 'in a causal ring the cuDNN kernel needs layout="zigzag" or "contiguous", got "striped"'
    if problem.q_length != problem.k_length:
        lengths = f"{problem.q_length} and {problem.k_length}"
        return f"in a causal ring the cuDNN kernel needs query and key shards of one length, got {lengths}"
    return None


def _length_reason(problem: Problem) -> str | None:
    tiled = problem.size > 1 and problem.layout == "zigzag" and problem.scores.mask.causal
    if max(problem.q_length, problem.k_length) > (2 if tiled else 1):
        return None
    return "cuDNN's backward does not take a single query and a single key"


def _dim_reason(problem: Problem) -> str | None:
    dims, capability = (problem.dim, problem.value_dim), calls.capability()
    widest = 256 if capability // 10 == 9 else 128
    if any(dim % 8 for dim in dims):
        return f"cuDNN needs head dims that are multiples of 8, got {dims[0]} and {dims[1]}"
    if max(dims) > widest and (capability // 10 != 10 or dims != (192, 128)):
        return f"cuDNN's head dims on this GPU are at most {widest}, got {dims[0]} and {dims[1]}"
    if dims[0] != dims[1] and capability < 90:
        return f"cuDNN's value dim is its head dim on this GPU, got {dims[0]} and {dims[1]}"
    return None


def forward(
    q: Array,
    k: Array,
    v: Array,
    q_runs: Runs,
    k_runs: Runs,
    *,
    diagonal: bool,
    scores: Scores,
    extras: Extras,
    carry: Partial | None,
    out_dtype: DTypeLike,
    config: FwdParams,
) -> Partial:
    del extras, config  # unsupported() refuses any
    before = _before(q_runs, k_runs)
    if diagonal or not scores.mask.causal:
        found = [Partial(*calls.forward(q, k, v, **_settings(scores, q.shape[1])))]
    elif len(q_runs) == 1:
        out, lse = calls.forward(q, k, v, scale=scores.scale)
        found = [Partial(out, jnp.where(before, lse, -jnp.inf))]
    else:
        pieces = tiles.query_tiles(q, before), tiles.key_tiles(k, before), tiles.key_tiles(v, before)
        found = tiles.partials(*calls.forward(*pieces, scale=scores.scale), before)
    if carry is None:  # the first pair is the diagonal step
        return found[0]._replace(out=found[0].out.astype(out_dtype))
    return tiles.join([carry, *found], out_dtype)


def backward(
    q: Array,
    k: Array,
    v: Array,
    residuals: Residuals,
    q_runs: Runs,
    k_runs: Runs,
    *,
    diagonal: bool,
    scores: Scores,
    extras: Extras,
    dq: Array | None,
    fused: bool,
    deterministic: bool,
    config: BwdParams,
) -> Grads:
    del extras, fused, deterministic, config  # one sweep in any case
    before = _before(q_runs, k_runs)
    dout, lse = residuals.dout, residuals.lse  # every row sees a key, so the LSE is never +inf
    if diagonal or not scores.mask.causal:
        grads = _wide(calls.backward(q, k, v, residuals.out, dout, lse, **_settings(scores, q.shape[1])))
    elif len(q_runs) == 1:
        grads = _wide(calls.backward(q, k, v, residuals.out, dout, lse, scale=scores.scale))
        # A select, not a product with 0: the weights of hidden keys may be infinite, since the LSE does not include them.
        grads = tuple(jnp.where(before, grad, 0) for grad in grads)
    else:
        queries, out, dout = (tiles.query_tiles(x, before) for x in (q, residuals.out, dout))
        keys, values = (tiles.key_tiles(x, before) for x in (k, v))
        found = calls.backward(queries, keys, values, out, dout, tiles.row_tiles(lse, before), scale=scores.scale)
        grads = tiles.query_gradient(found[0], before), *(tiles.key_gradient(grad, before) for grad in found[1:])
    share, dk, dv = grads
    return Grads(share if dq is None else dq + share, dk, dv, None, None)


def _before(q_runs, k_runs):
    """Do the keys come before the queries in the sequence? (The first runs decide it in both layouts.)"""
    return k_runs[0].start < q_runs[0].start


def _settings(scores: Scores, q_length: int) -> dict[str, Any]:
    """The settings of a call over whole shards: a rank's own, or two that are fully visible to each other."""
    return dict(scale=scores.scale, causal=scores.mask.causal, window=_window(scores.mask.left, q_length))


def _window(left: int | None, q_length: int) -> int | None:
    """The number of keys that a query sees, including its own, or None if the window hides none."""
    return None if left is None or left >= q_length - 1 else left + 1


def _wide(grads) -> tuple[jax.Array, ...]:
    return tuple(grad.astype(jnp.float32) for grad in grads)
