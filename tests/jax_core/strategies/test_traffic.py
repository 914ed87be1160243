"""What a strategy says that a pass sends, against the collectives of the pass as it is traced."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_core.operands import Operands
from jax_core.options import Options, Placement
from jax_core.request.dispatch import STRATEGIES
from jax_core.request.spec import make_problem, make_spec
from jax_core.strategies.transfers.traffic import Traffic

LENGTH, HEADS, KV_HEADS, DIM, VALUE_DIM = 256, 8, 4, 8, 16
MASKS = {"full": {}, "causal": dict(causal=True), "window": dict(causal=True, sliding_window=100)}
ON_TWO_AXES = {"ulysses_ring", "ring_ulysses", "hierarchical"}
TRACED = [name for name in STRATEGIES if name not in {"decode", "fused"}]
CASES = [(name, layout, mask) for name in TRACED for layout in ("contiguous", "zigzag", "striped") for mask in MASKS]
CASES += [("decode", "contiguous", "full")]


def placed(name: str) -> Placement:
    sizes = (2, 2) if name in ON_TWO_AXES else (4,)
    return Placement(("a", "b") if name in ON_TWO_AXES else "a", 4, sizes)


def traced(name: str, layout: str, mask: str, backward: bool) -> tuple[Traffic, int]:
    """What the strategy says, and the bytes that leave the rank that sends most."""
    options, place = Options(strategy=name, layout=layout, **MASKS[mask]), placed(name)
    shared = STRATEGIES[name].SHARED_QUERIES
    shapes = (4 if shared else LENGTH, HEADS, DIM), (LENGTH, KV_HEADS, DIM), (LENGTH, KV_HEADS, VALUE_DIM)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(place.sizes), ("a", "b")[: len(place.sizes)])
    rows = P(None, place.axis_name)
    specs = P() if shared else rows, rows, rows

    @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    def local(*arrays: jax.Array) -> jax.Array:
        spec, operands = make_spec(options, Operands(*arrays), place)
        out, lse = spec.strategy.forward(spec, operands)
        if not backward:
            return out.sum()
        # The results as if they came from elsewhere: what computed them is no part of the pass.
        out, lse = jnp.zeros(out.shape, out.dtype), jnp.zeros(lse.shape, lse.dtype)
        found = spec.strategy.backward(spec, operands, out, lse, out, lse)
        return sum(x.sum() for x in found[:3])

    shards = [jax.ShapeDtypeStruct((1, *shape), jnp.bfloat16) for shape in shapes]
    problem, _ = make_problem(options, Operands(*shards), place)
    whole = [x if spec == P() else x.update(shape=(1, 4 * LENGTH, *x.shape[2:])) for x, spec in zip(shards, specs, strict=True)]
    jaxpr = jax.make_jaxpr(local)(*whole).jaxpr
    sent: Counter[int] = Counter()
    for ranks, count in collectives(needed(jaxpr), mesh.shape):
        sent.update(dict.fromkeys(ranks, count))
    return STRATEGIES[name].traffic(problem, backward), max(sent.values(), default=0)


def needed(jaxpr: Any) -> Any:
    """Without what no result needs: the forward, where only the backward is asked for."""
    return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def collectives(jaxpr: Any, sizes: Mapping[str, int], times: int = 1) -> Iterator[tuple[list[int], int]]:
    """The ranks that each of them sends from, and how many bytes."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        size = times * sum(x.aval.size * x.aval.dtype.itemsize for x in equation.invars if hasattr(x.aval, "size"))
        axes = params.get("axis_name", params.get("axes", ()))
        ranks = math.prod(sizes[axis] for axis in (axes if isinstance(axes, tuple) else (axes,)) if axis in sizes)
        if name == "ppermute":
            yield from (([source], size) for source, target in params["perm"] if source != target)
        elif name == "all_gather":
            yield list(range(4)), size * (ranks - 1)
        elif name == "all_to_all":
            yield list(range(4)), size * (ranks - 1) // ranks
        elif name.startswith("psum"):
            yield list(range(4)), 2 * size * (ranks - 1) // ranks
        for inner in jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from collectives(getattr(inner, "jaxpr", inner), sizes, times * (params["length"] if name == "scan" else 1))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("name", "layout", "mask"), CASES)
def test_what_is_sent(name: str, layout: str, mask: str, backward: bool):
    said, found = traced(name, layout, mask, backward)
    assert found == said.sent > 0
    assert said.held > 0


def test_what_the_fused_ring_sends():
    """Its kernel sends by itself (``fused_ring.rotation``): halves of K/V as often as a ring does, sums home in float32."""
    shards = [jax.ShapeDtypeStruct((1, LENGTH, *rest), jnp.bfloat16) for rest in ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM))]
    keys = 2 * LENGTH * KV_HEADS * DIM * 2
    for mask, hops in (("full", 3), ("window", 1)):
        problem, _ = make_problem(Options(**MASKS[mask]), Operands(*shards), Placement("a", 4))
        assert STRATEGIES["fused"].traffic(problem, False) == (hops * keys, 2 * keys)
        assert STRATEGIES["fused"].traffic(problem, True) == (hops * keys + (hops + 1) * 2 * keys, 2 * keys + 3 * 2 * keys)
