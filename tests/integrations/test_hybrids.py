"""transformers' hybrid models on a ring: families against one process, what is refused, and what stays as it was.

Where a model runs on a ring of one here, the ring is "local"; rings of two and four are processes under torchrun.
"""

import copy
import importlib
import inspect
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import tiny_hybrids
import tiny_transformers as tiny
import torch
import transformers
from launch import torchrun

from ring_attn import Ring
from ring_attn.integrations.transformers import context_parallel
from ring_attn.integrations.transformers.layers import kernels, operators
from ring_attn.integrations.transformers.layers.states import FIRST_RELEASE
from ring_attn.integrations.transformers.model import plan

RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(tuple(map(int, FIRST_RELEASE.split("."))) > RELEASE, reason="refused in older versions")
TOLERANCE = 2e-6
ALONE = operators.LayerOnRing({"mesh": "local"}, None, set())


def hybrid(name):
    torch.manual_seed(0)
    return {**tiny_hybrids.FAMILIES, **tiny_hybrids.OTHERS}[name]().train()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("size", [2, 4])
def test_families_over_a_ring(size):
    torchrun("hybrids_worker.py", size, timeout=880)


def files_of(model):
    """The names in the file that defines a model's class."""
    return vars(sys.modules[type(model).__module__])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "striped"}, r'BambaForCausalLM carries a state.* layout="striped" gives a rank every n-th token; use'),
        ({"place_documents": True}, "place_documents=True cuts documents where it likes, and BambaForCausalLM carries a state"),
    ],
    ids=["striped", "placed"],
)
def test_orders_of_tokens_that_are_refused(options, words):
    with pytest.raises(NotImplementedError, match=words):
        context_parallel(hybrid("bamba"), "local", **options)


def test_versions_whose_layers_look_nothing_up_are_refused(monkeypatch):
    model = hybrid("qwen 3.5")
    monkeypatch.delitem(files_of(model), "create_recurrent_attention_mask")
    with pytest.raises(NotImplementedError, match=rf"Qwen3_5ForCausalLM carries .* needs transformers {FIRST_RELEASE} or newer"):
        context_parallel(model, "local")


def test_families_that_are_not_known_are_refused_by_name(monkeypatch):
    """Though their layers look up the operators that are."""
    monkeypatch.setattr(plan, "FAMILIES", plan.FAMILIES - {"bamba"})
    with pytest.raises(NotImplementedError, match=r"BambaConfig is of type 'linear_attention'.* how its layers do so is not known"):
        context_parallel(hybrid("bamba"), "local")


def test_a_layer_whose_forward_another_took_is_told():
    """As kernels of the hub that compute a whole layer do."""
    model = hybrid("qwen 3.5")
    model.model.layers[0].linear_attn.forward = lambda hidden_states, attention_mask=None, **_: hidden_states
    cp = context_parallel(model, "local")
    with pytest.raises(NotImplementedError, match=r"Qwen3_5GatedDeltaNet of layer 0 did not call causal_conv1d_fn, torch_chunk_g"):
        cp(**tiny.batch())


def test_a_batch_that_was_not_sharded_is_refused_on_a_ring(monkeypatch):
    """Also by a model without attention, which would run on each rank by itself."""
    model = hybrid("mamba 2")
    context_parallel(model, "local")
    monkeypatch.setattr(Ring, "size", 2)
    with pytest.raises(ValueError, match=r"not sharded over the ring of 2 ranks: call batch = cp\.shard"):
        model(**tiny.batch())


def test_a_layer_by_itself_is_told():
    model = hybrid("qwen 3.5")
    context_parallel(model, "local")
    with pytest.raises(
        NotImplementedError, match=r"Qwen3_5GatedDeltaNet of layer 0 got no mask from transformers' create_recurrent"
    ):
        model.model.layers[0].linear_attn(torch.randn(1, 8, 32))


def test_fused_kernels_are_out_of_the_way_on_the_ring_alone(monkeypatch):
    """With mamba_ssm they compute a layer at once, of this rank's tokens. Outside of the ring they are called as before."""
    called = []

    def fused(*arguments, **options):
        called.append(len(arguments))

    model = hybrid("mamba 2")
    monkeypatch.setitem(files_of(model), "mamba2_split_conv1d_scan_combined", fused)
    expected = copy.deepcopy(model)
    cp = context_parallel(model, "local")
    batch = tiny.batch("left")
    torch.testing.assert_close(cp(**batch).loss, expected(**batch, use_cache=False).loss, atol=TOLERANCE, rtol=0)
    assert len(called) == 2, "by the model that is on no ring, in each of its layers"


