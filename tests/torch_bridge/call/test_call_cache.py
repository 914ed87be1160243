"""A call that was made before skips its checks, and nothing else."""

import gc
import sys
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

import ring_attn
from ring_attn import functional
from torch_bridge.call import call_cache, programs
from torch_bridge.mesh.rings import has_ended


@pytest.fixture
def qkv(monkeypatch):
    """Nothing was called before: where a program of another test is dropped, so are all calls."""
    monkeypatch.setattr(call_cache, "_CALLS", {})
    monkeypatch.setattr(programs, "_PROGRAMS", {})
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 12, 2, 8, generator=generator, requires_grad=True) for _ in range(3)]


@pytest.fixture
def unchecked(monkeypatch):
    """Makes every call that is checked fail."""

    def no_checks():
        monkeypatch.setattr(functional, "check_tensors", lambda *arguments: pytest.fail("this call was checked again"))

    return no_checks


@pytest.fixture
def alone():
    """A job of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def attend(q, k, v, **options):
    return ring_attn.ring_attention(q, k, v, **{"causal": True, **options})


OPTIONS = [{}, {"sinks": torch.ones(2)}, {"return_lse": True}, {"qkv_format": "bhsd"}, {"sliding_window": (3, 0), "softcap": 5.0}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_second_call_is_the_first_one_again(qkv, unchecked, options):
    def bits():
        results = attend(*qkv, **options)
        results = results if isinstance(results, tuple) else (results,)
        return *results, *torch.autograd.grad([result.sin().sum() for result in results], qkv)

    first = bits()
    unchecked()
    assert all(map(torch.equal, first, bits()))


def test_the_second_call_is_that_of_its_own_tensors(qkv, unchecked):
    attend(*qkv)
    unchecked()
    others = [torch.nn.Parameter(x.detach().flip(1)) for x in qkv]
    out = attend(*others)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in others), is_causal=True).transpose(1, 2)
    torch.testing.assert_close(out, exact)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in others)


def test_only_what_needs_a_gradient_gets_one(qkv):
    q, k, v = (x.detach() for x in qkv)
    attend(q, k, v)
    assert not attend(q, k, v).requires_grad
    sinks = torch.zeros(2, requires_grad=True)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(attend(q, k, v, sinks=sinks).sum(), sinks)
        assert gradient.abs().sum() > 0


WRONG = [
    (dict(sliding_window=4), dict(sliding_window=4.0), "sliding_window"),
    (dict(sliding_window=(4, 0)), dict(sliding_window=(4.0, 0)), "sliding_window"),
    (dict(softcap=1.0), dict(softcap=True), "softcap"),
    (dict(chunk_size=2), dict(chunk_size=2.0), "chunk_size"),
]


@pytest.mark.parametrize(("right", "wrong", "name"), WRONG, ids=str)
def test_equal_is_not_the_same(qkv, right, wrong, name):
    attend(*qkv, **right)
    with pytest.raises(ValueError, match=name):
        attend(*qkv, **wrong)


def test_what_has_no_truth_is_checked(qkv):
    with pytest.raises(ValueError, match="dropout_p must be a number"):
        attend(*qkv, dropout_p=torch.ones(2))


def test_an_option_without_a_hash_is_checked_each_time(qkv):
    for _ in range(2):
        assert torch.equal(attend(*qkv, sliding_window=[3, 0]), attend(*qkv, sliding_window=(3, 0)))
    assert len(call_cache._CALLS) == 1


def test_torchs_setting_of_determinism_counts(qkv):
    attend(*qkv)
    torch.use_deterministic_algorithms(True)
    try:
        attend(*qkv)
    finally:
        torch.use_deterministic_algorithms(False)
    attend(*qkv, deterministic=True)
    assert len(call_cache._CALLS) == 3
    assert [call.operation.options.deterministic for call in list(programs._CALLS.values())[-2:]] == [False, True]


def test_the_dtype_of_autocast_counts(qkv):
    dtypes = []
    for dtype in (torch.bfloat16, torch.float16) * 2:
        with torch.autocast("cpu", dtype):
            dtypes.append(attend(*qkv).dtype)
    assert dtypes == [torch.bfloat16, torch.float16] * 2


def test_a_group_made_after_the_first_call_counts(qkv, request):
    attend(*qkv)
    request.getfixturevalue("alone")
    attend(*qkv)
    assert len(call_cache._CALLS) == 2


def test_tensors_of_another_kind_are_checked(qkv):
    q, k, v = qkv
    attend(q, k, v)
    with pytest.raises(ValueError, match="nested"):
        attend(q, torch.nested.nested_tensor([k[0].detach()], layout=torch.jagged), v)
    with pytest.raises(ValueError, match="to_dense"):
        attend(q, k.detach().to_sparse(), v)
    with pytest.raises(ValueError, match="float64"):
        attend(q, k.double(), v)
    with pytest.raises(ValueError, match="Tensor"):
        attend(q, k.detach().numpy(), v)
    with pytest.raises(ValueError, match="meta"):
        attend(*(x.detach().to("meta") for x in qkv))


def test_what_surrounds_a_call_counts(qkv, monkeypatch):
    assert attend(*qkv).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert [attend(*qkv).dtype for _ in range(2)] == [torch.bfloat16] * 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="process group"):
        attend(*qkv)
    assert attend(*qkv, mesh="local").shape == qkv[0].shape


def test_a_repeated_call_is_still_an_operator(qkv):
    attend(*qkv)
    with FlopCounterMode(display=False) as counter:
        attend(*qkv)
    assert counter.get_total_flops() > 0
    doubled = torch.vmap(attend)(*(torch.stack([x, x]) for x in qkv))
    torch.testing.assert_close(doubled[1], attend(*qkv))


def test_ids_that_have_nothing_to_check_are_remembered(qkv):
    """Those of a cache: int32, of both sides. Others change on their way, or have to be looked at."""
    ids = torch.zeros(1, 12, dtype=torch.int32)
    for given, known in (({"kv_segment_ids": ids}, 0), ({"q_segment_ids": ids.long()}, 0), ({"q_segment_ids": ids}, 1)):
        attend(*qkv, **{"kv_segment_ids": ids, **given} if known else given)
        assert len(call_cache._CALLS) == known
    later = torch.tensor([[0] * 6 + [1] * 6], dtype=torch.int32)
    assert torch.equal(
        attend(*qkv, q_segment_ids=later, kv_segment_ids=later), attend(*qkv, q_segment_ids=later.long(), kv_segment_ids=later)
    )


def test_ids_are_checked_each_time(qkv):
    ids = torch.zeros(1, 12, dtype=torch.int64)
    attend(*qkv, q_segment_ids=ids)
    with pytest.raises(ValueError, match="int32"):
        attend(*qkv, q_segment_ids=ids + 2**40)


def test_each_call_draws_its_own_dropout(qkv):
    assert not torch.equal(*(attend(*qkv, dropout_p=0.5) for _ in range(2)))


def test_a_program_that_is_dropped_is_not_kept(qkv, monkeypatch):
    attend(*qkv)
    made = weakref.ref(next(reversed(programs._PROGRAMS.values())).program)
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 1)
    shorter = [x[:, :7].detach() for x in qkv]
    attend(*shorter)
    gc.collect()
    assert made() is None
    attend(*qkv)  # is made again


def test_a_second_derivative_is_refused(qkv):
    attend(*qkv)
    (gradient,) = torch.autograd.grad(attend(*qkv).square().sum(), qkv[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        gradient.sum().backward()


def test_a_process_group_that_is_destroyed_ends(qkv, alone):
    for _ in range(2):
        attend(*qkv)
        attend(*qkv, mesh=dist.group.WORLD)
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
    assert attend(*qkv).shape == qkv[0].shape  # alone, without a group


def test_a_call_has_the_groups_that_there_are(qkv, alone, monkeypatch):
    monkeypatch.setattr(programs, "_CALLS", {})
    monkeypatch.setattr(programs, "_KEYS", {})
    for _ in range(2):
        attend(*qkv, mesh=dist.group.WORLD)
        (call,) = programs._CALLS.values()
        assert call.ring.groups == (dist.group.WORLD,) and not has_ended(call.ring)
        assert [made.request.ring.groups for made in programs._PROGRAMS.values()] == [call.ring.groups]
        dist.destroy_process_group()
        assert has_ended(call.ring)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_equal_dimensions_of_a_mesh_are_not_the_same(qkv, alone, unchecked):
    mesh = init_device_mesh("cpu", (1,))
    attend(*qkv, mesh=mesh, mesh_dim=0)
    with pytest.raises(ValueError, match="mesh_dim"):
        attend(*qkv, mesh=mesh, mesh_dim=False)
    unchecked()
    attend(*qkv, mesh=mesh, mesh_dim=0)


def test_programs_may_be_made_on_several_threads(qkv, monkeypatch):
    """What makes a program is a stand-in: what is noted of programs was gone through while others were added."""
    ring_attn.ring_attention(*qkv)
    (key, specs, device), made = programs._PROGRAMS.popitem()
    monkeypatch.setattr(programs, "backend_of", lambda _: SimpleNamespace(program=lambda _: made.program))
    monkeypatch.setattr(type(made.request.operation), "in_torch", lambda *_: None)
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 50)
    before = sys.getswitchinterval()

    def make(thread: int) -> None:
        for number in range(300):
            length = 1 + thread + 4 * number
            programs._make(key, tuple(each and ((1, length, *each[0][2:]), each[1]) for each in specs), device)

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            list(threads.map(make, range(4)))
    finally:
        sys.setswitchinterval(before)
    assert len(programs._PROGRAMS) == 50


def test_the_calls_that_are_remembered_have_a_bound(qkv, monkeypatch):
    monkeypatch.setattr(call_cache, "MOST", 2)
    for name in ("bshd", "bhsd", "sbhd"):
        attend(*qkv, qkv_format=name)
    assert len(call_cache._CALLS) == 1


def test_a_function_and_a_module_share_a_program_and_each_says_its_own_names():
    module = ring_attn.RingAttention(8, 2, batch_first=True, causal=True, softcap=3.0)
    q, x = torch.randn(1, 6, 2, 4), torch.randn(1, 6, 8)
    ring_attn.ring_attention(q, q, q, causal=True, softcap=3.0)
    made = len(programs._PROGRAMS)
    module(x, x, x)
    assert len(programs._PROGRAMS) == made
    with pytest.raises(ValueError, match=r"^dropout_p must"):
        ring_attn.ring_attention(q, q, q, causal=True, dropout_p=1.5)
    module.dropout = 1.5
    with pytest.raises(ValueError, match=r"^dropout must"):
        module(x, x, x)


def test_callers_with_equal_options_share_a_program(qkv):
    """Whatever they call their arguments: names are for errors alone, and an error has those of the call that raises it."""
    module, x = ring_attn.RingAttention(16, 2, causal=True, softcap=3.0, batch_first=True), torch.randn(1, 12, 16)
    attend(*qkv, softcap=3.0)
    before = len(programs._PROGRAMS), len(programs._CALLS)
    module(x, x, x)
    assert (len(programs._PROGRAMS), len(programs._CALLS)) == before
    module.dropout = 2.0
    for call, name in ((lambda: attend(*qkv, softcap=3.0, dropout_p=2.0), "dropout_p"), (lambda: module(x, x, x), "dropout")):
        with pytest.raises(ValueError, match=rf"^{name} must be in "):
            call()
