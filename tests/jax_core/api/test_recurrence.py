"""Layers with a state on rings of JAX devices, beside the oracle: results and every gradient."""

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import quick_compiles
from jax.sharding import AxisType, Mesh, PartitionSpec
from state_cases import BATCH, CASES, CHUNK, LENGTH, ONE_OF_EACH, Case, cotangents, expected, ids_of, inputs, oracle

import jax_core
from jax_core.masks.layout import inverse_permutation, permutation
from jax_core.masks.plan import Plan

TIGHT = 1e-12
RECURRENCES = [name for name in ONE_OF_EACH if CASES[name].chunked]


def layout_of(name: str, size: int):
    """A plan's pieces follow each other neither on one rank nor from rank to rank."""
    if name != "plan":
        return name
    pieces = np.random.default_rng(size).permutation(3 * size).reshape(size, 3)
    return Plan(LENGTH // (3 * size), tuple(tuple(sorted(map(int, row))) for row in pieces))


def moved(tree, order):
    """The sequence dimension of every array that has one, in this order."""
    order = np.array(order)
    return jax.tree.map(lambda x: x[:, order] if x.ndim > 1 and x.shape[1] == LENGTH else x, tree)


def on_ring(case: Case, operands, state, given, size: int, layout, ids, **more):
    """``((y, last), (gradients, gradient of the state))``, in the order of the sequence."""
    mesh, layout = Mesh(np.array(jax.devices()[:size]), "ring"), layout_of(layout, size)
    here, back = permutation(layout, size, LENGTH), inverse_permutation(layout, size, LENGTH)
    settings = case.settings | ({"chunk_size": CHUNK, "strategy": "prefix"} if case.chunked else {}) | more
    operands, given = moved(operands, here), moved(given, here)
    ids = None if ids is None else moved(ids, here)

    @jax.jit
    def run(operands, state, ids):
        function = partial(getattr(jax_core, case.function), **settings, output_final_state=True, mesh=mesh, layout=layout)
        full = {name: operands.get(name) for name in case.shapes}
        return function(*full.values(), initial_state=state, segment_ids=ids)

    results, pull = jax.vjp(lambda operands, state: run(operands, state, ids), operands, state)
    gradients = pull(jax.tree.map(lambda x, like: x.astype(like.dtype), given, results))
    return moved(jax.device_get((results, gradients)), back)


@cache
def of_oracle(name: str, documents: str):
    return expected(CASES[name], ids_of(documents))


def compare(name: str, size: int, layout: str, documents: str):
    case = CASES[name]
    with jax.enable_x64(True), quick_compiles():
        got = on_ring(case, *inputs(case), cotangents(case), size, layout, ids_of(documents))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=TIGHT, atol=TIGHT * 10), got, of_oracle(name, documents))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_alone(name):
    compare(name, 1, "contiguous", "cuts")


@pytest.mark.wide
@pytest.mark.parametrize("documents", ["none", "cuts", "padding"])
@pytest.mark.parametrize(("size", "layout"), [(2, "contiguous"), (2, "zigzag"), (4, "plan"), (8, "zigzag")])
@pytest.mark.parametrize("name", [*ONE_OF_EACH, "conv-over-pieces"])
def test_on_a_ring(name, size, layout, documents):
    compare(name, size, layout, documents)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("size", "layout"), [(1, "contiguous"), (2, "contiguous"), (2, "zigzag"), (4, "contiguous"), (4, "zigzag"), (4, "plan")]
)
@pytest.mark.parametrize("name", ["conv-silu-bias", "conv-of-two", "conv-over-pieces", "delta-norm"])
def test_padding_is_as_if_it_were_not_there(name, size, layout):
    """The state goes on over padding, also over that of whole pieces, and is at the end that of the last document's tokens."""
    compare(name, size, layout, "holes")


