"""ring_attention under JAX's transformations and on meshes of two axes, and the single-device blockwise_attention."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import ring_mesh, small_blocks
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_core import blockwise_attention, create_shard_map_wrapper, ring_attention
from jax_core.masks.dropout import keep_mask
from jax_core.masks.layout import inverse_permutation, permutation
from jax_core.testing.oracle import reference_attention

SPEC = P(None, "ring")
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
LENGTH = 24


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape), jnp.float32)


def random_qkv(batch: int = 2, length: int = LENGTH, heads: int = 4, kv_heads: int = 2) -> tuple[jax.Array, jax.Array, jax.Array]:
    shapes = ((heads, 8), (kv_heads, 8), (kv_heads, 6))
    return tuple(normal(batch, length, *shape, seed=i) for i, shape in enumerate(shapes))  # type: ignore[return-value]


def oracle(*arrays: Any, **options: Any) -> jax.Array:
    return jax.jit(lambda *arrays: reference_attention(*arrays, **options).out)(*arrays)


def loss_of(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A loss that weighs every output differently."""

    def loss(*arrays: jax.Array) -> jax.Array:
        out = attend(*arrays)
        return (out * jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)).sum()

    return loss


def assert_close(got: Any, wanted: Any) -> None:
    jax.tree.map(partial(np.testing.assert_allclose, **CLOSE), got, wanted)


def on_ring(size: int = 2, check_vma: bool = True, specs: tuple[P, ...] = (SPEC,) * 3, **options: Any) -> Callable[..., jax.Array]:
    options = {"axis_name": "ring", "cfg": small_blocks(8), "causal": True} | options
    attend = partial(ring_attention, **options)
    return jax.shard_map(attend, mesh=ring_mesh(size), in_specs=specs, out_specs=SPEC, check_vma=check_vma)


# ---------------------------------------------------------------------------------------- gradients and shared operands

WITH_SINKS = (SPEC, SPEC, SPEC, P())


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_outside_shard_map_are_whole(check_vma: bool):
    """Also of the sinks, which every rank holds: their gradient is the sum over the ranks, once."""
    arrays = (*random_qkv(), normal(4, 2))
    got = jax.jit(jax.value_and_grad(loss_of(on_ring(4, check_vma, WITH_SINKS)), (0, 1, 2, 3)))(*arrays)
    assert_close(got, jax.value_and_grad(loss_of(partial(oracle, causal=True)), (0, 1, 2, 3))(*arrays))


def test_gradients_inside_shard_map_with_check_vma():
    """A rank that differentiates the sum of all ranks' losses gets whole gradients of what it shares with them."""
    arrays = (*random_qkv(), normal(4, 2))

    def local_gradients(*arrays: jax.Array) -> Any:
        def loss(*arrays: jax.Array) -> jax.Array:
            return jax.lax.psum((ring_attention(*arrays, axis_name="ring", causal=True) ** 2).sum(), "ring")

        return jax.grad(loss, (0, 1, 2, 3))(*arrays)

    got = jax.jit(jax.shard_map(local_gradients, mesh=ring_mesh(2), in_specs=WITH_SINKS, out_specs=WITH_SINKS))(*arrays)
    assert_close(got, jax.grad(lambda *arrays: (oracle(*arrays, causal=True) ** 2).sum(), (0, 1, 2, 3))(*arrays))