def test_decays_stay_in_float32_under_autocast(monkeypatch):
    given = {}

    def noting(name, function):
        def call(layer, *arguments, **options):
            named = {"g": options.get("g"), "A": arguments[2] if name == "mamba2_chunk_scan" else None}
            given.update({f"{name} {key}": x.dtype for key, x in named.items() if x is not None})
            return function(layer, *arguments, **options)

        return call

    def ssd(x, dt, A, B, C, D, **options):
        given["dt"] = dt.dtype
        return of_ring(x, dt, A, B, C, D, **options)

    of_ring = operators.ssd
    monkeypatch.setattr(operators, "ssd", ssd)
    for name, function in list(operators.OPERATORS.items()):
        monkeypatch.setitem(operators.OPERATORS, name, noting(name, function))
    for family in ("qwen 3.5", "bamba"):
        model = hybrid(family)
        expected = copy.deepcopy(model)
        cp, batch = context_parallel(model, "local"), tiny.batch("left")
        with torch.autocast("cpu", torch.bfloat16):
            loss, other = cp(**batch).loss, expected(**batch, use_cache=False).loss
        torch.testing.assert_close(loss.float(), other.float(), atol=2e-2, rtol=0)
        loss.backward()
        assert all(x.grad.dtype == torch.float32 for x in model.parameters() if x.grad is not None)
    wanted = ("torch_chunk_gated_delta_rule g", "mamba2_chunk_scan A", "dt")
    assert {name: given[name] for name in wanted} == dict.fromkeys(wanted, torch.float32)


def operands_of(name):
    """What transformers calls its operator with."""
    torch.manual_seed(0)
    x, gate = torch.randn(2, 21, 4, 8), torch.rand(2, 21, 4)
    if name == "causal_conv1d_fn":
        return dict(hidden_states=torch.randn(2, 6, 21), weight=torch.randn(6, 4), bias=torch.randn(6), activation="silu")
    if name == "mamba2_chunk_scan":
        of_steps = dict(D=torch.randn(4), dt_bias=torch.rand(4), dt_softplus=True, return_final_states=True)
        b, c = torch.randn(2, 2, 21, 2, 6)
        return dict(hidden_states=x, dt=gate, A=-torch.rand(4), B=b, C=c, chunk_size=4, **of_steps)
    if name == "mamba_selective_scan":
        (x, dt, z), (b, c) = torch.randn(3, 2, 8, 21), torch.randn(2, 2, 6, 21)
        of_steps = dict(D=torch.randn(8), z=z, delta_bias=torch.rand(8), delta_softplus=True, return_last_state=True)
        return dict(hidden_states=x, dt=dt, A=-torch.rand(8, 6), B=b, C=c, **of_steps)
    g = -torch.rand(2, 21, 4) if name == "torch_chunk_gated_delta_rule" else -torch.rand(2, 21, 4, 8)
    settings = dict(use_qk_l2norm_in_kernel=True, output_final_state=True)
    return dict(query=x, key=x.roll(1, 1), value=torch.randn(2, 21, 4, 6), g=g, beta=gate, **settings)


FILES = {
    "causal_conv1d_fn": "bamba",
    "torch_chunk_gated_delta_rule": "qwen3_next",
    "chunk_kimi_delta_attention": "kimi_linear",
    "mamba2_chunk_scan": "mamba2",
    "mamba_selective_scan": "jamba",
}


@pytest.mark.parametrize("name", FILES)
def test_transformers_own_operators_compute_the_same(monkeypatch, name):
    """A second opinion, which shares no code with the oracle: results, states and gradients, in float32."""
    monkeypatch.setattr(operators, "_CHANNELS", 3)  # of 8
    family = FILES[name]
    theirs = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)
    found = []
    for operator in (inspect.unwrap(theirs), partial(operators.OPERATORS[name], ALONE)):
        given = operands_of(name)
        leaves = {key: x.requires_grad_() for key, x in given.items() if isinstance(x, torch.Tensor)}
        results = operator(**given)
        results = (results,) if isinstance(results, torch.Tensor) else results
        sum((y.float() * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in results).backward()
        found.append({**dict(enumerate(results)), **{key: x.grad for key, x in leaves.items()}})
    exact, got = found
    for key, x in exact.items():
        torch.testing.assert_close(got[key], x, rtol=1e-4, atol=1e-5 * x.abs().max().item(), msg=str(key))


@pytest.mark.parametrize("name", FILES)
def test_what_an_operator_would_compute_without_is_refused(name):
    """As fla's kernels take it; what models hand on for attention and losses passes."""
    operator, given = partial(operators.OPERATORS[name], ALONE), operands_of(name)
    for more in ({"scale": 0.5}, {"lower_bound": -5.0}, {"use_gate_in_kernel": True}, {"A_log": torch.zeros(4)}):
        with pytest.raises(NotImplementedError, match=f"{next(iter(more))} was given to .* which would be computed without it"):
            operator(**given, **more)
    results = operator(**given, scale=None, num_items_in_batch=torch.tensor(3), output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(results, operator(**given))


def test_a_model_is_told_what_its_operators_would_compute_without():
    model = hybrid("qwen 3.5")
    batch = context_parallel(model, "local").shard(tiny.batch())
    with pytest.raises(NotImplementedError, match="scale was given to causal_conv1d_fn of a layer on the ring"):
        model(**batch, scale=0.5)


def test_padding_is_as_if_it_were_not_there():
    """Also where projections have a bias, which transformers puts into the state of what follows."""
    model = hybrid("mamba 2, biased projections")
    for layer in model.backbone.layers:
        torch.nn.init.normal_(layer.mixer.in_proj.bias)
    expected, batch = copy.deepcopy(model), tiny.batch("left")
    logits = context_parallel(model, "local")(**batch).logits[1, 6:27]
    alone = expected(batch["input_ids"][1:, 6:], use_cache=False).logits[0]
    torch.testing.assert_close(logits, alone, atol=TOLERANCE, rtol=0)
    assert (expected(**batch, use_cache=False).logits[1, 6:27] - alone).abs().max() > 1e-4


def test_whole_prompts_and_models_that_are_off_the_ring_are_as_before():
    model = hybrid("qwen 3.5").eval()
    expected, prompt = copy.deepcopy(model), tiny.tokens()
    settings = dict(max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        logits = expected(prompt).logits
        cp = context_parallel(model, "local")
        assert torch.equal(model(prompt).logits, logits)
        assert torch.equal(model.generate(prompt, **settings), expected.generate(prompt, **settings))
        cp.remove()
        assert torch.equal(model(prompt).logits, logits) and "forward" not in vars(model.model.layers[0].linear_attn)


def test_verify_takes_the_documents_one_by_one():
    verdict = context_parallel(hybrid("lfm2"), "local").verify(tiny.packed(10, 5, 12))
    assert verdict.ok, verdict


@pytest.fixture
def on_a_gpu():
    """Tensors of 16 bits, as if they were on a GPU; nothing is known of what is installed."""
    kernels._installed.cache_clear()
    yield lambda dtype=torch.bfloat16: SimpleNamespace(dtype=dtype, device=torch.device("cuda"))
    kernels._installed.cache_clear()


def installed(monkeypatch, name, **contents):
    """A module of another package, and those that it lies in."""
    parts = name.split(".")
    for number in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:number]), ModuleType(".".join(parts[:number])))
    vars(sys.modules[name]).update(contents)