@cache
def alone(name: str, documents: str):
    case = CASES[name]
    return on_ring(case, *inputs(case), cotangents(case), 1, "contiguous", ids_of(documents))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "size", "layout", "documents"),
    [
        *((name, 2, "zigzag", "padding") for name in RECURRENCES),
        *((name, 4, "plan", "cuts") for name in RECURRENCES),
        *(("gla", 4, "contiguous", "none"), ("ssd-skip", 2, "striped", "cuts")),
    ],
)
def test_by_heads(name, size, layout, documents):
    """To the bit what one device computes; on a ring of 4 with each of the 2 key heads on two devices."""
    case = CASES[name]
    with jax.enable_x64(True), quick_compiles():
        got = on_ring(case, *inputs(case), cotangents(case), size, layout, ids_of(documents), strategy="ulysses")
        one = alone(name, documents)
    jax.tree.map(np.testing.assert_array_equal, got[0], one[0])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=TIGHT, atol=TIGHT * 10), got, of_oracle(name, documents))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_many_chunks_on_few_cores():
    """A triangular solve of jaxlib's stood still here: its threads waited for each other."""
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.random(shape) / 8, jnp.float32) for shape in [(2, 512, 8, 64)] * 3 + [(2, 512, 8)] * 2]

    @jax.jit
    def gradients(q, k, v, g, beta):
        return jax.grad(lambda q, k, v: jax_core.gated_delta_rule(q, k, v, -g, beta).sum(), argnums=(0, 1, 2))(q, k, v)

    for _ in range(5):
        jax.block_until_ready(gradients(*operands))


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_another_document_moves_no_bit(name):
    """Of results and gradients, though both begin in one chunk: a sum that goes on over a document's start is rounded."""
    case, begin = CASES[name], 20
    ids = np.broadcast_to(np.arange(LENGTH) >= begin, (BATCH, LENGTH)).astype(np.int32)
    operands, state, given = jax.tree.map(lambda x: x.astype(np.float32), (*inputs(case), cotangents(case)))
    before = jax.tree.map(lambda x: np.arange(LENGTH).reshape(1, -1, *(1,) * (x.ndim - 2)) < begin, operands)
    others = jax.tree.map(lambda x, first: np.where(first, 1.5 * x, x) if _along(x) else x, operands, before)
    settings = {"chunk_size": 48} if case.chunked else {}
    with quick_compiles():
        one, other = (on_ring(case, x, state, given, 1, "contiguous", ids, **settings) for x in (operands, others))
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        if _along(a):
            assert np.array_equal(a[:, begin:], b[:, begin:]) and not np.array_equal(a, b)


def _along(x) -> bool:
    return x.ndim > 1 and x.shape[1] == LENGTH


@pytest.mark.wide
@pytest.mark.parametrize(("size", "layout"), [(1, "contiguous"), (2, "contiguous"), (4, "zigzag")])
@pytest.mark.parametrize(("name", "forgets"), [*product(["delta-norm", "kda", "retention", "gla"], [-1e9, -np.inf]), ("ssd", -1e9)])
def test_a_decay_that_leaves_nothing_of_the_state(name, forgets, size, layout):
    """In float32; in the sums of a chunk it would leave nothing of the decays after it, either."""
    case = CASES[name]
    operands, state = inputs(case, dtype=np.float32)
    given, decays = cotangents(case), operands["A" if name == "ssd" else "g"]
    decays[(slice(None), slice(None, None, 11)) if decays.ndim > 2 else 0] = forgets
    with quick_compiles():
        got = on_ring(case, operands, state, given, size, layout, None, chunk_size=16)
    with jax.enable_x64(True):
        exact, pull = jax.vjp(jax.jit(lambda *x: oracle(case, *x, None)), *jax.tree.map(np.float64, (operands, state)))
        exact = exact, pull(given)
    jax.tree.map(lambda x, exact: np.testing.assert_allclose(x, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max()), got, exact)


def test_cu_seqlens_are_ids():
    ends = np.array([0, 12, 13, 47, 80], np.int32)  # and padding after them
    ids = np.searchsorted(ends, np.arange(LENGTH), side="right") - 1
    ids = np.where(ids < len(ends) - 1, ids, -1)[None].astype(np.int32)
    case = CASES["simple-gla"]
    mesh, size = Mesh(np.array(jax.devices()[:4]), "ring"), 4
    (operands, _), order = inputs(case, dtype=np.float32), np.array(permutation("zigzag", size, LENGTH))
    operands = moved(operands, order)
    run = jax.jit(partial(jax_core.linear_attention, mesh=mesh, layout="zigzag", chunk_size=CHUNK))
    np.testing.assert_array_equal(run(**operands, cu_seqlens=ends), run(**operands, segment_ids=ids[:, order]))