def test_gradients_inside_shard_map_without_check_vma_are_each_ranks_part():
    """The docstring's promise: parts of a shared operand's gradient that sum to the whole; whole ones of what is sharded."""
    arrays = (*random_qkv(), normal(4, 2))

    def local_gradients(*arrays: jax.Array) -> Any:
        loss = lambda *arrays: (ring_attention(*arrays, axis_name="ring", causal=True) ** 2).sum()  # noqa: E731
        *sharded, sinks = jax.grad(loss, (0, 1, 2, 3))(*arrays)
        return (*sharded, jax.lax.psum(sinks, "ring"))

    mapped = jax.shard_map(local_gradients, mesh=ring_mesh(2), in_specs=WITH_SINKS, out_specs=WITH_SINKS, check_vma=False)
    got = jax.jit(mapped)(*arrays)
    assert_close(got, jax.grad(lambda *arrays: (oracle(*arrays, causal=True) ** 2).sum(), (0, 1, 2, 3))(*arrays))


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_shared_bias_and_slopes_and_replicated_queries(check_vma: bool):
    """Operands that vary over fewer axes than K/V: slopes on every rank, and a second mesh axis that nothing is split over."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("copies", "ring"))
    slopes, bias, arrays = normal(4) ** 2, normal(1, 4, LENGTH, LENGTH), random_qkv()

    def attend(query, key, value, bias, slopes):
        return ring_attention(query, key, value, None, bias, alibi_slopes=slopes, axis_name="ring")

    specs = (SPEC, SPEC, SPEC, P(None, None, "ring"), P())
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=SPEC, check_vma=check_vma)
    got = jax.jit(jax.grad(loss_of(mapped), (0, 1, 2, 3, 4)))(*arrays, bias, slopes)
    wanted = jax.grad(loss_of(lambda q, k, v, b, s: oracle(q, k, v, None, b, alibi_slopes=s)), (0, 1, 2, 3, 4))(
        *arrays, bias, slopes
    )
    assert_close(got, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("wrt", [(0,), (1,), (3,)])
def test_gradient_of_one_operand(wrt: tuple[int, ...]):
    """What is not differentiated may be anything: constants, NumPy arrays."""
    arrays = (*map(np.asarray, random_qkv()), normal(4))
    got = jax.grad(loss_of(partial(ring_attention, causal=True)), wrt)(*arrays)
    assert_close(got, jax.grad(loss_of(partial(oracle, causal=True)), wrt)(*map(jnp.asarray, arrays)))


def test_gradient_of_the_lse_alone():
    """As a z-loss takes it; the output's cotangent is then a symbolic zero."""
    arrays = random_qkv()
    got = jax.grad(lambda *qkv: (ring_attention(*qkv, causal=True, return_lse=True)[1] ** 2).sum(), (0, 1, 2))(*arrays)
    wanted = jax.grad(lambda *qkv: (reference_attention(*qkv, causal=True).lse ** 2).sum(), (0, 1, 2))(*arrays)
    assert_close(got, wanted)


# ------------------------------------------------------------------------------------------------------ transformations


def test_vmap_over_another_batch():
    """Over arrays that are mapped and sinks and a bias that are not, inside and outside of jit; the gradient too."""
    stacked = tuple(jnp.stack([x, 2 * x[::-1], x + 1]) for x in random_qkv())
    sinks, bias = normal(4), normal(1, 4, LENGTH, LENGTH)
    attend = lambda *qkv: ring_attention(*qkv, sinks, bias, causal=True, cfg=small_blocks(8))  # noqa: E731
    wanted = [oracle(*(x[i] for x in stacked), sinks, bias, causal=True) for i in range(3)]
    assert_close(jax.jit(jax.vmap(attend))(*stacked), jnp.stack(wanted))
    got = jax.jit(jax.vmap(jax.grad(loss_of(attend), (0, 1, 2))))(*stacked)
    one = jax.grad(loss_of(lambda *qkv: oracle(*qkv, sinks, bias, causal=True)), (0, 1, 2))(*(x[1] for x in stacked))
    assert_close(tuple(x[1] for x in got), one)


