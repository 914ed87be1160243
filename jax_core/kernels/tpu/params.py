"""What the Pallas kernels handle, without loading Pallas: block sizes by TPU generation and head dim, as data, and limits, of which
some are those of all these kernels, whether they compute a pair of shards or a whole ring."""

from typing import NamedTuple

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import ANY_SCORE, Problem
from jax_core.masks.layout import runs

MIB = 2**20
LANES = 128  # block sizes are multiples of it
WIDEST = 256
PRECISIONS = ("default", "fastest", "bfloat16", "highest", "float32")
_LISTED = 250_000  # words of 4 bytes, in 1 MiB
_DTYPES = ("bfloat16", "float32")  # a TPU has no float16
CONTINUES = True
CAPABILITIES = ANY_SCORE | frozenset("keys apart fused_backward deterministic bfloat16 float32".split())


def missing(backend: str) -> str | None:
    """Why no Pallas kernel can run on ``backend``, in words, or None."""
    return None if backend == "tpu" else f'the Pallas kernels need a TPU, and this program runs on "{backend}"'


def unsupported(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    if problem.scores.logits_dtype not in (None, *_DTYPES):
        return f"logits_dtype is one of {', '.join(_DTYPES)}, got {problem.scores.logits_dtype}"
    reason = problem_reason(problem) or missing(problem.backend)
    reason = reason or params_reason("fwd_params", forward) or params_reason("bwd_params", backward)
    return reason or _list_reason(problem, forward, backward)


def _list_reason(problem: Problem, forward: FwdParams, backward: BwdParams) -> str | None:
    per_entry = problem.features & {"q_segment_ids", "q_position_ids", "mask"} or problem.scores.predicates
    for name, part in (("fwd_params", forward), ("bwd_params", backward)):
        lengths = problem.q_length, problem.k_length
        # A run may end within a block.
        more = len(runs(problem.layout, 0, problem.size, problem.q_length)) - 1
        q, k = (-(-length // size) + more for length, size in zip(lengths, block_sizes(part), strict=True))
        pairs = q * k * (problem.batch if per_entry else 1)
        if pairs > _LISTED:
            return f"{name}: a TPU's scalar memory lists {_LISTED} pairs of blocks, got {pairs}; give larger blocks"
    return None


def problem_reason(problem: Problem) -> str | None:
    """Why no TPU kernel computes this, in words, or None."""
    if max(problem.dim, problem.value_dim) > WIDEST:
        return f"head dims are at most {WIDEST}, got {problem.dim} and {problem.value_dim}"
    if problem.scores.precision_name not in (None, *PRECISIONS):
        return f"it multiplies in one of the precisions {', '.join(PRECISIONS)}, got {problem.scores.precision}"
    return None


def params_reason(name: str, params: FwdParams) -> str | None:
    """Why no TPU kernel takes ``params`` (called ``name`` in the config), or None."""
    if params.num_stages is not None or params.num_warps is not None:
        return f"{name}: kernels for TPUs have no stages or warps; leave num_stages and num_warps None"
    sizes = block_sizes(params)
    if any(size % LANES for size in sizes):
        return f"{name}: block sizes must be multiples of {LANES}, got {sizes[0]} x {sizes[1]}"
    return None


def block_sizes(params: FwdParams) -> tuple[int, int]:
    """The block sizes of queries and keys, from complete parameters."""
    assert params.q_blocksize is not None and params.kv_blocksize is not None
    return params.q_blocksize, params.kv_blocksize


def fitting(size: int, length: int) -> int:
    """The block size, no longer than ``length`` positions need."""
    return min(size, -(-length // LANES) * LANES)


class Row(NamedTuple):
    """Blocks of queries x keys for head dims up to ``dim``."""

    dim: int
    forward: tuple[int, int]
    backward: tuple[int, int]


class Generation(NamedTuple):
    """``names``: JAX's names for the devices. ``memory``: bytes of VMEM that a kernel may use."""

    names: tuple[str, ...]
    memory: int
    rows: tuple[Row, ...]


# No kernel of this library was timed on a TPU. Published settings of splash attention are 512 to 2048; a visit has an overhead of
# about 0.35 us, so the faster the matrix products, the larger the blocks. All of them fit (test_tpu_program.py).
GENERATIONS = (
    Generation(("TPU v5 lite", "TPU v5e"), 96 * MIB, (Row(128, (512, 1024), (512, 512)), Row(256, (512, 512), (512, 512)))),
    Generation(("TPU v6 lite", "TPU v6e"), 96 * MIB, (Row(128, (1024, 1024), (512, 1024)), Row(256, (512, 1024), (512, 512)))),
    Generation(("TPU7x", "TPU v7x"), 48 * MIB, (Row(128, (1024, 1024), (512, 1024)), Row(256, (512, 1024), (512, 512)))),
    Generation(("TPU v5", "TPU v5p"), 48 * MIB, (Row(128, (512, 1024), (512, 512)), Row(256, (512, 512), (512, 512)))),
    Generation(("TPU v4",), 12 * MIB, (Row(128, (512, 512), (256, 512)), Row(256, (256, 512), (256, 256)))),
)


def generation(name: str) -> Generation:
    """The generation of a device; an unknown one counts as the one with the least memory."""
    return next((each for each in GENERATIONS if name in each.names), GENERATIONS[-1])


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    if missing(problem.backend):
        return FwdParams(LANES, LANES), BwdParams(LANES, LANES)  # not used: unsupported() says why
    rows = generation(problem.generation).rows
    row = next((row for row in rows if max(problem.dim, problem.value_dim) <= row.dim), rows[-1])
    smaller = 2 if problem.dtype == "float32" else 1  # full precision takes six products instead of one
    return FwdParams(*(size // smaller for size in row.forward)), BwdParams(*(size // smaller for size in row.backward))


# Published settings of splash attention, and what lies between them.
CANDIDATES = (
    (256, 256), (256, 512), (512, 256), (512, 512), (512, 1024), (1024, 512), (1024, 1024), (512, 2048), (1024, 2048), (2048, 1024),
)  # fmt: skip


def configs(problem: Problem) -> tuple[tuple[FwdParams, ...], tuple[BwdParams, ...]]:
    listed = [(q, k) for q, k in CANDIDATES if q <= max(256, problem.q_length) and k <= max(256, problem.k_length)]
    return tuple(FwdParams(*blocks) for blocks in listed), tuple(BwdParams(*blocks) for blocks in listed)
