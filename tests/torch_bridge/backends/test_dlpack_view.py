"""Capsules of memory that they do not own: what JAX and torch read of them, and what they keep alive, which is nothing."""

import ctypes
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils.dlpack import from_dlpack

from torch_bridge.backends import dlpack
from torch_bridge.backends.dlpack_view import View, view_capsule

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.bool)


def as_array(tensor):
    """As the bridge gives a GPU's tensors to JAX."""
    return jax.dlpack.from_dlpack(View(tensor))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5), (7,), (), (2, 0, 3)], ids=str)
def test_a_view_is_the_tensors_memory(dtype, shape):
    tensor = (torch.arange(60) % 2).to(dtype)[: torch.Size(shape).numel()].clone().reshape(shape)
    array, back = as_array(tensor), from_dlpack(view_capsule(tensor))
    assert array.shape == shape and str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
    assert back.shape == tensor.shape and back.dtype == dtype and torch.equal(back, tensor)
    if tensor.numel():
        assert array.unsafe_buffer_pointer() == tensor.data_ptr() == back.data_ptr()
        assert array.astype(jnp.float32).tolist() == tensor.float().tolist()


def test_a_view_keeps_nothing_alive():
    tensor = torch.ones(64)
    alive, array = weakref.ref(tensor), as_array(tensor)
    del tensor
    assert alive() is None and array.shape == (64,)


def test_views_of_one_form_are_apart():
    """What they have in common is made once; the memory is each one's own, also after others of the form are gone."""
    tensors = [torch.full((3, 4), float(number)) for number in range(20)]
    arrays = [as_array(tensor) for tensor in tensors]
    del arrays[::2]
    assert [array.tolist() for array in arrays] == [tensor.tolist() for tensor in tensors[1::2]]


def test_others_may_declare_what_python_shares(monkeypatch):
    """A library that gives ``ctypes.pythonapi``'s functions argument types of its own gives them to all who use those objects."""
    destructor = ctypes.CFUNCTYPE(None, ctypes.py_object)
    monkeypatch.setattr(ctypes.pythonapi.PyCapsule_New, "argtypes", (ctypes.c_void_p, ctypes.c_char_p, destructor))
    monkeypatch.setattr(ctypes.pythonapi.PyCapsule_GetPointer, "argtypes", (ctypes.c_void_p,))
    tensor = torch.ones(3, 11)
    assert torch.equal(from_dlpack(view_capsule(tensor)), tensor)


def test_on_a_cpu_jax_holds_what_it_reads():
    """Its threads may be a moment behind a call's results."""
    convert = dlpack.conversions(CPU, jax.local_devices(backend="cpu")[0])
    tensor = torch.ones(64)
    alive, array = weakref.ref(tensor), convert.to_array(tensor, None)
    pointer = tensor.data_ptr()
    del tensor
    other = torch.zeros(64)  # takes the memory, if it is free
    assert other.data_ptr() != pointer and array.sum() == 64
    assert alive() is not None
