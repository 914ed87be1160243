"""Block sizes of the Pallas kernels by TPU generation and head dim, as data."""

from typing import NamedTuple

from jax_core.config import BwdParams, FwdParams
from jax_core.kernels.contract import Problem

MIB = 2**20


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
    return next((found for found in GENERATIONS if name in found.names), GENERATIONS[-1])


def default_params(problem: Problem) -> tuple[FwdParams, BwdParams]:
    rows = generation(problem.generation).rows
    row = next((row for row in rows if max(problem.dim, problem.value_dim) <= row.dim), rows[-1])
    smaller = 2 if problem.dtype == "float32" else 1  # full precision takes six products instead of one
    return FwdParams(*(size // smaller for size in row.forward)), BwdParams(*(size // smaller for size in row.backward))


# Published settings of splash attention, and what lies between them.
CANDIDATES = (
    (256, 256), (256, 512), (512, 256), (512, 512), (512, 1024), (1024, 512), (1024, 1024), (512, 2048), (1024, 2048), (2048, 1024),
)  # fmt: skip


def configs(problem: Problem) -> tuple[tuple[FwdParams, ...], tuple[BwdParams, ...]]:
    fitting = [(q, k) for q, k in CANDIDATES if q <= max(256, problem.q_length) and k <= max(256, problem.k_length)]
    return tuple(FwdParams(*blocks) for blocks in fitting), tuple(BwdParams(*blocks) for blocks in fitting)
