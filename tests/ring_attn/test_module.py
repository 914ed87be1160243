"""RingAttention against nn.MultiheadAttention: one process here, two processes in workers/module_worker.py."""

import copy
import io
import math
import pickle
import sys

import numpy as np
import pytest
import torch
from launch import torchrun
from torch import nn
from torch.utils.checkpoint import checkpoint

from ring_attn.functional import ring_attention
from ring_attn.module.attention import RingAttention

N, L, S, E, H = 2, 6, 6, 16, 4


def noise(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def padding(length=S):
    """The last keys of the second sequence are padding."""
    mask = torch.zeros(N, length, dtype=torch.bool)
    mask[1, -2:] = True
    return mask


def forbidden(*shape, seed=0):
    """A bool mask, True is not attended to, that leaves something to see in each row."""
    mask = noise(*shape, seed=seed) > 0.5
    mask[..., 0] = False
    return mask


def causal_mask():
    return torch.ones(L, S, dtype=torch.bool).triu(1)


def infinite(mask, dtype=torch.float64):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, float("-inf"))


def randomised(module, seed=7):
    """Every parameter away from its initial value, so that a bias of 0 hides nothing."""
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=seed + index) / math.sqrt(parameter.shape[-1]))
    return module


def pair(dtype=torch.float64, ring=None, **options):
    torch_module = randomised(nn.MultiheadAttention(E, H, dtype=dtype, **options))
    ring_module = RingAttention(E, H, dtype=dtype, **options, **(ring or {}))
    ring_module.load_state_dict(torch_module.state_dict(), strict=True)
    return torch_module, ring_module