@pytest.mark.wide
@pytest.mark.parametrize(("name", "strategy"), [*((name, "prefix") for name in ONE_OF_EACH), ("kda", "ulysses")])
def test_padding_may_hold_anything(name, strategy):
    """Also cotangents there; its gradients are 0."""
    case, ids = CASES[name], ids_of("padding")
    more = {"strategy": strategy} if case.chunked else {}
    operands, state = inputs(case, dtype=np.float32)
    given = tuple(x.astype(np.float32) for x in cotangents(case))
    spoilt = {name: spoil(x, ids) for name, x in operands.items()}
    with quick_compiles():
        clean = on_ring(case, operands, state, given, 2, "zigzag", ids, **more)
        dirty = on_ring(case, spoilt, state, (spoil(given[0], ids), given[1]), 2, "zigzag", ids, **more)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    (y, _), (gradients, _) = clean
    assert not y[ids < 0].any()
    assert all(not x[ids < 0].any() for x in gradients.values() if x.shape[:2] == ids.shape)


def spoil(x, ids):
    x = x.copy()
    if x.shape[:2] == ids.shape:
        x[ids < 0] = np.nan
    return x


@pytest.mark.wide
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_same_numbers_at_every_ring_size(name):
    """Where cuts are on multiples of the chunk, in float32."""
    case = CASES[name]
    operands, state = inputs(case, dtype=np.float32)
    given = tuple(x.astype(np.float32) for x in cotangents(case))
    more = {"chunk_size": 3} if case.chunked else {}
    with quick_compiles():
        alone, *others = (
            on_ring(case, operands, state, given, size, layout, ids_of("cuts"), **more)
            for size, layout in ((1, "contiguous"), (2, "zigzag"), (4, "contiguous"), (8, "zigzag"))
        )
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max()), other, alone)


def test_inside_shard_map():
    """With check_vma; a weight that devices share gets its whole gradient."""
    case = CASES["conv-silu-bias"]
    mesh, place = Mesh(np.array(jax.devices()[:4]), "ring"), PartitionSpec(None, "ring")
    operands, _ = inputs(case, dtype=np.float32)
    local = partial(jax_core.causal_conv1d, activation="silu", axis_name="ring")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(place, PartitionSpec(), PartitionSpec()), out_specs=place)
    alone = partial(jax_core.causal_conv1d, activation="silu")
    loss = lambda run: lambda *x: jnp.sum(run(*x) ** 2)  # noqa: E731
    got, exact = (jax.grad(loss(run), (0, 1, 2))(*operands.values()) for run in (mapped, alone))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, exact)


@pytest.mark.slow
def test_by_heads_inside_shard_map():
    """With check_vma, over two axes that the mesh has in another order, and with two dtypes in one message; what devices share gets
    its whole gradient. Each of the 2 groups is on two devices."""
    case, size = CASES["ssd-skip"], 4
    mesh, ring = Mesh(np.array(jax.devices()[:size]).reshape(2, 2), ("a", "b")), ("b", "a")
    operands, _ = inputs(case, dtype=np.float32)
    operands |= {name: operands[name].astype(jnp.bfloat16) for name in "BC"}
    ends = np.array([0, 12, 13, 47, 80], np.int32)  # and padding after them
    places = {name: PartitionSpec(None, ring) if _along(x) else PartitionSpec() for name, x in operands.items()}
    alone = partial(jax_core.ssd, chunk_size=CHUNK, cu_seqlens=ends)
    local = partial(alone, axis_name=ring, layout="zigzag", strategy="ulysses")
    order, back = permutation("zigzag", size, LENGTH), inverse_permutation("zigzag", size, LENGTH)
    mapped = jax.shard_map(lambda x: local(**x), mesh=mesh, in_specs=(places,), out_specs=PartitionSpec(None, ring))
    loss = lambda run: lambda x: (jnp.sum((y := run(x)) ** 2), y)  # noqa: E731
    got, y = moved(jax.jit(jax.grad(loss(mapped), has_aux=True))(moved(operands, order)), back)
    exact, y_alone = jax.jit(jax.grad(loss(lambda x: alone(**x)), has_aux=True))(operands)
    np.testing.assert_array_equal(y, y_alone)
    for name, gradient in exact.items():
        assert got[name].dtype == gradient.dtype
        far = np.abs(got[name].astype(np.float32) - gradient.astype(np.float32)).max() / np.abs(gradient).max()
        assert far < (1e-2 if name in "BC" else 1e-6), name


