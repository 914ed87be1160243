"""Tensors on XLA devices: four CPU devices in SPMD mode, in an environment with torch-xla (`make test-xla`)."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch_xla", reason="torch-xla has an environment of its own: make test-xla")

import torch
import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xla_runtime
from attention_cases import (
    CASES,
    CAUSAL,
    DIFFERENTIABLE,
    DROPOUT,
    FUNCTION,
    PACKED,
    SEED,
    SHUFFLED,
    SINKS,
    Arrays,
    Case,
    every_third_pair,
    from_layout,
    make_cotangents,
    make_inputs,
    small_blocks,
    to_layout,
)
from oracle_assertions import assert_like_the_oracle
from torch import nn

import ring_attn
from jax_core.masks.layout import LAYOUTS, padded_length, permutation
from ring_attn.functional import NAMES

xla_runtime.use_spmd()

DEVICES = 4
ROOT = Path(__file__).parents[3]


def ring_of(size: int) -> dict[str, Any]:
    """The arguments that make a ring of ``size``: a row of the four devices. The other dimension of the mesh splits the batch."""
    if size == 1:
        return {"mesh": "local"}
    mesh = spmd.Mesh(np.arange(DEVICES), (DEVICES // size, size), ("data", "sequence"))
    return {"mesh": mesh, "mesh_dim": "sequence"}


def on_xla(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(array)).to("xla")


def whole(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def torch_results(case: Case, inputs: Arrays, cotangents: Arrays, **settings) -> Arrays:
    """out, lse and the gradients of `ring_attn.ring_attention`, in natural order and float64."""
    dtype = getattr(torch, case.dtype)
    moved, cotangents = to_layout(case, inputs), to_layout(case, cotangents)
    seed = moved.pop("dropout_seed", None)
    tensors = {name: as_tensor(array, dtype) for name, array in moved.items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items() if name in DIFFERENTIABLE}
    options = {
        **case.options,
        **settings,
        **tensors,
        "layout": case.layout,
        "cfg": None if case.block is None else small_blocks(case.block),
    }
    if seed is not None:
        options["dropout_seed"] = int(seed[0]) + (int(seed[1]) << 32)
    out, lse = ring_attn.ring_attention(**{NAMES.get(name, name): value for name, value in options.items()}, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float64 if case.dtype == "float64" else torch.float32)
    gradients = torch.autograd.grad(
        (out, lse), list(leaves.values()), (as_tensor(cotangents["out"], dtype), on_xla(cotangents["lse"]))
    )
    results = {"out": out, "lse": lse} | {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
    torch_xla.sync()  # all of them in one program
    return from_layout(case, {name: whole(tensor) for name, tensor in results.items()})


def as_tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """NumPy's bfloat16 is not torch's: such numbers go through float32, exactly."""
    return on_xla(array.astype(np.float32)).to(dtype) if array.dtype.name == "bfloat16" else on_xla(array)


NAMED = {case.name: case for case in CASES}
CHOSEN = (
    "whole sequence on one device",
    "causal contiguous",
    "causal zigzag",
    "causal striped over four",
    "window cut by causal",
    "chunks striped",
    "more keys",
    "grouped sinks",
    "segments, positions restart",
    "sinks over empty rows",
    "soft cap and bias",
    "mask function",
    "mask and builder by index",
    "mesh with everything",
    "everything",
    "bfloat16 causal",
    "float64 with everything",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_against_the_oracle(name):
    case = NAMED[name]
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    assert_like_the_oracle(case, torch_results(case, inputs, cotangents, **ring_of(case.ring)), inputs, cotangents)


def test_a_batch_that_the_mesh_does_not_divide_is_whole():
    case = Case("odd batch", ring=2, batch=3, options=CAUSAL | DROPOUT | FUNCTION, arrays=SEED | SINKS | PACKED)
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    assert_like_the_oracle(case, torch_results(case, inputs, cotangents, **ring_of(2)), inputs, cotangents)


def test_devices_in_any_order():
    case = NAMED["causal zigzag"]
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    mesh = spmd.Mesh(np.array([2, 0, 3, 1]), (DEVICES,), ("sequence",))
    assert_like_the_oracle(case, torch_results(case, inputs, cotangents, mesh=mesh), inputs, cotangents)


def test_ids_of_64_bits_are_not_narrowed():
    case = Case("wide ids", ring=4, layout="zigzag", queries=6, options=CAUSAL, arrays=PACKED | SHUFFLED)
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    segments, positions = (inputs[name].astype(np.int64) for name in ("q_segment_ids", "q_position_ids"))
    # The low 32 bits of all segments are alike, and no position fits in 32.
    wide = {"q_segment_ids": np.where(segments < 0, segments, segments << 32), "q_position_ids": positions + (1 << 40)}
    assert_like_the_oracle(case, torch_results(case, inputs | wide, cotangents, **ring_of(4)), inputs, cotangents)


class Model(nn.Module):
    """Tokens and their positions to logits, with whatever attention it is given."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(11, 16), nn.Embedding(64, 16), nn.Linear(16, 11)
        self.attention = attention

    def forward(self, tokens, places, **masks):
        x = self.tokens(tokens) + self.places(places)
        return self.head(x + self.attention(x, x, x, need_weights=False, **masks)[0])


