"""ring_attn.ring_attention on one process: against torch's own attention, through gradcheck, and where torch looks inside."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ring_attn
from torch_bridge.backends import launch


def normal(*shape, dtype=torch.float64, seed=0, grad=True):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_(grad)


def qkv(length=21, heads=4, kv_heads=4, dim=8, dtype=torch.float64):
    shapes = (2, length, heads, dim), (2, length, kv_heads, dim), (2, length, kv_heads, dim)
    return [normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), **options).transpose(1, 2)


def gradients(out, inputs):
    return torch.autograd.grad(out, inputs, grad_outputs=normal(*out.shape, dtype=out.dtype, seed=9, grad=False), retain_graph=True)


def assert_same(ours, theirs, inputs, tolerance=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for got, want in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_is_torchs_attention(causal):
    inputs = qkv()
    assert_same(ring_attn.ring_attention(*inputs, causal=causal), sdpa(*inputs, is_causal=causal), inputs)


def test_bhsd_and_gqa():
    inputs = qkv(kv_heads=2)
    out = ring_attn.ring_attention(*(x.transpose(1, 2) for x in inputs), qkv_format="bhsd", scale=0.3).transpose(1, 2)
    assert_same(out, sdpa(*inputs, scale=0.3, enable_gqa=True), inputs)


def test_bias_and_mask_are_torchs_attn_mask():
    inputs = [*qkv(), normal(1, 4, 21, 21, seed=5)]
    mask = torch.rand(2, 1, 21, 21, generator=torch.Generator().manual_seed(1)) > 0.3
    ours = ring_attn.ring_attention(*inputs[:3], bias=inputs[3], mask=mask)
    assert_same(ours, sdpa(*inputs[:3], attn_mask=inputs[3].masked_fill(~mask, -torch.inf)), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_error_is_that_of_torchs_attention_in_the_same_dtype(dtype):
    inputs = qkv(dtype=dtype)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact_out = sdpa(*exact_inputs, is_causal=True)
    exact = [exact_out, *gradients(exact_out, exact_inputs)]
    ours, theirs = ring_attn.ring_attention(*inputs, causal=True), sdpa(*inputs, is_causal=True)
    assert ours.dtype == dtype
    for got, plain, want in zip((ours, *gradients(ours, inputs)), (theirs, *gradients(theirs, inputs)), exact, strict=True):
        assert got.dtype == dtype
        assert (got - want).abs().max() <= 2 * (plain - want).abs().max() + 2 * torch.finfo(dtype).eps


def test_gradcheck_of_everything_that_has_a_gradient():
    q, k, v = normal(1, 5, 2, 3), normal(1, 5, 1, 3, seed=1), normal(1, 5, 1, 2, seed=2)
    bias, sinks, slopes = normal(1, 2, 5, 5, seed=3), normal(2, 2, seed=4), normal(2, seed=5)

    def attention(q, k, v, bias, sinks, slopes):
        options = dict(causal=True, softcap=3.0, dropout_p=0.2, dropout_seed=11, return_lse=True)
        return ring_attn.ring_attention(q, k, v, bias=bias, sinks=sinks, alibi_slopes=slopes, **options)

    assert torch.autograd.gradcheck(attention, (q, k, v, bias, sinks, slopes))


def test_operators_keep_torchs_rules():
    from torch_bridge.attention.operation import OPERANDS

    attention = ring_attn.ring_attention(*qkv(), causal=True)
    call = attention.grad_fn.key
    operands = [*(x.detach() for x in qkv()), *(None for _ in OPERANDS[3:])]
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.ring_attn.forward.default, (operands, call), test_utils=checks)
    out, lse = torch.ops.ring_attn.forward(operands, call)
    for dlse in (lse, None):
        arguments = (operands, [out, lse], [out, dlse], [0, 2], call)
        torch.library.opcheck(torch.ops.ring_attn.backward.default, arguments, test_utils=checks)


class Operators(TorchDispatchMode):
    """The names of ours that run inside it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen += [str(function)] if "ring_attn" in str(function) else []
        return function(*args, **(kwargs or {}))


def test_who_looks_at_operators_sees_them():
    inputs = qkv()
    out = ring_attn.ring_attention(*inputs)
    with Operators() as mode:
        watched = ring_attn.ring_attention(*inputs)
        found = gradients(watched, inputs)
    assert mode.seen == ["ring_attn.forward.default", "ring_attn.backward.default"]
    assert torch.equal(watched, out) and all(map(torch.equal, found, gradients(out, inputs)))
    with torch.autograd.profiler.profile() as profile:
        ring_attn.ring_attention(*inputs)
    assert "ring_attn::forward" in {event.key for event in profile.key_averages()}


