"""A ring of hosts around rings of ranks: against the oracle, what it visits, and what its program sends over which links."""

import math
import re
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import BIAS, CAUSAL, PACKED, SINKS, Case
from hlo import computations, gathers, runs, without_a_kernel
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle_assertions import assert_ring_is_like_the_oracle

from jax_core import BwdParams, FwdParams, RingAttentionConfig
from jax_core.masks.layout import runs as runs_of
from jax_core.masks.static import Mask, empty
from jax_core.operands import Operands
from jax_core.options import Options, Placement
from jax_core.request.spec import make_spec
from jax_core.strategies.hierarchical.schedule import HostStep, host_steps, way_home
from jax_core.strategies.rotation import Step
from jax_core.strategies.visibility import visible_shifts

WINDOW = {"sliding_window": (9, 0)}
HIERARCHICAL = {"strategy": "hierarchical"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("2 x 4", axes=(2, 4), ring=8, layout="zigzag", queries=6, options=CAUSAL, arrays=PACKED | BIAS),
        Case("4 x 2, a shard back", axes=(4, 2), ring=8, queries=8, options=WINDOW, arrays=SINKS),
        Case("4 x 2", axes=(4, 2), ring=8, queries=5, keys=7, layout="striped", options=CAUSAL, dtype="bfloat16"),
        Case("1 x 4", axes=(1, 4), ring=4, queries=7, layout="striped", options=CAUSAL),
        Case("4 x 1", axes=(4, 1), ring=4, queries=10, layout="zigzag", options=CAUSAL, arrays=SINKS),
    ],
    ids=lambda case: case.name,
)
def test_against_the_oracle(case: Case):
    case = replace(case, batch=1, kv_heads=2, block=8, settings=HIERARCHICAL)
    assert_ring_is_like_the_oracle(case)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(
    "mask", [Mask(), Mask(causal=True), Mask(left=3, right=0), Mask(causal=True, left=9), Mask(chunk=16)], ids=str
)
@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (3, 1)])
def test_visits_what_a_rank_may_see_and_nothing_else(sizes, mask, layout):
    hosts, ranks = sizes
    size, length = hosts * ranks, 4

    def sees(rank: int, owner: int) -> bool:
        held = (runs_of(layout, r, size, length) for r in (rank, owner))
        return not all(empty(mask, *pair) for pair in product(*held))

    def owner(rank: int, shift: tuple[int, int]) -> int:
        return (rank // ranks - shift[0]) % hosts * ranks + (rank - shift[1]) % ranks

    shifts = visible_shifts(mask, layout, sizes, length, length)
    every = list(product(range(hosts), range(ranks)))
    assert shifts == [s for s in every if s == (0, 0) or any(sees(rank, owner(rank, s)) for rank in range(size))]


def test_the_steps_of_a_whole_tour():
    """Three hosts of two ranks: keys go from the first step for a host to the first for the next, sums from last to last."""
    shifts = tuple(product(range(3), range(2)))
    within, on = (Step(0, 1), Step(1, 0)), (1, 0)
    assert host_steps(shifts) == [HostStep(0, within, None, on), HostStep(0, within, on, on), HostStep(0, within, on, None)]
    assert way_home(shifts, (3, 2)) == (1, 1)


def test_the_steps_of_a_window():
    """One shard back: the first rank of a host needs the last one's of the host before, and all take the same way."""
    shifts = visible_shifts(Mask(left=3, right=0), "contiguous", (4, 2), 4, 4)
    assert shifts == [(0, 0), (0, 1), (1, 1)]
    assert host_steps(shifts) == [HostStep(0, (Step(0, 1), Step(1, 0)), None, (1, 1)), HostStep(1, (Step(0, 0),), (1, 0), None)]
    assert way_home(shifts, (4, 2)) == (3, 1)


CONFIG = RingAttentionConfig(FwdParams(64, 64), BwdParams(64, 64))
TOKENS, HEADS, DIM = 256, 2, 32  # of a shard
SHARD = 2 * TOKENS * HEADS * DIM  # words of K/V, or of dK/dV
SIZES = pytest.mark.parametrize("sizes", [(2, 4), pytest.param((4, 2), marks=pytest.mark.slow)])


@cache
def compiled(sizes: tuple[int, int], backward: bool, **options):
    """The forward or the backward alone."""
    axes, size = ("host", "rank"), math.prod(sizes)
    mesh = jax.make_mesh(sizes, axes, devices=jax.devices()[:size], axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def local(*arrays):
        options_ = Options(cfg=CONFIG, strategy="hierarchical", **options)
        spec, operands = make_spec(options_, Operands(*arrays[:3]), Placement(axes, size, sizes=sizes))
        if not backward:
            return spec.strategy.forward(spec, operands)[0]
        return spec.strategy.backward(spec, operands, *arrays[3:])[:3]

    rows, lse_rows = P(None, axes), P(None, None, axes)
    shard = jax.ShapeDtypeStruct((1, size * TOKENS, HEADS, DIM), jnp.float32, sharding=NamedSharding(mesh, rows))
    lse = jax.ShapeDtypeStruct((1, HEADS, size * TOKENS), jnp.float32, sharding=NamedSharding(mesh, lse_rows))
    arrays = [shard] * 3 + ([shard, lse, shard] if backward else [])
    specs = tuple(array.sharding.spec for array in arrays)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)).lower(*arrays).compile()


class Sent(NamedTuple):
    """What each rank sends, in shards: within its host, and to another."""

    within: float
    between: float


def sent(program, ranks: int) -> Sent:
    found = {True: 0.0, False: 0.0}
    for _, times, ops in runs(program):
        for op in ops:
            if op.is_rotation:
                pairs = np.array(re.findall(r"\{(\d+),(\d+)\}", op.text.split("source_target_pairs=")[1]), int)
                crosses = set((pairs[:, 0] // ranks != pairs[:, 1] // ranks).tolist())
                assert len(crosses) == 1, op.text
                found[crosses.pop()] += times * int(re.search(r"u32\[(\d+)\]", op.types)[1]) / SHARD
    return Sent(found[False], found[True])


@SIZES
def test_keys_cross_to_each_other_host_once_and_gradients_once_more(sizes):
    """Within a host K/V and dK/dV turn once for each host, but for the last hop; dK/dV go home by one more between hosts."""
    hosts, ranks = sizes
    turns = hosts * (ranks - 1)
    forward, backward = (computations(compiled(sizes, backward).as_text()) for backward in (False, True))
    assert sent(forward, ranks) == (turns, hosts - 1)
    assert sent(backward, ranks) == (2 * turns, hosts - 1 + hosts)
    assert gathers(forward) == gathers(backward) == []


def test_a_window_crosses_once():
    """One shard back, in two pieces, as there are two steps within the host."""
    program = computations(compiled((2, 4), False, sliding_window=(TOKENS, 0)).as_text())
    assert sent(program, 4) == (1, 1)


@SIZES
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_kernel_runs_beside_every_transfer(sizes, backward):
    """But for the last one of the backward, which brings dK/dV home. So a piece that crosses leaves at least a step before the
    steps for the next host, which wait for it."""
    program = computations(compiled(sizes, backward).as_text())
    last = [op.name for op in program["ENTRY"] if op.is_rotation][-1]
    assert without_a_kernel(program) == ([f"ENTRY: {last}"] if backward else [])
