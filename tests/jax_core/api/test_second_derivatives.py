"""Derivatives of derivatives: those of every strategy and feature against the float64 oracle; every road to
them; and what is refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    BIAS,
    BIAS_OF_HEADS,
    BUILDER,
    CAUSAL,
    DROPOUT,
    FUNCTION,
    MANY_SINKS,
    MASK,
    MIXED,
    PACKED,
    PACKED_BOTH,
    QUICK_COMPILE,
    SEED,
    SHUFFLED_BOTH,
    SINKS,
    SLOPES,
    Case,
    _split,
    _widened,
    from_layout,
    make_cotangents,
    make_inputs,
    over,
    ring_mesh,
    sharded_attention,
    to_layout,
)
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P

from jax_core import blockwise_attention, ring_attention
from jax_core.kernels import xla
from jax_core.request.dispatch import KERNELS, STRATEGIES
from jax_core.testing.oracle import reference_attention

SMALL = {"queries": 10, "block": 4, "dim": 4, "batch": 2, "heads": 4, "kv_heads": 2, "dtype": "float64"}


def second(attend: Any, parameters: Any, rest: Any, cotangents: Any, directions: Any) -> Any:
    """The derivative of the gradients' product with ``directions``, by the operands and the cotangents."""

    def along(parameters: Any, cotangents: Any) -> Any:
        _, transpose = jax.vjp(lambda parameters: attend(parameters, rest), parameters)
        found = transpose(cotangents)[0]
        return sum((found[name] * directions[name]).sum() for name in found)

    return jax.jit(jax.grad(along, (0, 1)), compiler_options=QUICK_COMPILE)(parameters, cotangents)


def named(found: Any) -> dict[str, np.ndarray]:
    parameters, (out, lse) = found
    return {name: np.asarray(x, np.float64) for name, x in {"out": out, "lse": lse, **parameters}.items()}


def assert_second_derivative(case: Case, tolerance: float = 1e-11) -> None:
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    rng = np.random.default_rng(3)
    directions = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in _split(inputs)[0].items()}

    def oracle(parameters: Any, rest: Any) -> Any:
        return tuple(reference_attention(**parameters, **rest, **case.options, dtype="float64"))

    with jax.enable_x64(True):
        wide = [{name: _widened(x, "float64") for name, x in arrays.items()} for arrays in (inputs, cotangents, directions)]
        wanted = named(second(oracle, *_split(wide[0]), (wide[1]["out"], wide[1]["lse"]), wide[2]))
    with jax.enable_x64(case.dtype == "float64"):
        inside, moved, along = (to_layout(case, arrays) for arrays in (inputs, cotangents, directions))
        got = second(sharded_attention(case, inputs), *_split(inside), (moved["out"], moved["lse"]), along)
    for name, x in from_layout(case, named(got)).items():
        np.testing.assert_allclose(x, wanted[name], rtol=tolerance, atol=tolerance * np.abs(wanted[name]).max(), err_msg=name)


def on(strategy: str, name: str, ring: int = 2, **more: Any) -> Case:
    settings = {"strategy": strategy} | more.pop("settings", {})
    return Case(f"{strategy} {name}", ring=ring, settings=settings, **(SMALL | more))


SOFT = {"logits_soft_cap": 1.5}
WINDOW = {"sliding_window": (7, 0)}
CASES = [
    Case("alone, everything", mode="alone", **SMALL, **MIXED),
    Case("alone, rows without keys", mode="alone", arrays=PACKED_BOTH | SINKS, **SMALL),
    Case("alone, functions", mode="alone", options=FUNCTION | BUILDER, arrays=MANY_SINKS | MASK, **SMALL),
    Case("alone, fewer keys", mode="alone", options=SOFT, arrays=SLOPES | BIAS_OF_HEADS, **SMALL | {"keys": 7}),
    on("ring", "everything", 4, layout="zigzag", slow=True, **MIXED),
    on("ring", "soft cap, functions", options=SOFT | FUNCTION, arrays=MASK),
    on("ring", "over a gap", 4, options={"chunk_size": 10}, arrays=SINKS),
    on("ring", "positions, on a mesh", mode="mesh", options=CAUSAL | WINDOW, arrays=SHUFFLED_BOTH | PACKED),
    on("ring", "striped, bias", 4, layout="striped", options=CAUSAL, arrays=BIAS, slow=True),
    on("all_gather", "everything", layout="zigzag", slow=True, **MIXED),
    on("all_gather", "a window of neighbours", 4, options=CAUSAL | WINDOW, arrays=SINKS | PACKED),
    on("ulysses", "everything", layout="zigzag", slow=True, **MIXED),
    on("ulysses", "dropout, mask", 4, options=DROPOUT, arrays=SEED | MASK | MANY_SINKS),
    on("ulysses_ring", "causal", 4, axes=(2, 2), options=CAUSAL, arrays=BIAS_OF_HEADS | SINKS | SLOPES, slow=True),
    on("ring_ulysses", "causal", 4, axes=(2, 2), options=CAUSAL, arrays=PACKED, slow=True),
    on("hierarchical", "everything", 4, axes=(2, 2), layout="zigzag", slow=True, **MIXED),
    on("hierarchical", "causal", 4, axes=(2, 2), options=CAUSAL | SOFT),
    on("decode", "causal", mode="mesh", options=CAUSAL, arrays=SHUFFLED_BOTH | SINKS | SLOPES),
    on("decode", "rows without keys", 4, mode="mesh", options=SOFT, arrays=PACKED_BOTH | MANY_SINKS),
]