def inputs(options, kind="self", dtype=torch.float64):
    kdim, vdim = options.get("kdim") or E, options.get("vdim") or E
    key_length = 9 if kind == "cross" else S
    shapes = [(N, L, E), (N, key_length, kdim), (N, key_length, vdim)]
    if kind == "unbatched":
        shapes = [shape[1:] for shape in shapes]
    elif not options.get("batch_first"):
        shapes = [(shape[1], shape[0], shape[2]) for shape in shapes]
    if kind == "self":
        shapes = shapes[:1]
    return [noise(*shape, seed=20 + i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


def fresh(value):
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


def run(module, tensors, **call):
    """Output, and the gradients of every input, mask and parameter, for one upstream gradient."""
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    call = {name: fresh(value) for name, value in call.items()}
    query, key, value = tensors * 3 if len(tensors) == 1 else tensors
    out, weights = module(query, key, value, need_weights=False, **call)
    assert weights is None
    out.backward(noise(*out.shape, seed=99, dtype=out.dtype))
    masks = {name: value.grad for name, value in call.items() if isinstance(value, torch.Tensor) and value.requires_grad}
    named = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"out": out.detach(), **{f"input {i}": tensor.grad for i, tensor in enumerate(tensors)}, **masks, **named}


def assert_same(ours, theirs, tolerance=1e-10):
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        note = f"{name}: {{}}".format
        torch.testing.assert_close(ours[name], expected, rtol=tolerance, atol=tolerance, msg=note)


FLOAT_MASK = noise(L, S, seed=3).requires_grad_()
FLOAT_MASK_3D = noise(N * H, L, S, seed=4).requires_grad_()
FLOAT_PADDING = noise(N, S, seed=5).requires_grad_()
CASES = {
    "plain": ({}, "self", {}),
    "batch first": ({"batch_first": True}, "self", {}),
    "three tensors": ({}, "three", {}),
    "unbatched, masks": ({"batch_first": True}, "unbatched", {"attn_mask": forbidden(H, L, S), "key_padding_mask": padding()[1]}),
    "no bias": ({"bias": False}, "self", {}),
    "kdim and vdim": ({"kdim": 5, "vdim": 7}, "three", {}),
    "kdim alone, no bias": ({"kdim": 5, "bias": False, "batch_first": True}, "cross", {}),
    "bias_kv": ({"add_bias_kv": True}, "self", {}),
    "zero_attn": ({"add_zero_attn": True}, "self", {}),
    "bias_kv, zero_attn, cross": ({"add_bias_kv": True, "add_zero_attn": True, "batch_first": True}, "cross", {}),
    "bool mask": ({}, "self", {"attn_mask": forbidden(L, S)}),
    "float mask": ({}, "self", {"attn_mask": FLOAT_MASK}),
    "float mask of infinities": ({}, "self", {"attn_mask": infinite(forbidden(L, S))}),
    "padding": ({"batch_first": True}, "self", {"key_padding_mask": padding()}),
    "padding as 0 and -inf": ({}, "self", {"key_padding_mask": infinite(padding())}),
    "float padding": ({}, "self", {"key_padding_mask": FLOAT_PADDING}),
    "float padding with infinities": ({}, "three", {"key_padding_mask": noise(N, S, seed=8) + infinite(padding())}),
    "both, float": ({}, "self", {"attn_mask": FLOAT_MASK, "key_padding_mask": FLOAT_PADDING}),
    "both, float 3-D": ({}, "self", {"attn_mask": FLOAT_MASK_3D, "key_padding_mask": infinite(padding())}),
    "causal, padding": ({}, "self", {"attn_mask": causal_mask(), "is_causal": True, "key_padding_mask": padding()}),
    "everything": (
        {"add_bias_kv": True, "add_zero_attn": True},
        "self",
        {"attn_mask": forbidden(N * H, L, S), "key_padding_mask": padding()},
    ),
    "everything, float": (
        {"add_bias_kv": True, "add_zero_attn": True},
        "self",
        {"attn_mask": FLOAT_MASK, "key_padding_mask": FLOAT_PADDING},
    ),
    "bias_kv where nothing else is seen": (
        {"add_bias_kv": True},
        "self",
        {"key_padding_mask": torch.tensor([[False] * S, [True] * S])},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(name):
    options, kind, call = CASES[name]
    torch_module, ring_module = pair(**options)
    tensors = inputs(options, kind)
    assert_same(run(ring_module, tensors, **call), run(torch_module, tensors, **call))


@pytest.mark.parametrize("name", ["everything"])
def test_equals_torch_in_float32(name):
    options, kind, call = CASES[name]
    torch_module, ring_module = pair(torch.float32, **options)
    tensors = inputs(options, kind, torch.float32)
    assert_same(run(ring_module, tensors, **call), run(torch_module, tensors, **call), tolerance=1e-5)


def test_causal_needs_no_mask():
    torch_module, always = pair(ring={"causal": True})
    tensors = inputs({})
    expected = run(torch_module, tensors, attn_mask=causal_mask())
    assert_same(run(always, tensors), expected)
    on_call = RingAttention(E, H, dtype=torch.float64)
    on_call.load_state_dict(torch_module.state_dict())
    assert_same(run(on_call, tensors, is_causal=True), expected)
    both = forbidden(L, S) | causal_mask()
    torch_module.zero_grad()
    on_call.zero_grad()
    assert_same(run(on_call, tensors, is_causal=True, attn_mask=forbidden(L, S)), run(torch_module, tensors, attn_mask=both))


def test_bool_and_float_masks_may_be_mixed():
    torch_module, ring_module = pair()
    tensors, added = inputs({}), noise(L, S, seed=3)
    expected = run(torch_module, tensors, attn_mask=added, key_padding_mask=infinite(padding()))
    assert_same(run(ring_module, tensors, attn_mask=added, key_padding_mask=padding()), expected)
    for module in (torch_module, ring_module):
        module.zero_grad()
    floats = noise(N, S, seed=5)
    expected = run(torch_module, tensors, attn_mask=infinite(forbidden(L, S)), key_padding_mask=floats)
    assert_same(run(ring_module, tensors, attn_mask=forbidden(L, S), key_padding_mask=floats), expected)


def test_grouped_heads_equal_repeated_heads():
    grouped = randomised(RingAttention(E, H, num_kv_heads=2, add_bias_kv=True, dtype=torch.float64))
    assert grouped.in_proj_weight.shape == (E + 2 * 8, E)
    repeated = nn.MultiheadAttention(E, H, add_bias_kv=True, dtype=torch.float64)

    def repeat(tensor, dim=0):
        return tensor.unflatten(dim, (2, 1, 4)).expand(*[-1] * dim, 2, 2, 4, *[-1] * (tensor.ndim - dim - 1)).flatten(dim, dim + 2)

    def gather(gradient, dim=0):
        return gradient.unflatten(dim, (2, 2, 4)).sum(dim + 1).flatten(dim, dim + 1)

    with torch.no_grad():
        for name in ("in_proj_weight", "in_proj_bias"):
            q, k, v = getattr(grouped, name).split([E, 8, 8])
            getattr(repeated, name).copy_(torch.cat([q, repeat(k), repeat(v)]))
        for name in ("bias_k", "bias_v"):
            getattr(repeated, name).copy_(repeat(getattr(grouped, name), 2))
    repeated.out_proj.load_state_dict(grouped.out_proj.state_dict())
    tensors, call = inputs({}), {"attn_mask": FLOAT_MASK_3D, "key_padding_mask": infinite(padding())}
    expected = run(repeated, tensors, **call)
    for name in ("in_proj_weight", "in_proj_bias"):
        q, k, v = expected[name].split(E)
        expected[name] = torch.cat([q, gather(k), gather(v)])
    for name in ("bias_k", "bias_v"):
        expected[name] = gather(expected[name], 2)
    assert_same(run(grouped, tensors, **call), expected)


def dense(module, x, keep=None, visible=None):
    """Self-attention as the textbook writes it, with the module's soft cap, scale, sinks and bias_k; ``keep`` [N, H, L, S]."""
    q, k, v = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).unflatten(-1, (3, H, -1)).unbind(2)
    if module.bias_k is not None:
        k, v = (torch.cat([t, b.view(1, 1, H, -1).expand(N, -1, -1, -1)], 1) for t, b in ((k, module.bias_k), (v, module.bias_v)))
    logits = torch.einsum("blhd,bshd->bhls", q, k) * (module.scale or module.head_dim**-0.5)
    if module.softcap is not None:
        logits = module.softcap * torch.tanh(logits / module.softcap)
    if visible is not None:
        logits = logits.masked_fill(~visible, float("-inf"))
    if module.sinks is not None:
        sinks = module.sinks.view(1, H, 1, -1).expand(N, -1, L, -1)
        logits = torch.cat([logits, sinks], -1)
    weights = logits.softmax(-1)[..., : k.shape[1]]
    if keep is not None:
        weights = weights * keep / (1 - module.dropout)
    return module.out_proj(torch.einsum("bhls,bshd->blhd", weights, v).flatten(2))


@pytest.mark.parametrize("sinks", [True, 3])
def test_sinks_softcap_scale_window_and_bias_kv_together(sinks):
    module = RingAttention(
        E, H, batch_first=True, add_bias_kv=True, sinks=sinks, softcap=1.5, scale=0.4, sliding_window=(2, 1), dtype=torch.float64
    )
    assert module.sinks.shape == ((H,) if sinks is True else (H, sinks))
    assert bool((module.sinks == 0).all())
    randomised(module)
    distance = torch.arange(L)[:, None] - torch.arange(S)
    visible = torch.cat([(distance <= 2) & (distance >= -1), torch.ones(L, 1, dtype=torch.bool)], 1)
    oracle = copy.deepcopy(module)
    oracle.forward = lambda q, k, v, need_weights: (dense(oracle, q, visible=visible), None)
    tensors = inputs({"batch_first": True})
    assert_same(run(module, tensors), run(oracle, tensors))


@pytest.mark.parametrize("given", ["both", "q_segment_ids", "kv_segment_ids"])
@pytest.mark.parametrize("sinks", [True, 3])
def test_the_key_that_padding_sees_shares_its_weight_with_the_sinks(sinks, given):
    """So they get a gradient from padded rows, too, in whatever way these are said to be padding."""
    module = randomised(RingAttention(E, H, batch_first=True, add_bias_kv=True, sinks=sinks, dtype=torch.float64))
    ids = torch.zeros(N, L, dtype=torch.int32)
    ids[0, -2:], ids[1, :3] = -1, 1
    names = ("q_segment_ids", "kv_segment_ids") if given == "both" else (given,)
    seen = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None]
    visible = torch.cat([seen, torch.ones(N, L, 1, dtype=torch.bool)], 2)[:, None]
    oracle = copy.deepcopy(module)
    oracle.forward = lambda q, k, v, **_: (dense(oracle, q, visible=visible), None)
    tensors = inputs({"batch_first": True})
    assert_same(run(module, tensors, **dict.fromkeys(names, ids)), run(oracle, tensors))


def test_sinks_at_zero_are_the_zero_keys_of_torch():
    torch_module, _ = pair(add_zero_attn=True)
    ring_module = RingAttention(E, H, sinks=True, dtype=torch.float64)
    ring_module.load_state_dict(torch_module.state_dict(), strict=False)
    ours = run(ring_module, inputs({}))
    assert ours.pop("sinks").abs().min() > 0
    assert_same(ours, run(torch_module, inputs({})))


def test_chunks_segments_and_positions_reach_the_ring():
    module = randomised(RingAttention(E, H, chunk_size=3, batch_first=True, dtype=torch.float64))
    x = inputs({"batch_first": True})[0]
    index = torch.arange(L)
    in_chunk = (index[:, None] >= index) & (index[:, None] // 3 == index // 3)
    torch.testing.assert_close(module(x, x, x)[0], dense(module, x, visible=in_chunk))
    module = randomised(RingAttention(E, H, causal=True, batch_first=True, dtype=torch.float64))
    segments = torch.tensor([0, 0, 1, 1, 1, 2]).expand(N, -1)
    packed = (index[:, None] >= index) & (segments[0][:, None] == segments[0])
    torch.testing.assert_close(module(x, x, x, q_segment_ids=segments)[0], dense(module, x, visible=packed))
    key_padding = (index == 4).expand(N, -1)
    seen = packed & (index != 4)
    out = module(x, x, x, q_segment_ids=segments, key_padding_mask=key_padding)[0]
    torch.testing.assert_close(out, dense(module, x, visible=seen))
    backwards = L - 1 - index
    out = module(x, x, x, q_position_ids=backwards, kv_position_ids=backwards)[0]
    torch.testing.assert_close(out, dense(module, x, visible=index[:, None] <= index))


@pytest.mark.parametrize("learned", [False, True])
def test_what_the_function_takes_the_module_takes(learned):
    """Slopes, mask functions, strategy and fused_backward against the function on the module's own projections."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    extras = dict(
        mask_mod=lambda batch, head, q_pos, k_pos: (q_pos - k_pos) % 3 != 1,
        mask_builder=lambda q_len, kv_len, heads, head, reps: np.tri(q_len, kv_len, dtype=bool),
        fused_backward=True,
        strategy="ring",
        platform="xla",
    )
    given = nn.Parameter(slopes.clone()) if learned else slopes
    module = randomised(RingAttention(E, H, batch_first=True, alibi_slopes=given, dtype=torch.float64, **extras))
    with torch.no_grad():
        module.alibi_slopes.copy_(slopes)
    assert ("alibi_slopes" in module.state_dict()) == learned
    assert module.to(torch.float32).alibi_slopes.dtype == torch.float32
    module.double()
    x = inputs({"batch_first": True})[0]
    out = module(x, x, x)[0]
    q, k, v = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).unflatten(-1, (3, H, -1)).unbind(2)
    expected = module.out_proj(ring_attention(q, k, v, alibi_slopes=slopes, **extras).flatten(2))
    torch.testing.assert_close(out, expected)
    plain = module.out_proj(ring_attention(q, k, v, **extras).flatten(2))
    assert not torch.allclose(out, plain)
    out.sum().backward()
    assert not learned or module.alibi_slopes.grad.abs().min() > 0


def test_slopes_are_one_a_head():
    with pytest.raises(ValueError, match=r"alibi_slopes must be a tensor \[num_heads\] = \[4\], got \[3\]"):
        RingAttention(E, H, alibi_slopes=torch.zeros(3))


def test_a_row_that_sees_nothing_gives_zero():
    _, module = pair(bias=False, batch_first=True)
    x = inputs({"batch_first": True})[0]
    out, _ = module(x, x, x, key_padding_mask=torch.tensor([[False] * S, [True] * S]))
    assert bool((out[1] == 0).all())
    assert bool((out[0] != 0).any())
    out.sum().backward()
    assert bool((x.grad[1] == 0).all())
    assert all(bool(parameter.grad.isfinite().all()) for parameter in module.parameters())


@pytest.mark.slow
def test_dropout_drops_the_weights_of_its_seed():
    import jax.numpy as jnp

    from jax_core.masks.dropout import keep_mask, seed_words

    module = randomised(RingAttention(E, H, dropout=0.4, batch_first=True, dtype=torch.float64)).train()
    x = inputs({"batch_first": True})[0]
    torch.manual_seed(3)
    ours = module(x, x, x)[0]
    torch.manual_seed(3)
    words = seed_words(int(torch.randint(2**63 - 1, (), dtype=torch.int64)))
    batch, heads, rows, keys = jnp.ix_(jnp.arange(N), jnp.arange(H), jnp.arange(L), jnp.arange(S))
    keep = torch.from_numpy(np.array(keep_mask(words, batch, heads, rows, keys, 0.4)))
    torch.testing.assert_close(ours, dense(module, x, keep=keep))


def test_add_bias_kv_does_not_train_with_dropout():
    module = randomised(RingAttention(E, H, dropout=0.4, add_bias_kv=True, batch_first=True, dtype=torch.float64)).train()
    x = inputs({"batch_first": True})[0]
    with pytest.raises(NotImplementedError, match=r"add_bias_kv must train without dropout, got dropout=0\.4"):
        module(x, x, x)
    torch.testing.assert_close(module.eval()(x, x, x)[0], dense(module, x))


def test_dropout_follows_torchs_generator():
    module = randomised(RingAttention(E, H, dropout=0.5, batch_first=True, dtype=torch.float64))
    x = inputs({"batch_first": True})[0]

    def outputs(seed, count):
        torch.manual_seed(seed)
        return [module(x, x, x)[0] for _ in range(count)]

    first, second = outputs(0, 2)
    assert not torch.equal(first, second)
    assert all(torch.equal(one, other) for one, other in zip(outputs(0, 2), (first, second), strict=True))
    torch.manual_seed(0)
    plain = torch.autograd.grad(module(x, x, x)[0].sum(), x)[0]
    torch.manual_seed(0)
    recomputed = torch.autograd.grad(checkpoint(lambda y: module(y, y, y)[0], x, use_reentrant=False).sum(), x)[0]
    assert torch.equal(plain, recomputed)
    before = torch.get_rng_state()
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    torch.testing.assert_close(module(x, x, x)[0], dense(module, x))
    module.train().dropout = 0.0
    module(x, x, x)
    assert torch.equal(torch.get_rng_state(), before)


def test_state_dicts_and_first_values_are_those_of_torch():
    for options in ({}, {"kdim": 5, "vdim": 7, "add_bias_kv": True}, {"bias": False}):
        torch.manual_seed(1)
        torch_module = nn.MultiheadAttention(E, H, **options)
        torch.manual_seed(1)
        ring_module = RingAttention(E, H, **options)
        theirs, ours = torch_module.state_dict(), ring_module.state_dict()
        assert list(ours) == list(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        torch_module.load_state_dict(randomised(ring_module).state_dict(), strict=True)
        ring_module.load_state_dict(torch_module.state_dict(), strict=True)
    with pytest.raises(RuntimeError, match="sinks"):
        RingAttention(E, H, sinks=True).load_state_dict(nn.MultiheadAttention(E, H).state_dict(), strict=True)


def test_copies_pickles_and_moves():
    module = randomised(RingAttention(E, H, sinks=2, num_kv_heads=2, mesh="local", batch_first=True)).eval()
    x = inputs({"batch_first": True}, dtype=torch.float32)[0]
    expected = module(x, x, x)[0]
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(file, weights_only=False)):
        assert isinstance(other, RingAttention)
        assert other._qkv_same_embed_dim is False
        assert other.in_proj_weight is not module.in_proj_weight
        assert torch.equal(other(x, x, x)[0], expected)
    module.double()
    torch.testing.assert_close(module(*[x.double()] * 3)[0], expected.double(), rtol=1e-5, atol=1e-5)
    assert {parameter.device.type for parameter in module.to("meta").parameters()} == {"meta"}


def test_a_copy_shares_the_mesh_and_a_pickle_says_that_it_lost_it():
    ring = (sys.stdout.buffer,)  # like a process group: it can be neither copied nor pickled
    module = RingAttention(E, H, mesh=ring, mesh_dim="cp")
    assert copy.deepcopy(module).mesh is ring
    shallow = copy.copy(module)
    assert shallow.mesh is ring and shallow.mesh_dim == "cp" and shallow.in_proj_weight is module.in_proj_weight
    assert copy.deepcopy(nn.Sequential(module))[0].mesh is ring
    lost = pickle.loads(pickle.dumps(module))
    assert lost.mesh_dim == "cp"
    x = torch.zeros(L, N, E)
    with pytest.raises(ValueError, match="unpickled, which loses its mesh"):
        lost(x, x, x)
    lost.mesh, lost.mesh_dim = "local", None
    assert lost(x, x, x)[0].shape == x.shape


def test_half_precision_and_autocast_follow_torch():
    torch_module, ring_module = pair(torch.float32, add_bias_kv=True)
    _, ring_half = pair(torch.bfloat16, add_bias_kv=True, add_zero_attn=True)
    x = inputs({}, dtype=torch.float32)[0].detach()
    assert ring_half(*[x.bfloat16()] * 3)[0].dtype == torch.bfloat16
    mask = noise(L, S, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (module(x, x, x, attn_mask=mask, need_weights=False)[0] for module in (ring_module, torch_module))
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    ours.float().sum().backward()
    assert ring_module.in_proj_weight.grad.dtype == torch.float32


@pytest.fixture
def count_calls(monkeypatch):
    calls = []
    forward = RingAttention.forward

    def counted(self, *args, **kwargs):
        calls.append(kwargs)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(RingAttention, "forward", counted)
    return calls


def encoder_layer(norm_first=False):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    swapped = copy.deepcopy(layer)
    swapped.self_attn = RingAttention(E, H, batch_first=True, dtype=torch.float64)
    swapped.self_attn.load_state_dict(layer.self_attn.state_dict())
    return layer.eval(), swapped.eval()


def slow(layer, x, call):
    """The encoder layer past its fused path and without dropout."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return layer(x, **call)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fused_path_of_an_encoder_layer_stays_off(count_calls, norm_first):
    layer, swapped = encoder_layer(norm_first)
    x = noise(N, L, E)
    calls = [{}, {"src_mask": causal_mask(), "is_causal": True}, {"src_key_padding_mask": padding()}, {"src_mask": forbidden(L, S)}]
    for guard in (torch.no_grad(), torch.inference_mode()):
        for call in calls:
            count_calls.clear()
            with guard:
                ours = swapped(x, **call)
            assert len(count_calls) == 1
            torch.testing.assert_close(ours, slow(layer, x, call))


def test_an_encoder_calls_the_module_in_every_layer(count_calls):
    layer, swapped = encoder_layer()
    theirs, ours = (nn.TransformerEncoder(one, 3, enable_nested_tensor=False).eval() for one in (layer, swapped))
    x = noise(N, L, E)
    for call in ({}, {"src_key_padding_mask": padding()}, {"mask": causal_mask()}, {"mask": causal_mask(), "is_causal": True}):
        count_calls.clear()
        with torch.no_grad():
            torch.testing.assert_close(ours(x, **call), slow(theirs, x, call))
        assert len(count_calls) == 3
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        nn.TransformerEncoder(swapped, 1)


def test_nested_tensors_are_refused():
    _, swapped = encoder_layer()
    with pytest.warns(UserWarning, match="nested tensors is in prototype"):
        nested = torch.nested.nested_tensor([torch.zeros(3, E, dtype=torch.float64)])
    with pytest.raises(ValueError, match="enable_nested_tensor=False"):
        swapped.self_attn(nested, nested, nested)


def test_a_decoder_layer_and_torchs_transformer():
    torch.manual_seed(0)
    theirs = nn.TransformerDecoderLayer(E, H, 32, dropout=0.0, dtype=torch.float64)
    ours = copy.deepcopy(theirs)
    for name in ("self_attn", "multihead_attn"):
        setattr(ours, name, RingAttention(E, H, dtype=torch.float64))
        getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
    target, memory = noise(L, N, E), noise(9, N, E, seed=1)
    call = {"tgt_mask": causal_mask(), "tgt_is_causal": True, "memory_key_padding_mask": padding(9)}
    torch.testing.assert_close(ours(target, memory, **call), theirs(target, memory, **call))


X = torch.zeros(L, N, E)


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (ValueError, "embed_dim must be a positive multiple", lambda: RingAttention(10, 4)),
        (ValueError, "embed_dim must be a positive multiple", lambda: RingAttention(0, 4)),
        (ValueError, "num_kv_heads must divide", lambda: RingAttention(E, H, num_kv_heads=3)),
        (ValueError, "num_kv_heads must divide", lambda: RingAttention(E, H, num_kv_heads=0)),
        (ValueError, r"dropout must lie in \[0, 1\)", lambda: RingAttention(E, H, dropout=1.0)),
        (ValueError, "sinks must be a bool or the number", lambda: RingAttention(E, H, sinks=-1)),
        (NotImplementedError, "need_weights=False", lambda: RingAttention(E, H)(X, X, X, need_weights=True)),
        (ValueError, "query must be 3-D .* got 3 dims and 15 features", lambda: RingAttention(E, H)(X[..., 1:], X, X)),
        (ValueError, "key must be 3-D .* 5 features last", lambda: RingAttention(E, H, kdim=5)(X, X, X)),
        (ValueError, "all have a batch dim or none", lambda: RingAttention(E, H)(X, X[0], X)),
        (ValueError, "query must be 3-D", lambda: RingAttention(E, H)(X[None], X[None], X[None])),
        (ValueError, "mind batch_first", lambda: RingAttention(E, H)(X, X[1:], X)),
        (ValueError, "mind batch_first", lambda: RingAttention(E, H)(X, X[:, :1], X[:, :1])),
        (ValueError, "attn_mask must be bool", lambda: RingAttention(E, H)(X, X, X, attn_mask=torch.zeros(L, S).int())),
        (ValueError, r"must be \(6, 6\) or \(8, 6, 6\)", lambda: RingAttention(E, H)(X, X, X, attn_mask=torch.zeros(L, 7))),
        (ValueError, r"attn_mask must be", lambda: RingAttention(E, H)(X, X, X, attn_mask=torch.zeros(N, L, S))),
        (ValueError, "key_padding_mask must be bool", lambda: RingAttention(E, H)(X, X, X, torch.zeros(N, S).int())),
        (ValueError, r"key_padding_mask must be \(2, 6\)", lambda: RingAttention(E, H)(X, X, X, torch.zeros(S, N))),
        (
            ValueError,
            "q_segment_ids and kv_segment_ids must be",
            lambda: RingAttention(E, H)(X, X[:4], X[:4], padding(4), q_segment_ids=torch.zeros(N, L).int()),
        ),
    ],
)
def test_bad_input_is_named(error, words, call):
    with pytest.raises(error, match=words):
        call()


def test_repr_names_the_options():
    assert "num_kv_heads=2, layout=zigzag, causal=True" in repr(RingAttention(E, H, num_kv_heads=2, layout="zigzag", causal=True))


@pytest.mark.slow
def test_over_two_processes():
    printed = torchrun("module_worker.py", 2)
    assert printed.count("module worker: all right") == 2, printed