def test_a_program_made_while_torch_traces_runs_afterwards():

    inputs = qkv(length=17)
    launch._launcher.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced = ring_attn.ring_attention(*inputs)
    assert traced.shape == inputs[0].shape and type(traced) is not torch.Tensor
    assert "to_jax" not in launch.launcher(torch.device("cpu")).convert.to_array.__code__.co_names  # not the long way
    assert_same(ring_attn.ring_attention(*inputs), sdpa(*inputs), inputs)


@pytest.mark.parametrize("used", ["out", "lse", "both"])
def test_an_output_that_nothing_was_made_of_has_no_gradient(used, monkeypatch):
    from torch_bridge.backends.compiled import CompiledProgram

    inputs = qkv()
    out, lse = ring_attn.ring_attention(*inputs, causal=True, return_lse=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", *inputs[:2]) / 8**0.5
    scores = scores.masked_fill(~torch.ones(21, 21, dtype=torch.bool).tril(), -torch.inf)
    ours = {"out": out.sin().sum(), "lse": lse.cos().sum(), "both": out.sin().sum() + lse.cos().sum()}[used]
    exact_out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), inputs[2])
    exact = {"out": exact_out.sin().sum(), "lse": scores.logsumexp(-1).cos().sum()}
    theirs = exact["out"] + exact["lse"] if used == "both" else exact[used]
    given, backward = [], CompiledProgram.backward

    def spy(program, operands, results, cotangents, wanted):
        given.append(cotangents[1] is not None)
        return backward(program, operands, results, cotangents, wanted)

    monkeypatch.setattr(CompiledProgram, "backward", spy)
    got = torch.autograd.grad(ours, inputs)
    want = torch.autograd.grad(theirs, inputs, allow_unused=True, materialize_grads=True)
    assert given == [used != "out"]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_only_wanted_gradients_are_made():
    q, k, v = qkv()
    bias = normal(1, 1, 21, 21, seed=5)
    out = ring_attn.ring_attention(q.detach(), k.detach(), v.detach(), bias=bias)
    expected = gradients(sdpa(q.detach(), k.detach(), v.detach(), attn_mask=bias), [bias])
    torch.testing.assert_close(gradients(out, [bias]), expected)
    assert not ring_attn.ring_attention(q.detach(), k.detach(), v.detach()).requires_grad