@over(CASES)
def test_every_strategy_and_feature(case: Case):
    assert_second_derivative(case)


# -------------------------------------------------------------------------------------------------------------- the roads

SHAPES = (1, 8, 4, 4), (1, 8, 2, 4), (1, 8, 2, 4)
Q, K, V = (np.random.default_rng(i).standard_normal(shape) for i, shape in enumerate(SHAPES))
IDS = np.array([[0, 0, 0, 1, 1, 1, 2, 2]])
ROWS = P(None, "ring")


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def textbook(q: Any, k: Any, v: Any) -> Any:
    return reference_attention(q, k, v, causal=True, q_segment_ids=IDS).out


def ours(q: Any, k: Any, v: Any, **more: Any) -> Any:
    return ring_attention(q, k, v, causal=True, q_segment_ids=jnp.asarray(IDS, jnp.int32), **more)


def inside(check_vma: bool) -> Any:
    def local(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return ring_attention(q, k, v, causal=True, q_segment_ids=ids, axis_name="ring", strategy="ring")

    mapped = jax.shard_map(local, mesh=ring_mesh(2), in_specs=(ROWS,) * 4, out_specs=ROWS, check_vma=check_vma)
    return lambda q, k, v: mapped(q, k, v, jnp.asarray(IDS, jnp.int32))


def in_a_scan(attend: Any) -> Any:
    return lambda q, k, v: jax.lax.scan(lambda q, _: (q + attend(q, k, v), None), q, None, length=2)[0]


def twice(attend: Any) -> Any:
    return lambda q, k, v: (q1 := q + attend(q, k, v)) + attend(q1, k, v)


PLACES = {
    "alone": (ours, textbook),
    "with the LSE": (lambda *qkv: ours(*qkv, return_lse=True)[0], textbook),
    "on a mesh": (lambda *qkv: ours(*qkv, mesh=ring_mesh(2)), textbook),
    "inside shard_map": (inside(True), textbook),
    "inside shard_map, unchecked": (inside(False), textbook),
    "checkpoint": (jax.checkpoint(ours), textbook),
    "checkpoint on a mesh": (jax.checkpoint(lambda *qkv: ours(*qkv, mesh=ring_mesh(2))), textbook),
    "scan": (in_a_scan(ours), twice(textbook)),
    "scan of checkpoints on a mesh": (in_a_scan(jax.checkpoint(lambda *qkv: ours(*qkv, mesh=ring_mesh(2)))), twice(textbook)),
    "two layers on a mesh": (twice(lambda *qkv: ours(*qkv, mesh=ring_mesh(4))), twice(textbook)),
    "vmap": (lambda *qkv: jax.vmap(ours)(*(x[None] for x in qkv))[0], textbook),
}


def energy(attend: Any) -> Any:
    return lambda q, k, v: jnp.sin(attend(q, k, v)).sum()


def penalty(attend: Any) -> Any:
    """A loss with the norm of its gradient."""

    def loss(*qkv: Any) -> Any:
        value, found = jax.value_and_grad(energy(attend), (0, 1, 2))(*qkv)
        return value + sum((x**2).sum() for x in found)

    return jax.grad(loss, (0, 1, 2))


def maml(attend: Any) -> Any:
    """The gradient of a loss after a step of gradient descent."""

    def loss(*qkv: Any) -> Any:
        steps = jax.grad(energy(attend), (0, 1, 2))(*qkv)
        return energy(attend)(*(x - 0.1 * step for x, step in zip(qkv, steps, strict=True)))

    return jax.grad(loss, (0, 1, 2))


def product(attend: Any) -> Any:
    """Of the Hessian with a vector, in reverse mode twice."""

    def along(*qkv: Any) -> Any:
        return sum((x * jnp.cos(y)).sum() for x, y in zip(jax.grad(energy(attend), (0, 1, 2))(*qkv), (Q, K, V), strict=True))

    return lambda *qkv: jax.vjp(along, *qkv)[1](jnp.ones(()))


def hessian(attend: Any) -> Any:
    return jax.jacrev(jax.jacrev(lambda q, k, v: energy(attend)(q, k, v)[None]))


ROADS = {"penalty": penalty, "MAML": maml, "vjp of vjp": product}


PAIRS = [(place, "MAML") for place in PLACES]
PAIRS += [("alone", "penalty"), ("on a mesh", "penalty"), ("alone", "vjp of vjp"), ("two layers on a mesh", "vjp of vjp")]


@pytest.mark.wide
@pytest.mark.parametrize(("place", "road"), PAIRS)
def test_every_road(x64: None, place: str, road: str):
    attend, oracle = PLACES[place]
    got, wanted = jax.jit(ROADS[road](attend))(Q, K, V), jax.jit(ROADS[road](oracle))(Q, K, V)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


def test_a_whole_hessian(x64: None):
    got, wanted = (jax.jit(hessian(attend))(Q, K, V) for attend in (ours, textbook))
    np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.slow
def test_ids_as_differentiated_arguments(x64: None):
    """They have a cotangent of no bits, also in the second derivative."""

    def along(q: Any, ids: Any) -> Any:
        _, transpose = jax.vjp(lambda q, ids: ring_attention(q, K, V, q_segment_ids=ids), q, ids)
        return (transpose(jnp.cos(q))[0] ** 2).sum()

    ids = jnp.asarray(IDS, jnp.int32)
    dq, dids = jax.vjp(along, jnp.asarray(Q), ids)[1](jnp.ones(()))
    wanted = jax.grad(
        lambda q: (jax.vjp(lambda q: reference_attention(q, K, V, q_segment_ids=IDS).out, q)[1](jnp.cos(q))[0] ** 2).sum()
    )(jnp.asarray(Q))
    np.testing.assert_allclose(dq, wanted, rtol=1e-11, atol=1e-11)
    assert dids.dtype == jax.dtypes.float0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrower_dtypes(dtype: str):
    """Within a few of their roundings."""
    arrays = [jnp.asarray(x, dtype) for x in (Q, K, V)]
    for attend in (ours, lambda *qkv: ours(*qkv, mesh=ring_mesh(2))):
        got = jax.jit(penalty(attend))(*arrays)
        wanted = jax.jit(penalty(textbook))(*(x.astype("float32") for x in arrays))
        for one, other in zip(got, wanted, strict=True):
            assert one.dtype == dtype
            size = float(jnp.abs(other).max())
            np.testing.assert_allclose(one.astype("float32"), other, atol=16 * float(jnp.finfo(dtype).eps) * size)


def test_blockwise_attention(x64: None):
    def attend(q: Any, k: Any, v: Any) -> Any:
        return blockwise_attention(
            q, k, v, query_chunk_size=4, key_chunk_size=4, dtype="float64", policy=jax.checkpoint_policies.nothing_saveable
        )

    def plain(q: Any, k: Any, v: Any) -> Any:
        return reference_attention(q, k, v, causal=True).out

    for one, other in zip(penalty(attend)(Q, K, V), penalty(plain)(Q, K, V), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)


def test_a_sequence_of_no_keys(x64: None):
    """Nothing is computed, and nothing but the sinks has a gradient, through the LSE."""
    empty, sinks = np.zeros((1, 0, 2, 4)), np.arange(4.0)

    def loss(sinks: Any) -> Any:
        return jnp.sin(ring_attention(Q, empty, empty, sinks, return_lse=True)[1]).sum()

    wanted = jax.hessian(lambda sinks: 8 * jnp.sin(sinks).sum())(sinks)
    np.testing.assert_allclose(jax.jacrev(jax.grad(loss))(sinks), wanted, rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.slow
def test_a_third_derivative(x64: None):
    """It is right on one device, and refused over several."""

    def third(attend: Any) -> Any:
        return jax.grad(lambda q: (penalty(attend)(q, K, V)[0] ** 2).sum())

    got, wanted = jax.jit(third(ours))(Q), jax.jit(third(textbook))(Q)
    np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-10 * np.abs(wanted).max())
    with pytest.raises(NotImplementedError, match="can be differentiated twice"):
        third(lambda *qkv: ours(*qkv, mesh=ring_mesh(2)))(Q)


FORWARD_MODE = {
    "jvp": lambda f, q: jax.jvp(f, (q,), (q,)),
    "linearize": lambda f, q: jax.linearize(f, q)[1](q),
    "jacfwd": lambda f, q: jax.jacfwd(f)(q),
    "hessian": lambda f, q: jax.hessian(f)(q),
    "jvp of grad": lambda f, q: jax.jvp(jax.grad(f), (q,), (q,)),
    "jvp of the cotangent": lambda f, q: jax.jvp(lambda scale: jax.vjp(f, q)[1](scale), (jnp.ones(()),), (jnp.ones(()),)),
    "jvp of vmap": lambda f, q: jax.jvp(jax.vmap(f), (q[None],), (q[None],)),
    "jvp under jit": lambda f, q: jax.jit(lambda q: jax.jvp(f, (q,), (q,)))(q),
    "jvp of grad under jit": lambda f, q: jax.jit(lambda q: jax.jvp(jax.grad(f), (q,), (q,)))(q),
    "hessian under jit": lambda f, q: jax.jit(jax.hessian(f))(q),
    "grad of jvp": lambda f, q: jax.grad(lambda q: jax.jvp(f, (q,), (q,))[1])(q),
}


@pytest.mark.parametrize("road", FORWARD_MODE)
@pytest.mark.parametrize("place", ["alone", "on a mesh", "inside shard_map", "checkpoint", "scan"])
def test_forward_mode_is_refused(x64: None, place: str, road: str):
    """By JAX itself, in its own words, which docs/jax.md has; never a wrong value."""
    q, k, v = map(jnp.asarray, (Q, K, V))
    with pytest.raises((TypeError, NotImplementedError), match=r"forward-mode autodiff \(jvp\)|jvp.* custom_vjp|'custom_lin'"):
        FORWARD_MODE[road](lambda q: energy(PLACES[place][0])(q, k, v), q)


def test_taylor_mode_is_refused(x64: None):
    with pytest.raises((TypeError, AttributeError)):  # the second in jax 0.11, whose jet knows no custom_vjp any more
        jet(lambda q: energy(ours)(q, K, V), (Q,), ((Q,),))


@pytest.mark.parametrize("platform", ["cute", "cuda", "triton", "pallas"])
def test_a_kernel_that_is_not_jaxs_refuses(monkeypatch: pytest.MonkeyPatch, platform: str):
    """In words, and only where the second derivative is used. What it computes is the XLA kernel's here."""
    for name in ("forward", "backward", "finish", "unsupported", "default_params"):
        monkeypatch.setattr(KERNELS[platform], name, getattr(xla, name))
    monkeypatch.setattr(KERNELS[platform], "CAPABILITIES", KERNELS[platform].CAPABILITIES | {"float32"})
    arrays = [jnp.asarray(x, "float32") for x in (Q, K, V)]

    def attend(*qkv: Any) -> Any:
        return ring_attention(*qkv, causal=True, platform=platform)

    with pytest.raises(NotImplementedError, match=f'platform="{platform}" can be differentiated once.*platform="xla"'):
        jax.jit(penalty(attend))(*arrays)

    def first_order(*qkv: Any) -> Any:
        steps = jax.lax.stop_gradient(jax.grad(energy(attend), (0, 1, 2))(*qkv))
        return energy(attend)(*(x - step for x, step in zip(qkv, steps, strict=True)))

    assert jnp.isfinite(jax.grad(first_order)(*arrays)).all()


def test_who_declares_a_second_derivative():
    """A kernel and a strategy that do not are refused."""
    assert {name for name, kernel in KERNELS.items() if "second_derivative" in kernel.CAPABILITIES} == {"xla"}
    assert {name for name, one in STRATEGIES.items() if "second_derivative" not in one.CAPABILITIES} == {"fused"}
