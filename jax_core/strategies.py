"""How a sequence that is split over ranks is attended to: by the ring of ``ring.py`` around a kernel, or by the ring inside one."""

from typing import Literal, NamedTuple, get_args

import jax

from jax_core.block import Problem
from jax_core.config import BwdParams, FwdParams, RingAttentionConfig
from jax_core.kernels import fused
from jax_core.kernels.fused.plan import journey
from jax_core.platforms import Choice, check_backend, choose_kernel

Strategy = Literal["auto", "ring", "fused"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)

_WIDEST = 256
_LANES = 128
_PRECISIONS = ("default", "fastest", "bfloat16", "highest", "float32")
_CANNOT = {"bias": "a bias", "mask": "a boolean mask", "q_position_ids": "position ids", "alibi_slopes": "ALiBi"}


class Wish(NamedTuple):
    """What the caller said of strategy and kernel. ``torus``: the ranks are a ring of the topology (torus.py)."""

    strategy: str
    platform: str | None
    cfg: RingAttentionConfig | None
    fused_backward: bool
    torus: bool


def choose_strategy(wish: Wish, problem: Problem) -> tuple[str, Choice]:
    """``("ring" | "fused", choice)``. A named strategy runs or the error says why it cannot; "auto" fuses where the ring is one of
    the topology, no kernel was named, and the fused kernel can."""
    if wish.strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}; got {wish.strategy!r}")
    if wish.strategy == "fused" or (wish.strategy == "auto" and wish.torus and not _named(wish)):
        choice = _fused(wish, problem)
        reason = _reason(wish, problem, choice)
        if reason is None:
            return "fused", choice
        if wish.strategy == "fused":
            raise NotImplementedError(f'strategy="fused": {reason}; use strategy="ring"')
    return "ring", choose_kernel(wish.platform, wish.cfg, problem)


def _named(wish: Wish) -> set[str]:
    """The kernels that the caller named, which may be none."""
    names = wish.platform, wish.cfg.platform if wish.cfg else None
    return {name for name in names if name is not None and name != "auto"}


def _fused(wish: Wish, problem: Problem) -> Choice:
    given = wish.cfg or RingAttentionConfig()
    check_backend(given, problem.backend or jax.default_backend())
    forward, backward = default_params(problem)
    return fused, given.fwd_params.completed(forward), given.bwd_params.completed(backward)


def _reason(wish: Wish, problem: Problem, choice: Choice) -> str | None:
    if _named(wish) - {"pallas"}:
        return f"it has a kernel of its own, in Pallas, and is no ring around the one named ({', '.join(sorted(_named(wish)))})"
    if wish.fused_backward:
        return "its backward is two sweeps over the scores, so fused_backward=True cannot be honoured"
    return unsupported(problem, *choice[1:])


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    """Tiles of 512 x 512 and, in the backward, 256 x 512; less where half a shard is less."""
    q, k = (_up(-(-length // 2), _LANES) for length in (problem.q_length, problem.k_length))
    return FwdParams(min(q, 512), min(k, 512)), BwdParams(min(q, 256), min(k, 512))


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    """Why the fused kernel cannot compute this, in words, or None."""
    reasons = _machine_reason(problem), _request_reason(problem), _params_reason(forward, backward)
    return next((reason for reason in reasons if reason is not None), None)


def _machine_reason(problem: Problem) -> str | None:
    backend = problem.backend or jax.default_backend()
    if problem.size == 1:
        return "a ring of one rank sends nothing"
    if jax.dtypes.canonicalize_dtype("int64") == "int64":
        return "it counts in 32 bits, also segment ids, and JAX's 64-bit mode is on; leave jax_enable_x64 off"
    if backend not in ("tpu", "cpu"):
        return f'it sends from TPU to TPU (a CPU interprets it, slowly), and these arrays are on "{backend}"'
    if backend == "cpu" and jax.process_count() > 1:
        return "the interpreter that stands for a TPU on CPUs knows the devices of one process only"
    return None


def _request_reason(problem: Problem) -> str | None:
    scores = problem.scores
    if problem.dtype not in ("float32", "bfloat16"):
        return f"it takes float32 and bfloat16, got {problem.dtype}"
    if max(problem.dim, problem.value_dim) > _WIDEST:
        return f"head dims are at most {_WIDEST}, got {problem.dim} and {problem.value_dim}"
    for name, words in _CANNOT.items():
        if name in problem.extras:
            return f"it cannot have {words}"
    if scores.predicates or scores.dropout_prob:
        return "it cannot have " + ("mask functions" if scores.predicates else "dropout")
    if scores.logits_dtype is not None:
        return "its logits are float32; leave logits_dtype None"
    if scores.precision_name not in (None, *_PRECISIONS):
        return f"it multiplies in one of the precisions {', '.join(_PRECISIONS)}, got {scores.precision}"
    _, hops = journey(scores.mask, problem.layout, problem.size, problem.q_length, problem.k_length)
    return None if hops else "no rank sees another's keys under this mask, so there is nothing to send"


def _params_reason(forward: FwdParams, backward: BwdParams) -> str | None:
    for params in (forward, backward):
        if params.num_stages is not None or params.num_warps is not None:
            return "it has no stages or warps; leave num_stages and num_warps None"
        sizes = params.q_blocksize, params.kv_blocksize
        if any(size is None or size % _LANES for size in sizes):
            return f"block sizes must be multiples of {_LANES}, got {sizes[0]} x {sizes[1]}"
    return None