@pytest.mark.slow
def test_vmap_over_everything():
    """One call per example: the mapped axis takes the batch's place in every operand, dropout seeds and segment ids too."""
    query, key, value = (x[:, None] for x in random_qkv())
    bias, sinks, slopes = normal(2, 1, 4, LENGTH, LENGTH), normal(2, 4), normal(2, 4, seed=1) ** 2
    ids = jnp.asarray(np.repeat([[0, 1, 2], [0, 0, -1]], 8, axis=1))[:, None]
    seeds = jnp.array([[1, 2], [3, 4]], jnp.uint32)

    def attend(function, query, key, value, bias, sinks, slopes, ids, seed):
        options = {"q_segment_ids": ids, "alibi_slopes": slopes, "dropout_prob": 0.2, "dropout_seed": seed}
        return function(query, key, value, sinks, bias, **options)

    arrays = (query, key, value, bias, sinks, slopes, ids, seeds)
    wanted = [attend(oracle, *(x[i] for x in arrays)) for i in range(2)]
    assert_close(jax.jit(jax.vmap(partial(attend, ring_attention)))(*arrays), jnp.stack(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("outside", [True, False])
def test_vmap_and_the_ring(outside: bool):
    """vmap around shard_map, and inside of it."""
    stacked = tuple(jnp.stack([x, x[::-1]]) for x in random_qkv())
    if outside:
        mapped = jax.vmap(on_ring())
    else:
        spec = P(None, None, "ring")
        attend = jax.vmap(partial(ring_attention, axis_name="ring", causal=True))
        mapped = jax.shard_map(attend, mesh=ring_mesh(2), in_specs=(spec,) * 3, out_specs=spec)
    got = jax.jit(jax.grad(loss_of(mapped), (0, 1, 2)))(*stacked)
    assert_close(got, jax.grad(loss_of(jax.vmap(partial(oracle, causal=True))), (0, 1, 2))(*stacked))


@pytest.mark.parametrize("policy", [None, pytest.param(jax.checkpoint_policies.dots_saveable, marks=pytest.mark.slow)])
def test_checkpoint(policy: Any):
    arrays = random_qkv()
    got = jax.jit(jax.grad(loss_of(jax.checkpoint(on_ring(dropout_prob=0.2, dropout_seed=3), policy=policy)), (0, 1, 2)))(*arrays)
    seed = jnp.array([3, 0], jnp.uint32)
    assert_close(got, jax.grad(loss_of(partial(oracle, causal=True, dropout_prob=0.2, dropout_seed=seed)), (0, 1, 2))(*arrays))


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_scan_over_layers(check_vma: bool):
    """A stack of checkpointed layers inside shard_map, each with its own weights and sinks, differentiated in all of them."""
    x, weights, sinks = normal(2, LENGTH, 16), normal(3, 16, 48) / 4, normal(3, 4)

    def model(attend, x, weights, sinks):
        def layer(x, parameters):
            weight, sinks = parameters
            query, key, value = jnp.split((x @ weight).reshape(*x.shape[:2], 12, 4), 3, axis=2)
            return x + attend(query, key, value, sinks, causal=True).reshape(x.shape), None

        return jax.lax.scan(jax.checkpoint(layer), x, (weights, sinks))[0]

    sharded = partial(model, partial(ring_attention, axis_name="ring"))
    mapped = jax.shard_map(sharded, mesh=ring_mesh(2), in_specs=(SPEC, P(), P()), out_specs=SPEC, check_vma=check_vma)
    got = jax.jit(jax.value_and_grad(loss_of(mapped), (0, 1, 2)))(x, weights, sinks)
    assert_close(got, jax.value_and_grad(loss_of(partial(model, oracle)), (0, 1, 2))(x, weights, sinks))


@pytest.mark.slow
def test_a_mask_function_may_close_over_arrays():
    """Also over traced ones, under jit, scan and grad: here a table of who sees whom, and a window that changes with the layer."""
    query, key, value = random_qkv()
    table, windows = jnp.asarray(np.random.default_rng(1).random((4, LENGTH)) < 0.7), jnp.array([3, 9])

    def total(attend, query, table, windows):
        def layer(carry, window):
            mask_mod = lambda b, h, q, k: table[h, k] & (q - k <= window) & (q >= k)  # noqa: E731
            return carry + attend(query, key, value, mask_mod=mask_mod), None

        return jax.lax.scan(layer, jnp.zeros((2, LENGTH, 4, 6)), windows)[0]

    loss = lambda attend: loss_of(lambda query: total(attend, query, table, windows))  # noqa: E731
    assert_close(jax.jit(jax.value_and_grad(loss(ring_attention)))(query), jax.value_and_grad(loss(oracle))(query))


def test_equal_settings_compile_once():
    """Also when the caller makes a new config, window and seed for each call, and does not use jit himself."""
    arrays, compiled = random_qkv(), []

    def listen(event: str, seconds: float, **_: Any) -> None:
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    def step(seed: int) -> None:
        dropout = {"dropout_prob": 0.1, "dropout_seed": seed}
        jax.grad(loss_of(partial(ring_attention, sliding_window=[3, 4], cfg=small_blocks(8), mask_mod=later, **dropout)))(*arrays)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        step(1)
        assert compiled  # the listener hears
        compiled.clear()
        step(2)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def later(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    return q_pos >= k_pos


# ------------------------------------------------------------------------------------------------------ larger meshes


def two_axes(first: str) -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), (first, "ring"))


def test_batch_over_another_axis():
    """With mesh= the batch entries keep their global numbers: dropout and mask_mod give what one device gives."""
    query, key, value = random_qkv(batch=4)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, LENGTH)))
    mask_mod = lambda b, h, q, k: (b + h + q + k) % 3 != 0  # noqa: E731
    options = {"mask_mod": mask_mod, "dropout_prob": 0.3, "dropout_seed": jnp.array([5, 6], jnp.uint32)}
    order, back = (np.array(f("zigzag", 2, LENGTH)) for f in (permutation, inverse_permutation))
    spec = P("data", "ring")

    def attend(query, key, value, ids):
        arrays = (x[:, order] for x in (query, key, value))
        more = {"mesh": two_axes("data"), "in_specs": (spec,) * 3, "out_specs": spec, "layout": "zigzag"}
        return ring_attention(*arrays, q_segment_ids=ids[:, order], **more, **options)[:, back]

    got = jax.jit(jax.value_and_grad(loss_of(attend), (0, 1, 2)))(query, key, value, ids)
    wanted = jax.value_and_grad(loss_of(lambda q, k, v, ids: oracle(q, k, v, q_segment_ids=ids, **options)), (0, 1, 2))
    assert_close(got, wanted(query, key, value, ids))


