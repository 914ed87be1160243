"""Tensors cross between torch and JAX with their memory, their dtype and their values."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_bridge.backends.dlpack import CPU_ALIGNMENT, narrow_ids, precision_scope, to_jax, to_torch

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
]
rows = torch.arange(24, dtype=torch.float32).reshape(4, 6)


def values(array: jax.Array) -> np.ndarray:
    return np.asarray(array, dtype=np.float64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_ways_share_memory_and_keep_the_dtype(dtype):
    tensor = rows.to(dtype)
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert (str(array.dtype), array.shape) == (str(dtype).removeprefix("torch."), (4, 6))
    back = to_torch(array)
    assert back.data_ptr() == tensor.data_ptr()
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_a_result_of_jax_is_shared_with_torch():
    result = jax.jit(lambda x: x * 2)(jnp.arange(1000.0))
    tensor = to_torch(result)
    assert tensor.data_ptr() == result.unsafe_buffer_pointer()
    assert tensor[-1].item() == 1998.0


def test_float64_crosses_within_its_scope_only():
    tensor = rows.double() / 3
    with precision_scope(torch.float64):
        array = to_jax(tensor)
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
        doubled = to_torch(jax.jit(lambda x: x + x)(array))
    assert doubled.dtype == torch.float64
    assert torch.equal(doubled, tensor * 2)
    assert not jax.config.jax_enable_x64
    with pytest.raises(ValueError, match=r"torch.float64 needs JAX's x64 mode.*precision_scope"):
        to_jax(tensor)
    with precision_scope(torch.bfloat16):
        assert jnp.arange(3.0).dtype == jnp.float32


@pytest.mark.parametrize(
    "tensor",
    [
        rows.clone().requires_grad_(),
        rows.t(),
        rows[:, ::2],
        rows[:1].expand(4, 6),
        rows.flatten()[1:],
        rows.flatten()[3:20:2],
        torch.arange(8.0).reshape(2, 4)[:, 1:3].transpose(0, 1),
        torch.empty(0, 3),
        torch.empty(3, 0, 2),
        torch.tensor(2.5),
    ],
    ids=["grad", "transposed", "strided", "expanded", "unaligned", "both", "view", "empty", "empty inside", "scalar"],
)
def test_any_dense_tensor_crosses(tensor):
    array = to_jax(tensor)
    assert array.shape == tuple(tensor.shape)
    np.testing.assert_array_equal(values(array), tensor.detach().double().numpy())
    back = to_torch(array)
    assert not back.requires_grad
    assert torch.equal(back, tensor.detach())


def test_lazy_conjugation_and_negation_are_carried_out():
    complex_tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    np.testing.assert_array_equal(np.asarray(to_jax(complex_tensor.conj())), [1 - 2j, 3 + 4j])
    negated = complex_tensor.conj().imag
    assert negated.is_neg()
    np.testing.assert_array_equal(np.asarray(to_jax(negated)), [-2.0, 4.0])


def test_what_has_no_dense_memory_is_refused():
    with pytest.raises(ValueError, match="meta"):
        to_jax(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="dense"):
        to_jax(rows.to_sparse())


def test_an_array_on_several_devices_is_refused():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("ring",))
    spread = jax.device_put(jnp.zeros(4), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ring")))
    with pytest.raises(ValueError, match=r"one device, got one on 2; give it jax_mesh.to_local"):
        to_torch(spread)


def test_to_jax_places_the_array_on_the_device_asked_for():
    device = jax.devices()[1]
    array = to_jax(rows, device)
    assert array.devices() == {device}
    np.testing.assert_array_equal(values(array), rows.numpy())


def test_memory_lives_while_jax_holds_it():
    tensor = torch.full((1000,), 7.0)
    array = to_jax(tensor)
    del tensor
    gc.collect()
    others = [torch.zeros(1000) for _ in range(50)]
    assert (values(array) == 7.0).all()
    assert len(others) == 50


def test_memory_lives_while_torch_holds_it():
    array = jax.jit(lambda x: x + 7)(jnp.zeros(1000))
    tensor = to_torch(array)
    del array
    gc.collect()
    others = [jax.jit(lambda x: x * 0)(jnp.ones(1000)).block_until_ready() for _ in range(20)]
    assert (tensor == 7.0).all()
    assert len(others) == 20


def test_nothing_is_kept_once_both_have_let_go():
    freed = []
    numbers = np.ones((1 << 16) + CPU_ALIGNMENT, dtype=np.float32)
    weakref.finalize(numbers, freed.append, True)
    tensor = torch.from_numpy(numbers)[-numbers.ctypes.data % CPU_ALIGNMENT // 4 :]
    array = to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    back = to_torch(array)
    del numbers, tensor, array
    gc.collect()
    assert (back == 1).all()
    del back
    gc.collect()
    assert freed == [True]


def test_torch_waits_for_what_jax_has_not_yet_written():
    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 30, lambda _, y: jnp.tanh(y @ x), x)

    x = jnp.eye(300) * 0.5
    expected = np.asarray(slow(x))
    for _ in range(5):
        np.testing.assert_array_equal(to_torch(slow(x)).numpy(), expected)


def test_narrow_ids_keeps_every_value_or_refuses():
    ids = torch.tensor([0, -1, 2**31 - 1, -(2**31)])
    narrowed = narrow_ids(ids)
    assert narrowed.dtype == torch.int32
    assert torch.equal(narrowed.long(), ids)
    assert narrow_ids(narrowed) is narrowed
    assert narrow_ids(torch.tensor([3], dtype=torch.uint8)).dtype == torch.int32
    assert narrow_ids(torch.empty(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(2**31, torch.int64), (-(2**31) - 1, torch.int64), (2**62, torch.int64), (2**31, torch.uint32), (2**64 - 1, torch.uint64)],
    ids=str,
)
def test_ids_that_do_not_fit_are_refused(value, dtype):
    with pytest.raises(ValueError, match=f"q_segment_ids must fit in int32 .* got values from .*{value}"):
        narrow_ids(torch.tensor([value], dtype=dtype), "q_segment_ids")


@pytest.mark.parametrize(("value", "fits"), [(2**31 - 1, True), (-(2**31), True), (2**31, False), (-(2**31) - 1, False)])
def test_where_looking_would_wait_the_device_asserts(value, fits, monkeypatch):
    asserted = []
    monkeypatch.setattr(torch, "_assert_async", lambda holds, message: asserted.append((holds, message)))

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda", 0)

    narrow_ids(torch.tensor([0, value]).as_subclass(Elsewhere), "q_segment_ids")
    ((holds, message),) = asserted
    assert bool(holds) == fits and "q_segment_ids must fit in int32" in message


@pytest.mark.parametrize("tensor", [torch.ones(2), torch.ones(2, dtype=torch.bool)])
def test_ids_must_be_integers(tensor):
    with pytest.raises(ValueError, match="must be integers"):
        narrow_ids(tensor)


def test_int64_is_never_narrowed_in_silence():
    with pytest.raises(ValueError, match="narrow_ids"):
        to_jax(torch.arange(3))