def test_kernels_that_are_installed_are_for_16_bits_on_gpus(monkeypatch, on_a_gpu):
    installed(monkeypatch, "fla.ops.kda", chunk_kda=len)
    installed(monkeypatch, "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=max)
    assert kernels.operator_for("kda", None, on_a_gpu()) is len and kernels.operator_for("ssd", None, on_a_gpu()) is max
    assert kernels.operator_for("kda", None, on_a_gpu(torch.float32)) is None
    assert kernels.operator_for("kda", None, torch.zeros(1, dtype=torch.bfloat16)) is None
    assert kernels.operator_for("kda", {}, on_a_gpu()) is None
    assert kernels.operator_for("kda", {"kda": min}, torch.zeros(1)) is min


def test_nothing_installed_is_plain_jax_without_a_word(monkeypatch, on_a_gpu, caplog):
    monkeypatch.setitem(sys.modules, "fla", None)
    assert kernels.operator_for("kda", None, on_a_gpu()) is None and not caplog.records


def test_a_package_that_cannot_be_imported_is_told_once(monkeypatch, on_a_gpu, caplog):
    installed(monkeypatch, "fla.ops")
    for _ in range(2):
        assert kernels.operator_for("kda", None, on_a_gpu()) is None
    (record,) = caplog.records
    assert "kda of layers on the ring is computed by plain JAX, which is slower: fla cannot be imported" in record.getMessage()


@pytest.mark.parametrize(("triton", "taken"), [("3.3", True), ("3.6", False), ("3.7.1", True)])
def test_what_fla_refuses_on_hopper_is_not_taken(monkeypatch, on_a_gpu, caplog, triton, taken):
    installed(monkeypatch, "fla.ops.gated_delta_rule", chunk_gated_delta_rule=len)
    knows = {"IS_NVIDIA_HOPPER": True, "TRITON_ABOVE_3_4_0": triton != "3.3", "TRITON_ABOVE_3_7_1": triton == "3.7.1"}
    installed(monkeypatch, "fla.utils", **knows)
    assert (kernels.operator_for("gated_delta_rule", None, on_a_gpu()) is len) == taken
    assert taken or "refuses its backward on Hopper" in caplog.text


@pytest.mark.parametrize(
    ("operators", "words"),
    [
        ({"retention": len}, "operators has 'retention', which is no layer's operator; give some of gated_delta_rule, kda, ssd"),
        ({"kda": "fla"}, r"operators\['kda'\] must be a function.* got str"),
    ],
    ids=["name", "kind"],
)
def test_operators_that_are_none(operators, words):
    with pytest.raises(ValueError, match=words):
        context_parallel(hybrid("kimi linear"), "local", operators=operators)


def test_a_model_says_what_computes_its_states():
    for given, words in ((None, "all else by plain JAX"), ({"ssd": len}, "ssd by len, all else by plain JAX")):
        cp = context_parallel(hybrid("bamba"), "local", operators=given)
        assert repr(cp).split("states")[1].split("\n")[0].strip() == words
        with pytest.raises(AttributeError):  # the layers have what they were given
            cp.operators = {}
        cp.remove()