def test_explicit_axes_and_an_operand_that_is_absent():
    mesh = jax.make_mesh((2,), ("ring",), axis_types=(AxisType.Explicit,))
    x, weight = np.random.default_rng(0).normal(size=(1, 16, 4)), np.random.default_rng(1).normal(size=(4, 3))
    alone = jax_core.causal_conv1d(x, weight)
    y, last = jax_core.causal_conv1d(x, weight, output_final_state=True, mesh=mesh)
    np.testing.assert_allclose(y, alone, rtol=1e-6)
    np.testing.assert_array_equal(last, x[:, -2:].astype(last.dtype))


@pytest.mark.parametrize("strategy", ["prefix", "ulysses"])
def test_heads_stay_split(strategy):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "ring", "heads"))
    case = CASES["delta"]
    operands, state = inputs(case, dtype=np.float32)
    operands, state = {name: x[:2] for name, x in operands.items()}, state[:2]
    alone = jax_core.gated_delta_rule(**operands, initial_state=state, output_final_state=True)
    split = {name: PartitionSpec("data", "ring", "heads") for name in operands}
    placed = {name: jax.device_put(x, jax.NamedSharding(mesh, split[name])) for name, x in operands.items()}
    run = partial(jax_core.gated_delta_rule, mesh=mesh, axis_name="ring", output_final_state=True, strategy=strategy)
    y, last = run(**placed, initial_state=state)
    assert y.sharding.spec == PartitionSpec(("data",), "ring", ("heads",), None)
    for got, exact in zip((y, last), alone, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"layout": "striped", "mesh": 2, "strategy": "prefix"},
            NotImplementedError,
            "striped.*gives a rank every n-th position.*zigzag",
        ),
        ({"mesh": 4, "strategy": "ulysses"}, ValueError, 'the 4 ranks: .* multiple of that, got 2 heads; use strategy="prefix'),
        ({"strategy": "ring"}, ValueError, "strategy must be one of auto, prefix, ulysses, got 'ring'"),
        ({"beta": np.zeros((1, 4), np.float32)}, ValueError, r"beta must be \[batch, seq, heads\], got \[1, 4\]"),
        ({"beta": np.zeros((1, 4, 3), np.float32)}, ValueError, r"beta must be .*, with heads 2 as the others; got \[1, 4, 3\]"),
        ({"beta": None}, ValueError, r"gated_delta_rule needs beta, \[batch, seq, heads\]"),
        ({"beta": np.zeros((1, 4, 2), np.int32)}, ValueError, "beta must be of float16, .* got int32"),
        ({"segment_ids": np.zeros((1, 3), np.int32)}, ValueError, r"segment_ids must be \[batch, seq\], here \[1, 4\]"),
        ({"segment_ids": np.zeros((1, 4), np.int32), "cu_seqlens": np.array([0, 4])}, ValueError, "give one of the two"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be a positive int, got 0"),
        ({"initial_state": np.zeros((1, 2, 3, 4), np.float32)}, ValueError, r"initial_state must be .*key dim.*got \[1, 2, 3, 4\]"),
        ({"use_qk_l2norm_in_kernel": True}, TypeError, "which is called qk_l2norm here"),
    ],
)  # fmt: skip
def test_refusals(changes, error, words):
    operands = {"q": (1, 4, 1, 4), "k": (1, 4, 1, 4), "v": (1, 4, 2, 4), "g": (1, 4, 2), "beta": (1, 4, 2)}
    arguments = {name: np.zeros(shape, np.float32) for name, shape in operands.items()} | changes
    if "mesh" in changes:
        arguments["mesh"] = Mesh(np.array(jax.devices()[: changes["mesh"]]), "ring")
    with pytest.raises(error, match=words):
        jax_core.gated_delta_rule(**arguments)