@pytest.mark.slow
@pytest.mark.parametrize("sinks", [(4,), (3,), (1,), (4, 2)])
def test_heads_over_another_axis(sinks: tuple[int, ...]):
    """Tensor parallelism beside the ring: heads keep their global numbers and their own sinks, biases and slopes."""
    query, key, value = random_qkv()
    spec, aux, bias, slopes = P(None, "ring", "heads"), normal(*sinks), normal(1, 4, LENGTH, LENGTH), normal(4, seed=3) ** 2
    builder = lambda q_len, kv_len, heads, head, reps: np.tri(q_len, kv_len, head, dtype=bool)  # noqa: E731
    mask_mod = lambda b, h, q, k: (h + q + k) % 4 != 0  # noqa: E731
    options = {"mask_builder": builder, "mask_mod": mask_mod, "dropout_prob": 0.3, "dropout_seed": jnp.array([5, 6], jnp.uint32)}

    def attend(query, key, value, aux, bias, slopes):
        more = {"mesh": two_axes("heads"), "in_specs": (spec,) * 3, "out_specs": spec}
        return ring_attention(query, key, value, aux, bias, alibi_slopes=slopes, **more, **options)

    arrays, wrt = (query, key, value, aux, bias, slopes), (0, 1, 2, 3, 4, 5)
    wanted = jax.value_and_grad(loss_of(lambda q, k, v, a, b, s: oracle(q, k, v, a, b, alibi_slopes=s, **options)), wrt)(*arrays)
    assert_close(jax.jit(jax.value_and_grad(loss_of(attend), wrt))(*arrays), wanted)


@pytest.mark.slow
def test_a_ring_over_two_axes():
    """axis_name may be a tuple: the ring runs through both axes, the first outermost."""
    mesh, spec = two_axes("outer"), P(None, ("outer", "ring"))
    arrays = random_qkv()
    attend = partial(ring_attention, axis_name=("outer", "ring"), causal=True)
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    wanted = jax.value_and_grad(loss_of(partial(oracle, causal=True)), (0, 1, 2))(*arrays)
    assert_close(jax.jit(jax.value_and_grad(loss_of(mapped), (0, 1, 2)))(*arrays), wanted)
    on_mesh = partial(ring_attention, axis_name=("outer", "ring"), mesh=mesh, causal=True)
    assert_close(jax.jit(on_mesh)(*arrays), oracle(*arrays, causal=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_arrays_that_lie_on_the_mesh_already(kind: AxisType):
    """Both kinds of mesh axes, with operands placed by the caller; the gradients lie as their operands do."""
    mesh = jax.make_mesh((2,), ("ring",), axis_types=(kind,))
    arrays = (*random_qkv(), normal(4))
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, WITH_SINKS, strict=True)]
    wrt = (0, 1, 2, 3)
    got = jax.jit(jax.grad(lambda *arrays: (ring_attention(*arrays, mesh=mesh, causal=True) ** 2).sum(), wrt))(*placed)
    assert_close(got, jax.grad(lambda *arrays: (oracle(*arrays, causal=True) ** 2).sum(), wrt)(*arrays))
    assert all(gradient.sharding.is_equivalent_to(x.sharding, x.ndim) for gradient, x in zip(got, placed, strict=True))