def test_checkpoint_and_offload_hooks():
    inputs = qkv()
    plain = ring_attn.ring_attention(*inputs, causal=True)
    torch.manual_seed(3)
    again = checkpoint(lambda *x: ring_attn.ring_attention(*x, causal=True), *inputs, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        offloaded = ring_attn.ring_attention(*inputs, causal=True)
    assert_same(again, plain, inputs)
    assert_same(offloaded, plain, inputs)


def test_dropout_under_checkpoint_draws_the_same_seed_again():
    inputs = qkv()

    def attention(*x):
        return ring_attn.ring_attention(*x, dropout_p=0.5)

    torch.manual_seed(3)
    plain = attention(*inputs)
    torch.manual_seed(3)
    assert_same(checkpoint(attention, *inputs, use_reentrant=False), plain, inputs)
    assert not torch.equal(attention(*inputs), plain)


@pytest.mark.parametrize("seed", [0, 5, -1, 2**40 + 5, torch.tensor(5)])
def test_all_64_bits_of_a_seed_count(seed):
    q, k, v = qkv()

    def attention(seed):
        return ring_attn.ring_attention(q, k, v, dropout_p=0.5, dropout_seed=seed)

    assert torch.equal(attention(seed), attention(int(seed)))
    assert torch.equal(attention(seed), attention(5)) == (int(seed) == 5)


@pytest.mark.parametrize("seed", [0, 5, -1, 2**31, 2**40 + 5, 2**63 - 1, -(2**63)])
def test_a_seed_is_two_words(seed):
    """Also one that was drawn within a graph."""
    from torch_bridge.attention import operands

    for given in (seed, torch.tensor(seed), torch.tensor([seed])):
        words = operands._seed_words(given, torch.device("cpu"))
        assert words.dtype == torch.int32
        assert [word % 2**32 for word in words.tolist()] == [seed % 2**32, (seed >> 32) % 2**32]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, of every autograd.Function
def test_torch_compile_in_one_graph():
    inputs = qkv(dtype=torch.float32)

    def attention(q, k, v):
        return ring_attn.ring_attention(q * 2, k, v, causal=True) + 1

    assert_same(torch.compile(attention, backend="aot_eager", fullgraph=True)(*inputs), attention(*inputs), inputs, tolerance=1e-6)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_ids_and_dropout_in_one_graph():
    inputs = qkv(dtype=torch.float32)
    ids = torch.arange(21).expand(2, 21) // 7

    def attention(q, k, v, ids):
        return ring_attn.ring_attention(q, k, v, q_segment_ids=ids, dropout_p=0.3, dropout_seed=2**40 + 5)

    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    assert_same(compiled(*inputs, ids), attention(*inputs, ids), inputs, tolerance=1e-6)
    with pytest.raises(RuntimeError, match="q_segment_ids must fit in int32"):
        compiled(*inputs, ids + 2**32)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's, where it goes on
def test_torch_compile_around_a_mask_mod():
    inputs = qkv(dtype=torch.float32)

    def attention(q, k, v):
        return ring_attn.ring_attention(q * 2, k, v, mask_mod=lambda batch, head, q_pos, k_pos: q_pos >= k_pos) + 1

    assert_same(torch.compile(attention, backend="aot_eager")(*inputs), attention(*inputs), inputs, tolerance=1e-6)


def test_long_ids_are_not_narrowed():
    q, k, v = qkv()
    ids = torch.arange(21).expand(2, 21) // 7
    within = ring_attn.ring_attention(q, k, v, q_segment_ids=ids)
    same_segment = ids[:, None, :, None] == ids[:, None, None, :]
    assert_same(within, sdpa(q, k, v, attn_mask=same_segment), (q, k, v))
    with pytest.raises(ValueError, match="int32"):
        ring_attn.ring_attention(q, k, v, q_segment_ids=ids + 2**32)


def test_rows_without_keys_are_zero_and_have_zero_gradients():
    q, k, v = qkv()
    ids = torch.zeros(2, 21, dtype=torch.int64)
    ids[:, 15:] = -1
    out, lse = ring_attn.ring_attention(q, k, v, q_segment_ids=ids, return_lse=True)
    assert (out[:, 15:] == 0).all() and torch.isneginf(lse[..., 15:]).all()
    for gradient in gradients(out, (q, k, v)):
        assert (gradient[:, 15:] == 0).all() and gradient.isfinite().all()


def test_inputs_and_results_do_not_share_memory():
    q, k, v = (x.detach() for x in qkv())
    out = ring_attn.ring_attention(q, k, v)
    before = out.clone()
    for x in (q, k, v):
        x.zero_()
    assert torch.equal(out, before)


def bad_inputs():
    q, k, v = (x.detach() for x in qkv())
    ids = torch.zeros(2, 21, dtype=torch.int64)
    return {
        "rank": (dict(q=q[0]), "4 dimensions"),
        "no tensor": (dict(k=k.numpy()), "torch.Tensor"),
        "heads": (dict(k=k[:, :, :3], v=v[:, :, :3]), "q heads must be a multiple of k/v heads"),
        "k and v": (dict(v=v[:, :20]), "share length and heads"),
        "head dim": (dict(k=k[..., :7]), "share the head dim"),
        "batch": (dict(k=k[:1], v=v[:1]), "batch"),
        "dtypes": (dict(k=k.float()), "share a dtype"),
        "integers": (dict(q=q.long(), k=k.long(), v=v.long()), "float32"),
        "device": (dict(k=k.to("meta")), "one device"),
        "layout": (dict(layout="zigzag"), "divisible by 2"),
        "unknown layout": (dict(layout="spiral"), "contiguous, zigzag, striped"),
        "format": (dict(qkv_format="hbsd"), "bshd, bhsd"),
        "platform": (dict(platform="metal"), "platform must be one of"),
        "window": (dict(sliding_window=-3), "sliding_window"),
        "dropout": (dict(dropout_p=1.5), r"\[0, 1\)"),
        "seed": (dict(dropout_p=0.1, dropout_seed=torch.rand(2)), "dropout_seed"),
        "bias": (dict(bias=torch.zeros(2, 4, 21, 20, dtype=torch.float64)), "broadcast"),
        "mask": (dict(mask=torch.zeros(2, 4, 21, 21)), "dtype bool"),
        "ids": (dict(q_segment_ids=ids.float()), "integers"),
        "one side of ids": (dict(k=k[:, :20], v=v[:, :20], q_segment_ids=ids), "together"),
        "sinks": (dict(sinks=torch.zeros(3, 2, dtype=torch.float64)), "sinks must be"),
        "mesh": (dict(mesh=3), "DeviceMesh"),
        "mask_mod": (dict(mask_mod=lambda b, h, i, j: i), "boolean"),
        "python if": (dict(mask_mod=lambda b, h, i, j: i > j if i else j > i), "operators"),
    }


@pytest.mark.parametrize("case", bad_inputs())
def test_bad_input_says_what_must_hold(case):
    changes, message = bad_inputs()[case]
    inputs = dict(zip("qkv", (x.detach() for x in qkv()), strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        ring_attn.ring_attention(**inputs)


@pytest.mark.parametrize("platform", ["triton", "cuda", "pallas"])
def test_a_named_platform_never_falls_back(platform):
    with pytest.raises(NotImplementedError, match=platform):
        ring_attn.ring_attention(*qkv(), platform=platform)


def test_unknown_option_is_refused():
    with pytest.raises(TypeError, match="window_size"):
        ring_attn.ring_attention(*qkv(), window_size=3)


@pytest.mark.parametrize("upstream", [True, False], ids=["cotangents with a graph", "cotangents without"])
def test_second_derivatives_are_refused(upstream):
    """Also where nothing but q, k and v has a graph: a penalty on gradients would else be left out of the loss's own."""
    inputs, weights = qkv(), normal(2, 21, 4, 8).detach().requires_grad_(upstream)
    out = ring_attn.ring_attention(*inputs)
    (dq, *_) = torch.autograd.grad(out, inputs, grad_outputs=weights, create_graph=True)
    torch.testing.assert_close(dq, torch.autograd.grad(out, inputs[0], grad_outputs=weights, retain_graph=True)[0], rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        (out.sum() + dq.square().sum()).backward()


@pytest.mark.parametrize("where", [0, 1, 2], ids="qkv")
def test_nan_of_one_document_goes_no_further_than_in_sdpa(where):
    """What of the other document's outputs and gradients is NaN is so with torch's math kernel, too."""
    operands = [x.detach().clone() for x in qkv()]
    operands[where][:, 2] = math.nan
    length = operands[0].shape[1]
    ids = (torch.arange(length) >= 9).int()
    visible = (ids[:, None] == ids) & torch.ones(length, length).tril().bool()

    def with_nan(attention):
        leaves = [x.clone().requires_grad_() for x in operands]
        out = attention(*leaves)
        out[:, 9:].sum().backward()
        return [x.isnan().any(-1) for x in (out, *(leaf.grad for leaf in leaves))]

    def by_sdpa(*leaves):
        with sdpa_kernel(SDPBackend.MATH):
            return sdpa(*leaves, attn_mask=visible)

    ours = with_nan(lambda *x: ring_attn.ring_attention(*x, causal=True, q_segment_ids=ids, kv_segment_ids=ids))
    assert not any((mine & ~other).any() for mine, other in zip(ours, with_nan(by_sdpa), strict=True))


def test_a_mask_mod_is_read_afresh_on_every_call():
    import jax.numpy as jnp

    class SameDocument:
        def __init__(self, ids):
            self.ids = ids

        def __call__(self, batch, head, q_pos, k_pos):
            return self.ids[q_pos] == self.ids[k_pos]

    q, k, v = qkv()
    rule = SameDocument(None)
    for cut in (7, 12):
        ids = torch.arange(21) // cut
        rule.ids = jnp.asarray(ids.to(torch.int32).numpy())
        ours = ring_attn.ring_attention(q, k, v, mask_mod=rule)
        assert_same(ours, sdpa(q, k, v, attn_mask=ids[:, None] == ids[None]), (q, k, v))


@pytest.mark.parametrize(
    "number",
    [{"scale": torch.tensor(0.5)}, {"softcap": torch.tensor(2.0)}, {"dropout_p": torch.tensor(0.1)}, {"dropout_seed": 2**70}],
)
def test_numbers_are_numbers(number):
    with pytest.raises(ValueError, match=next(iter(number))):
        ring_attn.ring_attention(*qkv(), **{"dropout_p": 0.1, "dropout_seed": 1} | number)


def test_a_window_wider_than_any_position_has_no_bound():
    inputs = qkv()
    for window in (2**31 - 1, 10**12, (None, 2**31 - 2)):
        assert_same(ring_attn.ring_attention(*inputs, sliding_window=window), sdpa(*inputs), inputs)
    assert_same(ring_attn.ring_attention(*inputs, chunk_size=10**12), sdpa(*inputs, is_causal=True), inputs)


def test_one_head_in_either_order_of_memory():
    """A dimension of 1 has whatever stride it got, and each call is another one's program: of operands and of cotangents."""
    ours, usual = [], []
    for heads_first in (False, True, False):
        torch.manual_seed(0)
        parts = [torch.randn(1, 16, heads, 8) for heads in (1, 1, 1, 1)]
        if heads_first:
            parts = [torch.empty(1, 1, 16, 8).copy_(x.transpose(1, 2)).transpose(1, 2) for x in parts]
        *qkv, cotangent = parts
        qkv = [x.requires_grad_() for x in qkv]
        out = ring_attn.ring_attention(*qkv, mesh="local", causal=True)
        ours.append([out.detach(), *torch.autograd.grad(out, qkv, cotangent)])
        expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), is_causal=True).transpose(1, 2)
        usual.append([expected.detach(), *torch.autograd.grad(expected, qkv, cotangent)])
    torch.testing.assert_close(ours, usual)
