"""``explain`` says what the call runs, and of everything else what an explicit request for it would be told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jax_core import explain, ring_attention
from jax_core.request.dispatch import KERNELS, STRATEGIES

BATCH, SEQ, HEADS, KV_HEADS, DIM = 2, 64, 4, 4, 8
Q, K = (jax.ShapeDtypeStruct((BATCH, SEQ, heads, DIM), jnp.float32) for heads in (HEADS, KV_HEADS))
# What a strategy sends by, in the program as it is lowered.
COLLECTIVES = {"ring": {"collective_permute"}, "all_gather": {"all_gather"}, "ulysses": {"all_to_all"}}
CASES = {
    "plain": {},
    "causal": {"causal": True, "layout": "zigzag"},
    "window": {"causal": True, "sliding_window": (5, 0)},
    "soft cap, ring": {"logits_soft_cap": 3.0, "strategy": "ring"},
    "all-gather": {"causal": True, "strategy": "all_gather"},
    "ulysses": {"causal": True, "strategy": "ulysses", "platform": "xla"},
}


def mesh(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple("ab"[: len(sizes)]))


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_it_names_what_the_program_does(options):
    found = explain(Q, K, K, mesh=mesh(4), **options)
    assert (found.strategy, found.kernel) == (options.get("strategy", "ring"), "xla")
    lowered = jax.jit(lambda q, k: ring_attention(q, k, k, mesh=mesh(4), **options)).lower(Q, K).as_text()
    sent = {name for names in COLLECTIVES.values() for name in names if f"stablehlo.{name}" in lowered}
    assert sent == COLLECTIVES[found.strategy]
    assert found.forward.sent > 0 and found.backward.sent > found.forward.sent


def test_the_bytes_of_a_ring():
    """Three hops of K and V; in the backward as many, with float32 sums, which go home as K and V are."""
    found = explain(Q, K, K, mesh=mesh(4), strategy="ring")
    shard = BATCH * SEQ // 4 * KV_HEADS * DIM * 4
    assert (found.forward.sent, found.backward.sent) == (3 * 2 * shard, 3 * 2 * 2 * shard + 2 * shard)
    assert found.given == 4 * shard + BATCH * SEQ // 4 * HEADS * 4
    assert explain(Q, K, K).forward == (0, 0)


@pytest.mark.parametrize("options", [{}, {"causal": True, "layout": "striped"}, {"dropout_prob": 0.5, "dropout_seed": 3}], ids=str)
def test_the_others_reasons_are_those_of_a_call_that_names_them(options):
    found = explain(Q, K, K, mesh=mesh(4), **options)
    assert {*found.strategies, found.strategy} == set(STRATEGIES) and {*found.kernels, found.kernel} == set(KERNELS)
    for kind, reasons in (("strategy", found.strategies), ("platform", found.kernels)):
        for name, reason in reasons.items():
            if reason is None:
                assert explain(Q, K, K, mesh=mesh(4), **options, **{kind: name})
                continue
            with pytest.raises(NotImplementedError) as refused:
                explain(Q, K, K, mesh=mesh(4), **options, **{kind: name})
            assert reason in str(refused.value)


def test_it_is_read():
    text = str(explain(Q, K, K, mesh=mesh(2, 2), axis_name=("a", "b"), strategy="hierarchical", platform="xla"))
    first = "Attention is computed by the hierarchical strategy with the xla kernel, over 4 ranks.\n"
    ranks = first + "ranks     4 (each has a part of the sequence)\n"
    assert text.startswith(ranks + "strategy  hierarchical\nkernel    xla (named by the call)\n"), text
    assert '\n  pallas       the Pallas kernels need a TPU, and this program runs on "cpu"\n' in text
    empty = jax.ShapeDtypeStruct((0, SEQ, HEADS, DIM), jnp.float32)
    nothing = str(explain(empty, empty, empty))
    assert nothing.startswith("Nothing is computed: the batch or a sequence is empty.\n"), nothing
    assert "\nstrategy  nothing to compute\n" in nothing


def test_operands_may_be_shapes_and_errors_are_the_calls():
    sinks = jax.ShapeDtypeStruct((HEADS,), jnp.float32)
    assert explain(Q, K, K, sinks, causal=True).strategy == "ring"
    with pytest.raises(ValueError, match="strategy must be one of auto"):
        explain(Q, K, K, strategy="rings")