def test_create_shard_map_wrapper():
    """It gives a function and its arguments, which are the arrays that came."""
    arrays = (*random_qkv(), normal(4))
    function, arguments = create_shard_map_wrapper(*arrays, mesh=ring_mesh(2), axis_name="ring", causal=True, return_lse=True)
    out, lse = jax.jit(function)(*arguments)
    assert_close((out, lse), tuple(reference_attention(*arrays, causal=True)))
    assert len(arguments) == 4


# --------------------------------------------------------------------------------------------------------- blockwise

BLOCKS = {"query_chunk_size": 7, "key_chunk_size": 5}


def assert_blockwise(wanted: dict[str, Any], **options: Any) -> None:
    """blockwise_attention with `options` is the oracle with `wanted`, forward and backward."""
    arrays = random_qkv()
    got = jax.jit(jax.value_and_grad(loss_of(partial(blockwise_attention, **BLOCKS, **options)), (0, 1, 2)))(*arrays)
    bias = wanted.pop("bias", None)
    assert_close(got, jax.value_and_grad(loss_of(lambda *qkv: oracle(*qkv, None, bias, **wanted)), (0, 1, 2))(*arrays))


def test_blockwise_is_causal_unless_told_otherwise():
    assert_blockwise({"causal": True})
    assert_blockwise({}, causal=False)


def test_blockwise_bias_mask_and_init_bias():
    """init_bias is called only when neither bias nor mask came."""
    bias = normal(2, 4, LENGTH, LENGTH)
    mask = jnp.asarray(np.random.default_rng(2).random((2, 1, LENGTH, LENGTH)) < 0.7)
    assert_blockwise({"bias": bias, "mask": mask, "causal": True}, bias=bias, mask=mask)
    assert_blockwise({"bias": bias, "causal": True}, init_bias=lambda: bias)

    def unwanted() -> jax.Array:
        raise AssertionError("init_bias was called though a mask or bias came")

    blockwise_attention(*random_qkv(), mask=mask, init_bias=unwanted)
    blockwise_attention(*random_qkv(), bias=bias, init_bias=unwanted)


def test_blockwise_gradient_of_the_bias():
    arrays, bias = random_qkv(), normal(1, 4, LENGTH, LENGTH)
    got = jax.grad(lambda bias: loss_of(partial(blockwise_attention, bias=bias, **BLOCKS))(*arrays))(bias)
    assert_close(got, jax.grad(lambda bias: loss_of(lambda *qkv: oracle(*qkv, None, bias, causal=True))(*arrays))(bias))