def same_models(dtype=torch.float64, **options) -> tuple[Model, Model]:
    """With torch's attention, and with ours on the XLA device."""
    torch.manual_seed(0)
    plain = Model(nn.MultiheadAttention(16, 4, batch_first=True)).to(dtype)
    ours = Model(ring_attn.RingAttention(16, 4, batch_first=True, **options)).to(dtype)
    ours.load_state_dict(plain.state_dict())
    return plain, ours.to("xla")


def some_tokens(length: int) -> torch.Tensor:
    return torch.randint(11, (2, length), generator=torch.Generator().manual_seed(1))


def loss_of(model, tokens, labels, places, **masks) -> torch.Tensor:
    logits = model(tokens, places, **masks).flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum") / 60


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_has_the_loss_and_gradients_that_it_has_without_sharding(layout):
    plain, ours = same_models(causal=True, layout=layout, **ring_of(4))
    tokens = some_tokens(30)  # 30 does not divide by 4: it is padded
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    hidden = torch.ones(30, 30, dtype=torch.bool).triu(1)
    expected = loss_of(plain, tokens, labels, torch.arange(30).expand(2, 30), attn_mask=hidden)
    expected.backward()
    batch = ring_attn.shard_batch(tokens.to("xla"), layout=layout, **ring_of(4))
    loss = loss_of(ours, batch.input_ids, batch.labels, batch.position_ids)
    loss.backward()
    torch_xla.sync()
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-12, atol=0)
    for (name, parameter), wanted in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad.cpu(), wanted.grad, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_masks_of_the_module_speak_of_the_whole_sequence():
    plain, ours = same_models(layout="zigzag", **ring_of(4))
    tokens, places = some_tokens(32), torch.arange(32).expand(2, 32)
    padding = torch.zeros(2, 32, dtype=torch.bool)
    padding[:, 29:] = True
    scores = torch.randn(32, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    fill = torch.zeros(2, 32, dtype=torch.float64).masked_fill(padding, -torch.inf)
    expected = plain(tokens, places, attn_mask=scores, key_padding_mask=fill)
    ring = dict(layout="zigzag", **ring_of(4))
    moved = [ring_attn.shard(x.to("xla"), **ring) for x in (tokens, places, padding)]
    got = ours(*moved[:2], attn_mask=ring_attn.shard(scores.to("xla"), dim=0, **ring), key_padding_mask=moved[2])
    torch.testing.assert_close(ring_attn.unshard(got, **ring).cpu(), expected, rtol=1e-10, atol=1e-12)


def test_the_output_is_split_and_the_ring_is_in_the_graph():
    """RingAttention finds the backend and the global mesh by itself."""
    spmd.set_global_mesh(spmd.get_1d_mesh("sequence"))
    try:
        _, ours = same_models(causal=True)
        tokens = ring_attn.shard_batch(some_tokens(32)[:1].to("xla")).input_ids
        x = ours.tokens(tokens)
        out = ours.attention(x, x, x)[0]
    finally:
        spmd.set_global_mesh(None)
    assert "collective-permute" in torch_xla._XLAC._get_xla_tensors_hlo([out])
    torch_xla.sync()
    for tensor in (tokens, out):
        assert torch_xla._XLAC._get_xla_sharding_spec(tensor).startswith("{devices=[1,4")


def test_later_steps_compile_nothing():
    _, ours = same_models(dtype=torch.float32, causal=True, dropout=0.3, **ring_of(4))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    compiled = []
    for _ in range(4):  # from the second step on, parameters are results of a program: they may have another sharding
        batch = ring_attn.shard_batch(some_tokens(32).to("xla"), **ring_of(4))
        optimizer.zero_grad()
        loss_of(ours, batch.input_ids, batch.labels, batch.position_ids).backward()
        optimizer.step()
        torch_xla.sync()
        compiled.append(metrics.counter_value("UncachedCompile"))
    assert compiled[-1] == compiled[-2]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_the_sequence_in_the_layouts_order(layout, size):
    ring = dict(layout=layout, **ring_of(size))
    sequence = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(3))
    leaf = sequence.to("xla").requires_grad_()
    shards = ring_attn.shard(leaf, **ring)
    order = permutation(layout, size, 16)
    assert torch.equal(shards.detach().cpu(), sequence[:, order])
    assert ring_attn.positions(15, device="xla", **ring).cpu().tolist() == order
    assert ring_attn.pad(leaf[:, :9], **ring).shape[1] == padded_length(layout, size, 9)
    back = ring_attn.unshard(shards, length=15, **ring)
    assert torch.equal(back.detach().cpu(), sequence[:, :15])
    (gradient,) = torch.autograd.grad((back * back).sum(), leaf)
    torch.testing.assert_close(gradient.cpu(), torch.cat([2 * sequence[:, :15], torch.zeros(2, 1, 3)], 1))


