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

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Unpack

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Grads, KernelConfig, Pair, Partial, Problem, Residuals, Scores
from jax_core.kernels.cudnn import calls, tiles
from jax_core.kernels.merge import join

CONTINUES = True
CAPABILITIES = frozenset("causal left logits_dtype fused_backward float16 bfloat16".split())
# Query rows of all heads in a call of a divided backward: eight blocks of 128 rows for each of an H200's multiprocessors.
ROWS_OF_A_CALL = 2**17
MOST_GROUPS = 4  # each call is compiled


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    if any(number is not None for params in (forward, backward) for number in vars(params).values()):
        return "cuDNN chooses its tiles itself; leave fwd_params and bwd_params without numbers"
    checks = (_scores_reason, _mask_reason, _ring_reason, _length_reason)
    reason = next((reason for check in checks if (reason := check(problem))), None)
    return reason or calls.missing(problem.backend, problem.capability) or _dim_reason(problem)


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
    dims, capability = (problem.dim, problem.value_dim), problem.capability
    widest = 256 if capability // 10 == 9 else 128
    if any(dim % 8 for dim in dims):
        return f"cuDNN needs head dims that are multiples of 8, got {dims[0]} and {dims[1]}"
    if max(dims) > widest and (capability // 10 != 10 or dims != (192, 128)):
        return f"cuDNN's head dims on this GPU are at most {widest}, got {dims[0]} and {dims[1]}"
    if dims[0] != dims[1] and capability < 90:
        return f"cuDNN's value dim is its head dim on this GPU, got {dims[0]} and {dims[1]}"
    return None


def forward(pair: Pair, carry: Partial | None, out_dtype: DTypeLike, config: KernelConfig[FwdParams]) -> Partial:
    del config  # unsupported() refuses any, as it does extras
    (q, k, v), scale, before = pair.shards, pair.scores.scale, _before(pair)
    if pair.diagonal or not pair.scores.mask.causal:
        partials = [Partial(*calls.forward(q, k, v, **_settings(pair)))]
    elif len(pair.q_runs) == 1:
        out, lse = calls.forward(q, k, v, scale=scale)
        partials = [Partial(out, jnp.where(before, lse, -jnp.inf))]
    else:
        q, carry = lax.optimization_barrier((q, carry))  # or the tiles of all steps would be gathered first
        pieces = tiles.query_tiles(q, before), tiles.key_tiles(k, before), tiles.key_tiles(v, before)
        partials = tiles.partials(*calls.forward(*pieces, scale=scale), before)
    if carry is None:  # the first pair is the diagonal step
        return partials[0]._replace(out=partials[0].out.astype(out_dtype))
    return join([carry, *partials], out_dtype)


def backward(pair: Pair, residuals: Residuals, dq: Array | None, config: KernelConfig[BwdParams]) -> Grads[Array]:
    del config  # one sweep in any case
    # Every row sees a key, so the LSE is never +inf.
    operands = _Operands(*pair.shards, residuals.out, residuals.dout, residuals.lse)
    scale, before = pair.scores.scale, _before(pair)
    share: Callable[[_Operands], tuple[Array, ...]]
    if pair.diagonal or not pair.scores.mask.causal:
        share = partial(_whole, **_settings(pair))
    elif len(pair.q_runs) == 1:
        share = partial(_whole_or_nothing, before, scale=scale)
    else:
        share = partial(_two_tiles, before, scale=scale)
    dq, dk, dv = share(operands) if dq is None else _by_heads(share, operands, dq, _head_groups(pair.q, pair.k))
    return Grads(dq, dk, dv, None, None)


class _Operands(NamedTuple):
    """Of a pair's backward; all but ``lse``, ``[batch, heads, length]``, are ``[batch, length, heads, dim]``."""

    q: Array
    k: Array
    v: Array
    out: Array
    dout: Array
    lse: Array


def _whole(operands: _Operands, **settings: Unpack[calls.Settings]) -> tuple[Array, ...]:
    return tuple(grad.astype(jnp.float32) for grad in calls.backward(*operands, **settings))


def _whole_or_nothing(before: Array, operands: _Operands, **settings: Unpack[calls.Settings]) -> tuple[Array, ...]:
    # A select, not a product with 0: the weights of hidden keys may be infinite, since the LSE does not include them.
    return tuple(jnp.where(before, grad, 0) for grad in _whole(operands, **settings))


def _two_tiles(before: Array, operands: _Operands, **settings: Unpack[calls.Settings]) -> tuple[Array, ...]:
    queries, out, dout = (tiles.query_tiles(x, before) for x in (operands.q, operands.out, operands.dout))
    keys, values = (tiles.key_tiles(x, before) for x in (operands.k, operands.v))
    dq, dk, dv = calls.backward(queries, keys, values, out, dout, tiles.row_tiles(operands.lse, before), **settings)
    return tiles.query_gradient(dq, before), tiles.key_gradient(dk, before), tiles.key_gradient(dv, before)


def _by_heads(
    pair: Callable[[_Operands], tuple[Array, ...]], operands: _Operands, dq: Array, groups: int
) -> tuple[Array, Array, Array]:
    """``dq`` with the pair's share, and the pair's ``dk`` and ``dv``, computed for one group of heads after the other: the gathered
    tiles, cuDNN's results and its scratch memory are then those of one group (benchmarks/gpu.md has their sizes)."""
    of_heads: list[tuple[Array, ...]] = []
    for group in range(groups):
        # Or the tiles of all groups, and of the next steps, would be gathered first.
        operands, dq, of_heads = lax.optimization_barrier((operands, dq, of_heads))
        share, dk, dv = pair(_of_group(operands, group, groups))
        dq = _add_to_heads(dq, share, group * share.shape[2])
        of_heads.append((dk, dv))
    dk, dv = (jnp.concatenate(grads, axis=2) for grads in zip(*of_heads, strict=True))
    return dq, dk, dv


def _of_group(operands: _Operands, group: int, groups: int) -> _Operands:
    axes = (2, 2, 2, 2, 2, 1)
    return _Operands(*(jnp.split(x, groups, axis)[group] for x, axis in zip(operands, axes, strict=True)))


def _add_to_heads(total: Array, share: Array, start: int) -> Array:
    place = lax.slice_in_dim(total, start, start + share.shape[2], axis=2)
    return lax.dynamic_update_slice_in_dim(total, place + share, start, axis=2)


def _head_groups(q: Array, k: Array) -> int:
    """Into how many groups of heads a pair's backward is divided: as many as leave each call enough rows to fill a GPU."""
    most = min(MOST_GROUPS, q.size // q.shape[3] // ROWS_OF_A_CALL)
    return max((groups for groups in range(1, most + 1) if k.shape[2] % groups == 0), default=1)


def _before(pair: Pair) -> Array:
    """Do the keys come before the queries in the sequence? (The first runs decide it in both layouts.)"""
    return pair.k_runs[0].start < pair.q_runs[0].start


def _settings(pair: Pair) -> calls.Settings:
    """The settings of a call over whole shards: a rank's own, or two that are fully visible to each other."""
    scores: Scores = pair.scores
    return dict(scale=scores.scale, causal=scores.mask.causal, window=_window(scores.mask.left, pair.q.shape[1]))


def _window(left: int | None, q_length: int) -> int | None:
    """The number of keys that a query sees, including its own, or None if the window hides none."""
    return None if left is None or left >= q_length - 1 else left + 1