@pytest.mark.parametrize("typed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_blockwise_dropout(typed: bool):
    """Only when not deterministic; the key's words are the seed; a probability of zero drops nothing and needs no key."""
    key = jax.random.key(7) if typed else jax.random.PRNGKey(7)
    seed = jax.random.key_data(key) if typed else key
    dropout = {"dropout_rng": key, "attn_pdrop": 0.3}
    assert_blockwise({"causal": True, "dropout_prob": 0.3, "dropout_seed": seed}, deterministic=False, **dropout)
    plain = blockwise_attention(*random_qkv())
    np.testing.assert_array_equal(blockwise_attention(*random_qkv(), **dropout), plain)
    np.testing.assert_array_equal(blockwise_attention(*random_qkv(), deterministic=False, attn_pdrop=0.0), plain)
    with pytest.raises(ValueError, match="needs dropout_rng"):
        blockwise_attention(*random_qkv(), deterministic=False, attn_pdrop=0.3)
    assert np.any(keep_mask(seed, 0, 0, jnp.arange(LENGTH), 0, 0.3) != keep_mask(seed + 1, 0, 0, jnp.arange(LENGTH), 0, 0.3))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_blockwise_dtype(dtype: Any):
    """Inputs of any dtype are computed in, and the output comes in, the dtype asked for."""
    arrays = random_qkv()
    out = blockwise_attention(*arrays, dtype=dtype)
    assert out.dtype == dtype
    rounded = oracle(*(x.astype(dtype) for x in arrays), causal=True)
    np.testing.assert_allclose(out.astype(jnp.float32), rounded, rtol=float(jnp.finfo(dtype).eps), atol=1e-6)
    assert blockwise_attention(*(x.astype(jnp.bfloat16) for x in arrays)).dtype == jnp.float32


def test_blockwise_rounds_the_logits_when_told_to():
    """float32_logits=False gives attention over logits rounded to the dtype, and not the exact one."""
    arrays = tuple(x.astype(jnp.bfloat16) for x in random_qkv())
    query, key, value = (np.asarray(x.astype(jnp.float32)) for x in arrays)
    logits = np.einsum("bqhd,bkhd->bhqk", query, np.repeat(key, 2, axis=2))
    bias = np.asarray(jnp.asarray(logits, jnp.bfloat16).astype(jnp.float32)) * 8**-0.5
    wanted = oracle(np.zeros_like(query), key, value, None, bias, causal=True)
    attend = partial(blockwise_attention, *arrays, dtype=jnp.bfloat16)
    exact, coarse = (attend(float32_logits=flag).astype(jnp.float32) for flag in (True, False))
    np.testing.assert_allclose(coarse, wanted, rtol=1 / 128, atol=1e-6)
    assert np.any(exact != coarse)


@pytest.mark.slow
def test_blockwise_policy_and_prevent_cse():
    """A checkpoint policy changes what is kept and not the numbers; prevent_cse reaches jax.checkpoint."""
    for policy in (None, False, jax.checkpoint_policies.nothing_saveable):
        assert_blockwise({"causal": True}, policy=policy, prevent_cse=False)

    def program(policy: Any, prevent_cse: bool) -> str:
        attend = partial(blockwise_attention, policy=policy, prevent_cse=prevent_cse)
        return str(jax.make_jaxpr(jax.grad(loss_of(attend)))(*random_qkv()))

    nothing, everything = jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.everything_saveable
    assert len({program(nothing, True), program(nothing, False), program(everything, True)}) == 3


def test_blockwise_precision_and_chunk_sizes_reach_the_program():
    def program(**options: Any) -> str:
        return str(jax.make_jaxpr(partial(blockwise_attention, **options))(*random_qkv()))

    assert "precision=(Precision.DEFAULT, Precision.DEFAULT)" in program(precision=jax.lax.Precision.DEFAULT)
    assert "Precision.DEFAULT" not in program()
    sizes = [(2048, 2048), (8, 2048), (2048, 8)]
    assert len({program(query_chunk_size=q_size, key_chunk_size=k_size) for q_size, k_size in sizes}) == 3


def test_blockwise_signature():
    """EasyDeL's names, order and defaults; what its operator adds comes by keyword."""
    parameters = inspect.signature(blockwise_attention).parameters.values()
    defaults = {"bias": None, "deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0, "causal": True}
    defaults |= {"query_chunk_size": 2048, "key_chunk_size": 2048, "dtype": jnp.float32, "policy": False, "precision": None}
    defaults |= {"float32_logits": True, "prevent_cse": True}
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == ["query", "key", "value", *defaults]
    assert {p.name: p.default for p in positional[3:]} == defaults
    assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == {"mask", "init_bias"}


def test_blockwise_refuses():
    with pytest.raises(ValueError, match="q_blocksize must be a positive int or None, got 0"):
        blockwise_attention(*random_qkv(), query_chunk_size=0)
    with pytest.raises(ValueError, match="bias must"):
        blockwise_attention(*random_qkv(), bias=jnp.zeros((3, 3)))