def test_a_mask_mod_is_read_afresh_on_every_call():
    import jax.numpy as jnp

    q, k, v = (torch.randn(1, 8, 2, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    for cut in (3, 5):
        ids = torch.arange(8) // cut
        table = jnp.asarray(ids.to(torch.int32).numpy())
        ours = ring_attn.ring_attention(*(x.to("xla") for x in (q, k, v)), mask_mod=SameDocument(table), **ring_of(4))
        mask = ids[:, None] == ids[None]
        wanted = nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask).transpose(1, 2)
        torch.testing.assert_close(ours.cpu(), wanted)


class SameDocument:
    def __init__(self, ids):
        self.ids = ids

    def __call__(self, batch, head, q_pos, k_pos):
        return self.ids[q_pos] == self.ids[k_pos]


def shards_of_nothing(length: int = 16) -> list[torch.Tensor]:
    return [torch.zeros(2, length, 4, 8, device="xla") for _ in range(3)]


def bad_calls() -> dict[str, tuple[int, dict[str, Any], str]]:
    two_dims, ids = ring_of(2)["mesh"], torch.zeros(2, 16)
    return {
        "no mesh of torch-xla": (16, dict(mesh=3), r"torch_xla.distributed.spmd.Mesh.*get_1d_mesh"),
        "two dimensions": (16, dict(mesh=two_dims), r"\['data', 'sequence'\] needs mesh_dim"),
        "no such dimension": (16, dict(mesh=two_dims, mesh_dim="model"), r"\['data', 'sequence'\].*'model'"),
        "a dimension of no mesh": (16, dict(mesh="local", mesh_dim="sequence"), "give both or neither"),
        "length": (18, ring_of(4), "split over 4 devices"),
        "zigzag": (20, dict(layout="zigzag", **ring_of(4)), "zigzag needs a q shard length divisible by 2"),
        "ids": (16, dict(q_segment_ids=ids.to("xla"), **ring_of(4)), "q_segment_ids must be of dtype int8"),
        "wide positions": (
            16,
            dict(mask_mod=every_third_pair, q_position_ids=ids.long().to("xla")),
            "must be int32, got torch.int64",
        ),
        "another device": (16, dict(q_segment_ids=ids.int(), **ring_of(4)), "one device"),
        "bias of a shard": (16, dict(bias=torch.zeros(4, 16, device="xla"), **ring_of(4)), r"\[2, 4, 16, 16\]"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_a_bad_call_says_what_must_hold(name):
    length, options, message = bad_calls()[name]
    with pytest.raises(ValueError, match=message):
        ring_attn.ring_attention(*shards_of_nothing(length), **options)


def test_a_mesh_of_torch_xla_needs_tensors_on_its_device():
    with pytest.raises(ValueError, match="torch-xla's go with tensors on an XLA device"):
        ring_attn.shard(torch.zeros(2, 16), **ring_of(4) | {"mesh_dim": None})


def test_a_ring_outside_spmd_is_refused(monkeypatch):
    monkeypatch.setattr(xla_runtime, "is_spmd", lambda: False)
    with pytest.raises(ValueError, match="use_spmd"):
        ring_attn.ring_attention(*shards_of_nothing(), **ring_of(4))


def test_other_hardware_is_refused(monkeypatch):
    monkeypatch.setattr(xla_runtime, "device_type", lambda: "NEURON")
    with pytest.raises(NotImplementedError, match="CPU and TPU, got NEURON"):
        ring_attn.ring_attention(*shards_of_nothing(), **ring_of(4))


@pytest.mark.parametrize("platform", ["triton", "cuda", "pallas"])
def test_a_named_platform_never_falls_back(platform):
    with pytest.raises(NotImplementedError, match=platform):
        ring_attn.ring_attention(*shards_of_nothing(), platform=platform, **ring_of(4))


def test_the_fused_strategy_is_refused():
    with pytest.raises(NotImplementedError, match='got strategy="fused"; use strategy="auto"'):
        ring_attn.ring_attention(*shards_of_nothing(), strategy="fused", **ring_of(4))


def test_an_empty_batch_gives_an_empty_result():
    inputs = [torch.zeros(0, 16, 4, 8, device="xla", requires_grad=True) for _ in range(3)]
    out = ring_attn.ring_attention(*inputs, **ring_of(4))
    assert out.shape == (0, 16, 4, 8)
    assert [x.shape for x in torch.autograd.grad(out.sum(), inputs)] == [out.shape] * 3


def test_second_derivatives_are_refused():
    inputs = [x.requires_grad_() for x in shards_of_nothing()]
    out = ring_attn.ring_attention(*inputs, **ring_of(4))
    (dq, *_) = torch.autograd.grad(out, inputs, grad_outputs=torch.ones_like(out).requires_grad_(), create_graph=True)
    with pytest.raises(NotImplementedError, match="can be differentiated once"):
        dq.sum().backward()


def test_global_attention_lowers_for_a_tpu():
    """JAX sees no TPU here: what would run on one is read in the program."""
    import jax

    from jax_core.api.global_arrays import attention_on_mesh, plan_sequence
    from jax_core.operands import Operands
    from jax_core.options import Options

    mesh = jax.sharding.AbstractMesh((8,), ("sequence",))
    shape = jax.ShapeDtypeStruct((1, 1024, 4, 128), "bfloat16")
    attention = attention_on_mesh(
        Options(causal=True, layout="zigzag", platform="xla"),
        Operands(shape, shape, shape),
        plan_sequence(mesh, "sequence", 1),
        "tpu",
    )
    text = jax.jit(attention.forward).trace(shape, shape, shape).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("collective_permute") > 0
    assert attention.spec.problem.backend == "tpu"  # where arrays of one rotation travel as they are, and XLA joins them


def test_the_example():
    command = [sys.executable, "examples/torch_xla_tpu.py", "--context", "64", "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert f"over {DEVICES} CPU devices" in done.stdout and "step 2: loss" in done.stdout
