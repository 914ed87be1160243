"""A GPU call with stand-ins: the order of what it does, written down; where its results are; and, on a CPU, the way in and out."""

import sys
import types
import weakref

import jax
import jax.numpy as jnp
import pytest
import torch

import ring_attn
from torch_bridge.backends import compiled, dlpack, launch
from torch_bridge.backends.launch import Compiled, TensorSpec
from torch_bridge.mesh.rings import AXIS, ProcessRing

CPU = torch.device("cpu")


def itself(local):
    return local


class Stream:
    def __init__(self, name, log, number=0):
        self.name, self.log, self.cuda_stream = name, log, number

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.name}")


class Event:
    def __init__(self, gpu):
        gpu.calls += 1
        self.name, self.log = f"call {gpu.calls}", gpu.log

    def record(self, stream):
        self.log.append(f"{stream.name} is past {self.name}")


class Gpu:
    """Writes down what a call asks of torch's streams and of JAX. Memory is the CPU's; torch's tensors stand for JAX's arrays."""

    local_hardware_id = 0

    def __init__(self, monkeypatch):
        self.log, self.calls, self.deleted = [], 0, set()
        self.main, self.side = Stream("main", self.log), Stream("side", self.log, 7)
        self.current = self.main
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "ExternalStream", lambda number, device: Stream(f"jax {number}", self.log, number))
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: self.log.append("torch's cache is emptied"))
        monkeypatch.setattr(jax, "local_devices", lambda backend: [self])
        monkeypatch.setattr(launch, "exportable", self.exportable)
        monkeypatch.setattr(
            launch, "conversions", lambda here, there: dlpack.Conversions(self.to_array, self.to_tensor, self.to_tensor)
        )
        monkeypatch.setattr(torch.Tensor, "unsafe_buffer_pointer", torch.Tensor.data_ptr, raising=False)
        monkeypatch.setattr(torch.Tensor, "is_deleted", lambda x: x in self.deleted, raising=False)
        self.way = launch._OnGpu(torch.device("cuda", 0))
        self.way._torch_device = CPU

    def get_stream_for_external_ready_events(self):
        return 40

    def exportable(self, tensor):
        self.log.append("made contiguous")
        return tensor

    def to_array(self, tensor, stream):
        self.log.append(f"to jax after {stream}")
        return tensor

    def to_tensor(self, array, stream):
        self.log.append(f"{stream} waits for jax")
        return array

    def call(self, function, tensors=None):
        tensors = (torch.ones(3), None) if tensors is None else tensors
        return self.way(itself, Compiled(function, (TensorSpec((3,), torch.float32),)), tensors)


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def in_place(x, nothing, home):
    assert nothing is None
    return [torch.mul(x, 2, out=home)]


def elsewhere(x, nothing, home):
    return [x * 2]


IN = ["made contiguous", "jax 40 waits for main", "to jax after None", "to jax after 40"]


def test_jax_waits_for_torch_then_torch_for_jax(gpu):
    results, event = gpu.call(in_place)
    assert gpu.log == [*IN, "1 waits for jax", "main is past call 1"]
    assert event.name == "call 1"
    assert results[0].tolist() == [2.0] * 3


def test_an_array_serves_whatever_lies_in_its_memory(gpu, monkeypatch):
    """What results are written into is donated, and so is made anew: it carries the event that JAX waits for."""
    tensor = torch.ones(3)
    gpu.call(in_place, (tensor, None))
    gpu.log.clear()
    results, _ = gpu.call(in_place, (tensor.mul_(4), None))
    assert gpu.log == [*IN[:2], IN[3], "1 waits for jax", "main is past call 2"] and results[0].tolist() == [8.0] * 3
    for other in (tensor.view(1, 3), tensor.view(torch.int32)):
        gpu.log.clear()
        gpu.call(lambda x, nothing, home: [home], (other, None))
        assert gpu.log[:4] == IN
    gpu.deleted.add(tensor)
    gpu.log.clear()
    gpu.call(in_place, (tensor, None))
    assert gpu.log[:4] == IN
    for name in ("_MOST_VIEWS", "_MOST_USES"):
        with monkeypatch.context() as patched:
            patched.setattr(launch, name, 1)
            gpu.call(in_place)
        assert len(gpu.way._views._arrays) == 1


