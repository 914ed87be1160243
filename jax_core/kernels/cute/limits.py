"""What flash-attn-4's kernels take, and the reasons in words for what they do not."""

import math

from jax_core import operands
from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Problem
from jax_core.kernels.cute import calls
from jax_core.kernels.cute.block_sparse import QUERY_BLOCK
from jax_core.kernels.cute.rectangles import is_within, needs_lists
from jax_core.kernels.cute.tiles import TILES
from jax_core.masks.layout import run_length

CAPABILITIES = frozenset(
    "causal left right chunk keys any_position softcap predicates logits_dtype mask q_segment_ids kv_segment_ids q_position_ids "
    "kv_position_ids plan origin lse_gradient fused_backward deterministic float16 bfloat16".split()
)
_DATA = frozenset("mask q_segment_ids kv_segment_ids q_position_ids kv_position_ids".split())
_SEGMENTS = frozenset(("q_segment_ids", "kv_segment_ids"))
_IDS = _SEGMENTS | {"q_position_ids", "kv_position_ids"}


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    if any(number is not None for params in (forward, backward) for number in vars(params).values()):
        return "flash-attn-4's tiles are chosen by head dim; leave fwd_params and bwd_params without numbers"
    reason = _dim_reason(problem) or _scores_reason(problem) or _list_reason(problem)
    return reason or calls.missing(problem.backend, problem.capability) or _length_reason(problem)


def listed(problem: Problem) -> bool:
    if takes_documents(problem):
        return False
    has_data = bool(problem.features & _DATA)
    return needs_lists(problem.scores, has_data, problem.size == 1, problem.q_length == problem.k_length, _scattered(problem))


def takes_documents(problem: Problem) -> bool:
    """Whether the documents are rectangles of scores. The rows of a shard must ascend without gaps but one, in the middle, or, of
    one batch entry, be pieces of documents."""
    alone, mask, ids = problem.size == 1, problem.scores.mask, _IDS if problem.placed else _SEGMENTS
    others, in_order = problem.features & (_DATA - ids), alone or problem.layout in ("contiguous", "zigzag")
    if not 0 < problem.documents <= operands.MOST_DOCUMENTS or problem.q_length != problem.k_length or not in_order:
        return False
    plain = (
        mask.chunk is None
        and (problem.batch == 1 or not problem.placed)
        and mask.keys is None
        and not problem.scores.predicates
        and not others
    )
    return plain and mask.any_position == problem.placed and (alone or (mask.causal and mask.left is None and mask.right is None))


def _scattered(problem: Problem) -> bool:
    return problem.size > 1 and not isinstance(problem.layout, str)


def _dim_reason(problem: Problem) -> str | None:
    dims = problem.dim, problem.value_dim
    if any(dim % 8 or not 8 <= dim <= 256 for dim in dims):
        return f"flash-attn-4's head dims are multiples of 8 from 8 to 256, got {dims[0]} and {dims[1]}"
    if dims[0] != dims[1] and problem.heads != problem.kv_heads:
        return f"flash-attn-4's backward with shared K/V heads needs a value dim equal to the head dim, got {dims[0]} and {dims[1]}"
    return None


def _scores_reason(problem: Problem) -> str | None:
    if problem.scores.logits_dtype not in (None, "float32"):
        return f"flash-attn-4 keeps logits in float32, got logits_dtype {problem.scores.logits_dtype}"
    if problem.scores.scale <= 0:
        return f"flash-attn-4's softmax needs a positive softmax_scale, got {problem.scores.scale}"
    return None


def _list_reason(problem: Problem) -> str | None:
    mask = problem.scores.mask
    if not listed(problem):
        if mask.causal and problem.size > 1 and problem.layout == "striped":
            return 'in a causal ring flash-attn-4 needs layout="zigzag" or "contiguous", got "striped"'
        return None
    if problem.layout == "striped" and problem.size > 1:
        return 'with layout="striped" every block is partly visible, which flash-attn-4 judges pair by pair; use another layout'
    if mask.any_position and mask.chunk is not None:
        return "flash-attn-4 takes chunk_size without position ids only"
    if "deterministic" in problem.features:
        return "flash-attn-4's backward over lists of blocks is not deterministic"
    return None


def _length_reason(problem: Problem) -> str | None:
    """Blocks and tiles must not span two runs of a shard."""
    if problem.size == 1 or (problem.placed and takes_documents(problem)) or not (problem.scores.mask.causal or listed(problem)):
        return None
    tiles = TILES[problem.capability]
    backward = tiles.backward(problem.dim, problem.value_dim, True, listed(problem))
    if is_within(problem.scores.mask) and not listed(problem):
        more = problem.k_length - problem.q_length
        reason = f"flash-attn-4 needs a multiple of {backward.tile_n} keys beside those of the queries here, got {more}"
        return reason if more % backward.tile_n else None
    if listed(problem):
        forward = tiles.forward(problem.dim, problem.value_dim, True, True)
        multiple = math.lcm(QUERY_BLOCK, forward.tile_n, backward.tile_n)
    else:
        multiple = backward.tile_m
    lengths = {problem.q_length, problem.k_length} if listed(problem) else {problem.q_length}
    came = f"here, got {' and '.join(map(str, sorted(lengths)))}"
    if _scattered(problem):
        run = run_length(problem.layout, problem.size, problem.q_length)
        reason = f"in a plan flash-attn-4 needs pieces of a multiple of {multiple} positions here, got {run}; balance takes piece="
        return reason if run % multiple and listed(problem) else None
    if problem.layout == "zigzag" and any(length // 2 % multiple for length in lengths):
        return f"in zigzag flash-attn-4 needs shards of a multiple of {2 * multiple} positions {came}"
    if not listed(problem) and problem.batch > 1 and problem.q_length % multiple:
        return f"with several batch entries flash-attn-4 needs shards of a multiple of {multiple} positions {came}"
    return None