class Seen:
    """What is alive of the tensors that JAX was given. Its arrays own nothing."""

    def __init__(self, gpu, monkeypatch):
        self.given, self.at_the_wait = [], []
        self.wait = gpu.way.convert.wait
        gpu.way.convert = dlpack.Conversions(self.to_array, gpu.to_tensor, self.watched)
        monkeypatch.setattr(launch, "exportable", lambda tensor: tensor.clone())

    def to_array(self, tensor, stream):
        self.given.append(weakref.ref(tensor))

    def watched(self, array, stream):
        self.at_the_wait = self.alive()
        return self.wait(array, stream)

    def alive(self):
        return [tensor() is not None for tensor in self.given]


@pytest.fixture
def seen(gpu, monkeypatch):
    return Seen(gpu, monkeypatch)


def test_what_jax_uses_is_held_until_the_stream_waits_for_it_and_no_longer(gpu, seen):
    """A copy that was made for JAX has no other owner: let go before, another thread's work on the stream could have its memory."""
    gpu.call(lambda *arrays: [torch.ones(3)], (torch.ones(3), torch.ones(2), None))
    assert seen.at_the_wait == [True] * 3  # two operands and the result's memory
    assert seen.alive() == [False] * 3


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_what_a_broken_call_may_still_use_is_held_until_a_later_one_has_ended(gpu, seen, where, monkeypatch):
    def fails(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: in the middle")

    whole, function = gpu.way.convert, fails
    if where == "wait":
        gpu.way.convert, function = whole._replace(wait=fails), lambda *arrays: [torch.ones(3)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="in the middle"):
        gpu.call(function)
    gpu.way.convert = whole
    assert seen.alive() == [True, True]
    gpu.current = gpu.side  # their memory goes back to the stream that they came from
    gpu.call(lambda *arrays: [torch.ones(3)])
    assert seen.at_the_wait == [True] * 4
    assert seen.alive() == [False] * 4
    assert gpu.log.index("7 waits for jax") < gpu.log.index("main waits for side")


def test_of_a_call_that_found_no_memory_nothing_is_held(gpu, seen):
    def fails(*arrays):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes")

    with pytest.raises(jax.errors.JaxRuntimeError):
        gpu.call(fails)
    assert seen.alive() == [False] * 4  # of both tries


@pytest.mark.parametrize(("error", "held"), [(TypeError, False), (KeyboardInterrupt, True)])
def test_an_error_of_python_comes_before_the_launch_and_an_interrupt_at_any_time(gpu, seen, error, held):
    def fails(*arrays):
        raise error

    for _ in range(3):
        with pytest.raises(error):
            gpu.call(fails)
    assert seen.alive() == [held] * 6


def short_of_torch_memory(times):
    """``torch.empty``, or whatever allocates, the first ``times`` times."""
    failures = [torch.cuda.OutOfMemoryError] * times

    def allocate(original):
        def once_there_is_room(*arguments, **options):
            if failures:
                raise failures.pop()
            return original(*arguments, **options)

        return once_there_is_room

    return allocate


@pytest.mark.parametrize("what", ["results", "copies of operands", "copies of results"])
def test_what_jax_keeps_for_later_is_given_to_torch(gpu, what, monkeypatch):
    monkeypatch.setattr(launch, "trim_jax_memory", lambda device: gpu.log.append("jax's pool is trimmed"))
    short = short_of_torch_memory(1)
    if what == "results":
        monkeypatch.setattr(gpu.way, "_empty", short(gpu.way._empty))
    elif what == "copies of operands":
        monkeypatch.setattr(launch, "exportable", short(gpu.exportable))
    else:
        monkeypatch.setattr(torch.Tensor, "clone", short(torch.Tensor.clone))
    runs = []
    results, _ = gpu.call(lambda *arrays: runs.append(1) or elsewhere(*arrays))
    assert results[0].tolist() == [2.0] * 3
    assert gpu.log.count("jax's pool is trimmed") == 1
    assert len(runs) == 1  # the other ranks of a ring run it once


def test_nothing_is_kept_of_what_jax_wrote_in_place(gpu):
    gpu.call(in_place)
    assert gpu.way._copied is None
    gpu.current, gpu.log[:] = gpu.side, []
    gpu.call(in_place)
    assert gpu.log == [*(entry.replace("main", "side") for entry in IN), "7 waits for jax", "side is past call 2"]


def test_what_jax_wrote_elsewhere_is_copied_and_kept_until_a_call_that_comes_after_the_copy(gpu):
    made = [torch.full((3,), 5.0)]
    (result,) = gpu.call(lambda *arrays: made).results
    assert result.tolist() == [5.0] * 3 and result.data_ptr() != made[0].data_ptr()
    assert gpu.way._copied.arrays == made
    gpu.current, gpu.log[:] = gpu.side, []
    gpu.call(elsewhere)
    assert gpu.log[0] == "side waits for call 1"  # before anything of this call, which may have that memory
    assert [array.tolist() for array in gpu.way._copied.arrays] == [[2.0] * 3]
    gpu.log[:] = []
    gpu.call(elsewhere)  # the same stream has made the copies itself
    assert not any("waits for call" in entry for entry in gpu.log)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_results_of_one_form_may_change_places(gpu, order):
    def function(x, *homes):
        return [torch.add(x, number, out=homes[place]) for number, place in enumerate(order)]

    form = TensorSpec((3,), torch.float32)
    results, _ = gpu.way(itself, Compiled(function, (form, form)), (torch.ones(3),))
    assert [result.tolist() for result in results] == [[1.0] * 3, [2.0] * 3]
    assert gpu.way._copied is None


def test_memory_of_another_form_is_not_taken_for_the_result(gpu):
    def function(x, first, second):
        return [second.view(3).fill_(1), first.view(1, 3).fill_(2)]

    specs = TensorSpec((3,), torch.float32), TensorSpec((1, 3), torch.float32)
    results, _ = gpu.way(itself, Compiled(function, specs), (torch.ones(3),))
    assert [result.tolist() for result in results] == [[1.0] * 3, [[2.0] * 3]]


@pytest.mark.parametrize("where", ["launch", "wait"])  # JAX dispatches on a thread of its own: the wait raises what failed there
def test_what_torch_keeps_for_later_is_given_to_jax(gpu, where):
    failures = [jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes")]

    def short_of_memory(original):
        def once_there_is_room(*arguments):
            if failures:
                raise failures.pop()
            return original(*arguments)

        return once_there_is_room

    function = in_place
    if where == "launch":
        function = short_of_memory(in_place)
    else:
        gpu.way.convert = gpu.way.convert._replace(wait=short_of_memory(gpu.way.convert.wait))
    assert gpu.call(function).results[0].tolist() == [2.0] * 3
    assert gpu.log[len(IN) : len(IN) + 2] == ["torch's cache is emptied", "jax 40 waits for main"]
    assert gpu.log[-2:] == ["1 waits for jax", "main is past call 1"]


@pytest.mark.parametrize(
    ("message", "tries"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes", 2),
        ("INTERNAL: something else", 1),
        ("INTERNAL: NCCL operation failed. Last NCCL warning: 'Cuda failure 2 'out of memory''", 1),  # in the middle of a program
    ],
)
def test_an_error_that_stays_is_raised(gpu, message, tries):
    def fails(*arrays):
        raise jax.errors.JaxRuntimeError(message)

    with pytest.raises(jax.errors.JaxRuntimeError, match=message.split(":")[0]):
        gpu.call(fails)
    assert gpu.log.count("jax 40 waits for main") == tries


def test_a_copy_that_fails_is_still_waited_for(gpu, monkeypatch):
    def fails(tensor):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(launch, "trim_jax_memory", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "clone", fails)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        gpu.call(elsewhere)
    assert gpu.log[-1] == "main is past call 1" and gpu.way._copied.event.name == "call 1"


def test_a_gpu_that_jax_does_not_see_is_named(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend: [])
    with pytest.raises(RuntimeError, match="cuda:1"):
        launch._OnGpu(torch.device("cuda", 1))


def check_memory_is_shared(convert):
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int32):
        tensor = torch.arange(32).to(dtype)
        array = convert.to_array(tensor, None)
        back = convert.to_tensor(array, None)
        assert array.unsafe_buffer_pointer() == tensor.data_ptr() == back.data_ptr()
        assert back.dtype == dtype and array.committed
        assert array.devices() == {jax.local_devices(backend="cpu")[0]}


def test_a_call_goes_past_the_python_of_jax():
    device = jax.local_devices(backend="cpu")[0]
    assert dlpack._direct_conversions(CPU, device) is not None
    check_memory_is_shared(dlpack.conversions(CPU, device))


OTHERS = dict.fromkeys(("buffer_to_dlpack_managed_tensor", "dlpack_managed_tensor_to_buffer"), abs)


@pytest.mark.parametrize("functions", [{}, OTHERS], ids=["none", "others"])
def test_where_jaxlib_has_other_functions_the_public_ones_serve(functions, monkeypatch):
    device = jax.local_devices(backend="cpu")[0]
    with monkeypatch.context() as other_jaxlib:
        other_jaxlib.setitem(sys.modules, "jaxlib._jax", types.SimpleNamespace(**functions))
        assert dlpack._direct_conversions(CPU, device) is None
        convert = dlpack.conversions(CPU, device)
    check_memory_is_shared(convert)


def test_a_tensor_that_needs_nothing_is_handed_over_itself():
    """Another Python object for the same tensor would be freed by a thread of JAX, which has to wait for Python's lock."""
    tensor = torch.ones(3, 4, requires_grad=True)
    assert dlpack.exportable(tensor) is tensor
    assert dlpack.exportable(tensor.detach().t()) is not tensor


@pytest.mark.parametrize("size", [1, 2])
def test_a_program_takes_the_memory_of_its_results(size, monkeypatch):
    """JAX is told which arguments are memory, also where results share a form, and uses it."""
    rows = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:size], (AXIS,)), jax.sharding.PartitionSpec(AXIS))
    monkeypatch.setattr(compiled, "jax_mesh", lambda ring, platform: rows.mesh)
    monkeypatch.setattr(compiled, "sharding", lambda ring, platform: rows)

    def function(x, nothing, y):
        return [x + y, x - y, (x * y).sum(1)]

    specs = TensorSpec((4, 2), torch.float32), TensorSpec((4, 2), torch.float32), TensorSpec((4,), torch.float32)
    program = compiled._on_ring(ProcessRing(tuple(range(size)), 0), "cpu", True, function, 3, specs)
    x, y, *homes = (jax.device_put(jnp.full((4 * size, *form.shape[1:]), 3.0), rows) for form in (*specs[:2], *specs))
    assert program.lower(x, None, y, *homes).as_text().count("tf.aliasing_output") == 3
    memory = {pointer for home in homes for pointer in pointers(home)}
    results = program(x, None, y, *homes)
    assert {pointer for result in results for pointer in pointers(result)} == memory
    assert all(home.is_deleted() for home in homes) and not x.is_deleted()
    assert [result.tolist() for result in results] == [array.tolist() for array in function(x, None, y)]


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("given", [True, False], ids=["memory is given", "copies"])
def test_attention_by_way_of_a_gpu(gpu, given, monkeypatch):
    """The arithmetic and the memory are real: only streams are stand-ins, and JAX is waited for where torch's stream would."""
    monkeypatch.undo()
    real = dlpack.conversions(CPU, jax.local_devices(backend="cpu")[0])
    gpu.way.convert = dlpack.Conversions(
        lambda tensor, _: real.to_array(tensor, None),
        lambda array, _: real.to_tensor(array, None),
        lambda array, _: real.to_tensor(array, None),
    )
    gpu.way.in_place = given
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.main)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(gpu))
    monkeypatch.setattr(gpu.way, "after", lambda stream: 40)
    monkeypatch.setattr(compiled, "launcher", lambda device: gpu.way)
    length = 19 if given else 23  # of no other test: programs are kept
    q, k, v = (torch.randn(1, length, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out, lse = ring_attn.ring_attention(q, k, v, causal=True, return_lse=True)
    found = torch.autograd.grad(out.sin().sum() + lse.sum(), (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
    exact = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    wanted = torch.autograd.grad(exact.sin().sum() + scores.logsumexp(-1).sum(), (q, k, v))
    for got, want in zip((out, *found), (exact, *wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert gpu.calls == 2


def test_a_call_within_a_capture_is_refused(monkeypatch):
    """A graph would hold none of what JAX does; inductor is told so."""
    q = torch.randn(1, 4, 1, 8)
    monkeypatch.setattr(compiled, "is_captured", lambda _: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        ring_attn.ring_attention(q, q, q, mesh="local")
    for operator in (torch.ops.ring_attn.forward, torch.ops.ring_attn.backward):
        assert torch.Tag.cudagraph_unsafe in operator.default.tags
