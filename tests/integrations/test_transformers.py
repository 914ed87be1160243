"""transformers models on a ring against "eager" attention in one process: families, what used to be silently wrong, and refusals.

Where a model runs on a ring of one here, the ring is "local"; rings of two and four are processes under torchrun.
"""

import copy
import types
import warnings
from contextlib import contextmanager

import pytest
import tiny_transformers as tiny
import torch
import transformers
from document_cases import CASES as DOCUMENTS
from document_cases import same
from launch import torchrun
from torch._dynamo.utils import counters
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import masking_utils as masking
from transformers import modeling_layers

from ring_attn import Ring, balance
from ring_attn.integrations.transformers import context_parallel
from ring_attn.integrations.transformers.batch.sharding import MARK
from ring_attn.integrations.transformers.layers.masks import Rule, translate
from ring_attn.integrations.transformers.model.table import OPTIONS, check_layer_types
from ring_attn.packed.ring import PlacedRing, PlacingRing
from torch_bridge.backends import compiled
from torch_bridge.call import sanity_checks

TOLERANCE = 2e-6
FROM_5 = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="refused in older versions")


def llama():
    torch.manual_seed(0)
    return tiny.CAUSAL["llama"]()


@pytest.fixture
def local():
    model = llama()
    cp = context_parallel(model, "local")
    yield model, cp
    cp.remove()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [2, 4])
def test_families_over_a_ring(size):
    torchrun("transformers_worker.py", size, timeout=380)


@pytest.mark.slow
def test_gradients_summed_in_the_backward():
    assert torchrun("transformers_worker.py", 2, "overlap").count("all right") == 2


def test_mask_functions_become_the_static_masks():
    """transformers' window of w counts the query itself: ours is (w - 1, 0)."""
    assert translate(masking.causal_mask_function) == Rule(causal=True)
    assert translate(masking.sliding_window_causal_mask_function(7)) == Rule(causal=True, left=6)
    padding = torch.zeros(2, dtype=torch.int64)
    newer = "left_padding" in masking.chunked_overlay.__code__.co_varnames
    chunks = masking.chunked_causal_mask_function(*((9, padding) if newer else (9,)))
    assert translate(chunks) == Rule(causal=True, chunk=9, counts_from_first=newer)
    nested = masking.and_masks(masking.sliding_window_causal_mask_function(7), masking.sliding_window_overlay(4))
    assert translate(nested) == Rule(causal=True, left=3)


@pytest.mark.skipif(not hasattr(masking, "sliding_window_bidirectional_mask_function"), reason="made by newer versions only")
def test_a_window_to_both_sides():
    assert translate(masking.sliding_window_bidirectional_mask_function(7)) == Rule(left=7, right=7)


def test_other_mask_functions_become_predicates():
    def even(b, h, q, k):
        return k % 2 == 0

    rule = translate(masking.and_masks(masking.causal_mask_function, even))
    assert rule.causal and rule.predicates == (even,)
    assert not translate(masking.or_masks(masking.causal_mask_function, even)).causal


def test_layer_types_of_the_table_and_no_others():
    config = llama().config
    config.layer_types = list(OPTIONS)
    check_layer_types(config)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(NotImplementedError, match=r"layer 1 of LlamaConfig is of type 'linear_attention'.* a state along"):
        check_layer_types(config)
    config.layer_types = ["of the future"]
    with pytest.raises(NotImplementedError, match="of the future"):
        check_layer_types(config)


def test_a_batch_is_sharded_whole(local):
    """Positions, labels shifted before they are cut, their count, and nothing that only one process may read."""
    _, cp = local
    batch = tiny.batch("left")
    sharded = cp.shard(batch)
    assert sharded["position_ids"].tolist() == [[*range(27), 0]] * 2
    assert torch.equal(sharded["shift_labels"][:, :26], batch["labels"][:, 1:])
    assert sharded["shift_labels"][1, 5] == batch["input_ids"][1, 6], "the first token, predicted from padding"
    assert sharded["num_items_in_batch"] == (batch["labels"][:, 1:] != -100).sum()
    assert cp.shard({**batch, "num_items_in_batch": 100})["num_items_in_batch"] == 100
    assert sharded["attention_mask"].all() and sharded["use_cache"] is False


@contextmanager
def heard(words):
    """That a warning with these words is given, and no other; none for no words."""
    sanity_checks.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == bool(words) and all(words in text for text in texts), texts


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_are_where_every_way_into_a_ring_finds_them(local, name):
    """The table of docs/packed.md; and where transformers' own masks would see others, that is told."""
    _, cp = local
    case = DOCUMENTS[name]
    if isinstance(case.understood, str):
        with pytest.raises(ValueError, match=case.understood):
            cp.shard(case.batch)
        return
    with heard("transformers' own masks (sdpa, eager) would tell" if case.told else ""):
        sequence = cp.shard(case.batch)[MARK].sequences["decoder"]
    numbers = torch.zeros(case.shape) if sequence.documents is None else sequence.documents[:, : case.shape[1]]
    if sequence.hidden is not None:
        numbers = numbers.masked_fill(sequence.hidden[:, : case.shape[1]], -1)
    assert same(numbers, torch.tensor(case.understood))


@pytest.mark.parametrize("entries", [{}, {"attention_mask": torch.ones(1, 27, dtype=torch.int64)}])
def test_documents_that_position_ids_tell_beside_a_mask_do_not_see_each_other(local, entries):
    """Each is as it would be by itself; transformers' flash attention has it so, too, its other masks join them."""
    _, cp = local
    batch = tiny.packed(10, 17)
    with heard("tells 2 documents" if entries else ""):
        logits = cp(**batch, **entries).logits[:, :27]
    alone = [llama()(part).logits for part in batch["input_ids"].split([10, 17], 1)]
    torch.testing.assert_close(logits, torch.cat(alone, 1), atol=TOLERANCE, rtol=0)


@FROM_5
@pytest.mark.parametrize(("rows", "axes", "documents"), [(4, 3, True), (3, 3, False), (4, 4, False)])
def test_of_coordinates_the_first_row_is_the_texts(rows, axes, documents):
    """If there is one more than the model has axes; coordinates alone tell nothing."""
    model = tiny.qwen3_vl()
    model.config.get_text_config().rope_parameters["mrope_section"] = [1] * axes
    cp = context_parallel(model, "local")
    batch = tiny.packed(10, 17)
    sequence = cp.shard({**batch, "position_ids": batch["position_ids"].expand(rows, -1, -1)})[MARK].sequences["decoder"]
    assert (sequence.documents is not None) == documents


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"weather": torch.ones(2)}, "'weather'"),
        ({"past_key_values": object()}, "past_key_values cannot be sharded: a K/V cache"),
        ({"use_cache": True}, "use_cache cannot be sharded"),
        ({"output_attentions": True}, "output_attentions.*no rank ever has"),
        ({"head_mask": torch.ones(2, 4)}, "head_mask.*prune"),
        ({"pixel_values": torch.ones(1, 3, 16, 16)}, "pixel_values.*inputs_embeds"),
        ({"logits_to_keep": 1}, "logits_to_keep"),
        ({"attention_mask": torch.ones(2, 1, 27, 27)}, r"\[2, 1, 27, 27\] is one for pairs"),
        ({"attention_mask": torch.ones(2, 26)}, r"must be that of the whole sequence, \[2, 27\]"),
        ({"position_ids": torch.arange(26)}, "of 27 tokens"),
    ],
)
def test_entries_that_cannot_be_sharded_are_refused_by_name(local, entries, words):
    _, cp = local
    with pytest.raises((ValueError, NotImplementedError), match=words):
        cp.shard({**tiny.batch(), **entries})


def test_arguments_beside_the_batch_are_refused(local):
    model, cp = local
    batch = cp.shard(tiny.batch())
    with pytest.raises(NotImplementedError, match="output_attentions cannot be given"):
        model(**batch, output_attentions=True)
    batch.pop("attention_mask")
    with pytest.raises(NotImplementedError, match=r"LlamaAttention of layer 0 got the attention mask \[2, 1, 28, 28\] as a tensor"):
        model(**batch, attention_mask=torch.zeros(2, 1, 28, 28))


def test_a_batch_of_another_model_is_refused(local):
    model, _ = local
    other = context_parallel(llama(), "local")
    with pytest.raises(ValueError, match="sharded by another ContextParallel"):
        model(**other.shard(tiny.batch()))


def test_placed_documents_have_an_order_that_only_their_batch_knows():
    cp = context_parallel(llama(), "local", place_documents=True)
    batch = tiny.packed(4, 15, 8)
    sharded = cp.shard(batch)
    assert torch.equal(cp.unshard(sharded["input_ids"], sharded), batch["input_ids"])
    with pytest.raises(ValueError, match=r"cp\.unshard\(tensor, batch\) with the batch that cp\.shard made"):
        cp.ring.unshard(sharded["input_ids"])
    with pytest.raises(ValueError, match=r"cp\.unshard needs the batch that cp\.shard made"):
        cp.unshard(sharded["input_ids"], batch)


def test_placed_documents_are_refused_where_places_count():
    with pytest.raises(NotImplementedError, match=r"decoders that take position_ids, not for T5|a newer version"):
        context_parallel(tiny.t5(), "local", place_documents=True)
    with pytest.raises(ValueError, match="places documents itself; give a layout by name"):
        context_parallel(llama(), "local", layout=balance(64, 1, causal=True), place_documents=True)
    model = tiny.gemma3_with_images()
    cp = context_parallel(model, "local", place_documents=True)
    with pytest.raises(NotImplementedError, match="placed documents have others; give place_documents=False"):
        model(**cp.shard({**tiny.packed(10, 17), "token_type_ids": torch.ones(1, 27, dtype=torch.int64)}))


def test_documents_are_placed_where_they_can_be(monkeypatch):
    packed = torch.tensor([[0, 0, 0, 1, 1, -1]])
    assert not isinstance(context_parallel(llama(), "local", place_documents=None).ring, PlacingRing)
    monkeypatch.setattr(Ring, "size", 2)
    ring = context_parallel(llama(), "local", place_documents=None).ring
    assert isinstance(ring, PlacingRing) and isinstance(ring.of(packed, by_place=False), PlacedRing)
    for documents, by_place in ((packed, True), (packed.flip(1), False), (packed.repeat(2, 1), False), (None, False)):
        assert type(ring.of(documents, by_place)) is Ring
    plan = balance(64, 2, causal=True)
    assert not isinstance(context_parallel(llama(), "local", layout=plan, place_documents=None).ring, PlacingRing)


def test_a_batch_that_was_not_sharded_is_refused_on_a_ring(monkeypatch, local):
    model, _ = local
    monkeypatch.setattr(Ring, "size", 2)
    with pytest.raises(ValueError, match=r"not sharded over the ring of 2 ranks: call batch = cp\.shard"):
        model(**tiny.batch())


def test_whole_inputs_on_a_ring_of_one_run_as_before(local):
    model, _ = local
    expected = llama()
    batch = tiny.batch("left")
    assert torch.equal(model(**batch).logits, expected(**batch).logits)
    first, expected_first = (m(batch["input_ids"][:, :20], use_cache=True) for m in (model, expected))
    rest = batch["input_ids"][:, 20:]
    second = model(rest, past_key_values=first.past_key_values)
    assert torch.equal(second.logits, expected(rest, past_key_values=expected_first.past_key_values).logits)


def test_generate_takes_the_whole_prompt(local):
    model, cp = local
    prompt = tiny.tokens()
    settings = dict(max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(prompt, **settings), llama().generate(prompt, **settings))
    batch = cp.shard({"input_ids": prompt})
    for arguments in ({"inputs": batch["input_ids"]}, batch):
        with pytest.raises(ValueError, match=r"generate takes the whole prompt, and this one is sharded"):
            model.generate(**arguments)


def test_one_call_does_all_of_it(local):
    model, cp = local
    batch = tiny.batch("right")
    outputs, expected = cp(**batch), llama()(**batch)
    assert torch.allclose(outputs.loss, expected.loss, atol=TOLERANCE)
    assert torch.equal(cp.loss(outputs, cp.shard(batch)), outputs.loss)
    assert torch.equal(cp.loss(outputs.logits, cp.shard(batch)), outputs.loss)
    as_tuple = model(**cp.shard(batch), return_dict=False)
    assert torch.equal(as_tuple[0], outputs.loss) and torch.equal(as_tuple[1], outputs.logits)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # the name in older versions
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_finds_its_mask_in_the_backward(local, reentrant):
    model, cp = local
    expected = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    batch = tiny.batch("right")
    for runs in (lambda: model(**cp.shard(batch)), lambda: expected(**batch)):
        runs().loss.backward()
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gemma 2"])
def test_padding_in_bfloat16(family, padding):
    torch.manual_seed(0)
    model = tiny.CAUSAL[family]().bfloat16()
    expected = copy.deepcopy(model)
    cp = context_parallel(model, "local")
    for make, run in ((expected, expected), (model, cp)):
        make.zero_grad()
        run(**tiny.batch(padding)).loss.backward()
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert own.grad.dtype == torch.bfloat16
        torch.testing.assert_close(own.grad, other.grad, atol=5e-2, rtol=5e-2)
    cp.remove()


def by_transformers(reentrant):
    return lambda model: model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})


def by_torchs_wrapper(model):
    """As FSDP's activation checkpointing does under accelerate."""
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)


def offloaded(model):
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("this transformers does not offload")
    model.activation_checkpointing_enable(offload=True)


CHECKPOINTS = {
    "reentrant": by_transformers(True),
    "not reentrant": by_transformers(False),
    "offload": offloaded,
    "wrapper": by_torchs_wrapper,
}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_attention_is_kept_in_checkpoints(monkeypatch, kind, late):
    """Turned on before the model is made parallel or after; with the bits of full recomputation."""
    forwards, run = [], compiled.CompiledProgram._run

    def noting(self, step, *arguments):
        forwards.extend([step] * (step == "forward"))
        return run(self, step, *arguments)

    monkeypatch.setattr(compiled.CompiledProgram, "_run", noting)
    if kind == "offload":  # pinned memory needs a GPU
        monkeypatch.setattr(transformers.modeling_utils, "save_on_cpu", lambda **_: save_on_cpu(), raising=False)
    gradients = {}
    for checkpoint, times in ((None, 2), ("attention", 1), ("offload", 1)):
        model = llama().train()
        if not late:
            CHECKPOINTS[kind](model)
        cp = context_parallel(model, "local", checkpoint=checkpoint)
        if late:
            CHECKPOINTS[kind](model)
        forwards.clear()
        model(**cp.shard(tiny.batch("right"))).loss.backward()
        assert len(forwards) == times * model.config.num_hidden_layers
        gradients[checkpoint] = [x.grad for x in model.parameters()]
        cp.remove()
        assert not any("_Keeping" in type(x).__name__ for module in model.modules() for x in vars(module).values())
    assert all(torch.equal(a, b) for a, b in zip(gradients[None], gradients["attention"], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients[None], gradients["offload"], strict=True))


OF_THE_COMPILER = ("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
CHECKPOINT_IN_FORWARD = hasattr(modeling_layers.GradientCheckpointingLayer, "_can_checkpoint_with_cache")
COMPILED = {"plain": lambda model: None, "not reentrant": by_transformers(False), "reentrant": by_transformers(True)}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.filterwarnings(*OF_THE_COMPILER)
@pytest.mark.parametrize("checkpointing", COMPILED)
def test_compiled_layers(monkeypatch, checkpointing):
    """One graph for the first length and one for all others, nothing left out of them, and no attention that runs twice."""
    steps, run = [], compiled.CompiledProgram._run

    def noting(self, step, *arguments):
        steps.append(step)
        return run(self, step, *arguments)

    monkeypatch.setattr(compiled.CompiledProgram, "_run", noting)
    torch._dynamo.reset()
    counters.clear()
    losses = []
    for compiles in (False, True):
        model = llama().train()
        COMPILED[checkpointing](model)
        for layer in model.model.layers if compiles else ():
            layer.compile(backend="aot_eager")
        cp = context_parallel(model, "local")
        for length in (16, 24, 40, 16):
            steps.clear()
            loss = model(**cp.shard(tiny.batch(length=length))).loss
            loss.backward()
            assert steps.count("forward") == steps.count("backward") == model.config.num_hidden_layers
            losses += [loss.item(), model.lm_head.weight.grad.norm().item()]
    assert losses[:8] == pytest.approx(losses[8:])
    around = checkpointing == "reentrant" and not CHECKPOINT_IN_FORWARD  # its first run has no gradients: a graph of its own
    assert counters["stats"]["unique_graphs"] <= (4 if around else 2) and not counters["graph_break"]


@pytest.mark.filterwarnings(*OF_THE_COMPILER)
def test_a_compiled_layer_that_goes_past_the_ring_is_told():
    torch._dynamo.reset()
    model = llama()
    cp = context_parallel(model, "local")
    past = model.model.layers[1].self_attn
    past.forward = lambda hidden_states, **_: (hidden_states, None)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="1 attentions of LlamaForCausalLM went"):
            model(**cp.shard(tiny.batch()))


@pytest.mark.filterwarnings(*OF_THE_COMPILER)
@pytest.mark.skipif(not CHECKPOINT_IN_FORWARD, reason="the checkpoint is around the graph")
@pytest.mark.parametrize("lever", [{"checkpoint": "offload"}, {"offload_inputs": True}], ids=str)
def test_offload_within_a_graph_is_refused(lever):
    torch._dynamo.reset()
    model = llama().train()
    model.activation_checkpointing_enable()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    cp = context_parallel(model, "local", **lever)
    with pytest.raises(NotImplementedError, match="cannot move what is kept to host memory"):
        model(**cp.shard(tiny.batch()))


def test_what_becomes_of_attention_in_checkpoints_is_checked():
    with pytest.raises(ValueError, match=r'checkpoint must be "attention".* got \'full\''):
        context_parallel(llama(), "local", checkpoint="full")


def test_two_models_with_configurations_of_one_object():
    config = llama().config
    one, other = (transformers.LlamaForCausalLM(config) for _ in range(2))
    other.load_state_dict(one.state_dict())
    cp = context_parallel(one, "local", layout="contiguous")
    second = context_parallel(copy.deepcopy(other), "local")
    batch = tiny.batch()
    expected = other(**batch).loss
    assert torch.allclose(cp(**batch).loss, expected, atol=TOLERANCE)
    assert torch.allclose(second(**batch).loss, expected, atol=TOLERANCE)
    cp.remove()
    assert one.config is config and config._attn_implementation == "eager" and "generate" not in vars(one)
    assert torch.equal(one(**batch).loss, expected)


@pytest.mark.parametrize("make", [llama, tiny.gemma3_with_images])
def test_what_is_changed_in_a_configuration_stays_when_the_ring_goes(make):
    """Also within verify, which takes the model from the ring for a while."""
    model = make()
    config, text = model.config, model.config.get_text_config()
    rope = copy.deepcopy(getattr(text, "rope_parameters", None))
    cp = context_parallel(model, "local")
    model.config.pad_token_id, model.config.get_text_config().rms_norm_eps, model.config.of_the_user = 5, 0.5, [1]
    with cp.detached():
        assert config.pad_token_id == 5
    assert model.config.of_the_user == [1] and model.config is not config
    cp.remove()
    assert model.config is config and (config.pad_token_id, text.rms_norm_eps, config.of_the_user) == (5, 0.5, [1])
    assert config._attn_implementation == text._attn_implementation == "eager"
    assert getattr(text, "rope_parameters", None) == rope
    cp.remove()


def test_dropout_of_weights_is_honoured():
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    cp, batch = context_parallel(model.train(), "local"), tiny.batch()
    torch.manual_seed(1)
    one = cp(**batch).loss
    other = cp(**batch).loss
    torch.manual_seed(1)
    assert torch.equal(cp(**batch).loss, one) and not torch.equal(one, other)


@pytest.mark.parametrize("padded", ["", "left"])
def test_dropout_of_weights_is_that_of_the_batch_without_a_buckets_padding(padded):
    found = []
    for buckets in (1, 0):
        model = llama().train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        cp, batch = context_parallel(model, "local", buckets=buckets), tiny.batch(*filter(None, [padded]))
        torch.manual_seed(1)
        sharded = cp.shard(batch)
        loss = model(**sharded).loss
        loss.backward()
        found.append((sharded["input_ids"].shape[1], loss.detach(), [x.grad for x in model.parameters()]))
    (longer, *bucket), (length, *exact) = found
    assert longer > length + 2
    torch.testing.assert_close(bucket, exact, atol=TOLERANCE, rtol=0)


REFUSED = {
    "of another library": (lambda: torch.nn.Linear(2, 2), ValueError, "needs a transformers model, got Linear"),
    "a head on the last token": (
        lambda: transformers.LlamaForSequenceClassification(llama().config),
        NotImplementedError,
        "the head of LlamaForSequenceClassification reads tokens that one rank has",
    ),
    "a recurrent model": (
        lambda: transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=97, hidden_size=16, num_hidden_layers=1)),
        NotImplementedError,
        "Mamba.* a state along the sequence, and how its layers do so is not known here",
    ),
    "a head that chooses positions": (
        lambda: transformers.LlamaForQuestionAnswering(llama().config),
        NotImplementedError,
        "LlamaForQuestionAnswering chooses positions by a softmax over the whole sequence",
    ),
    "a head that is not known": (
        lambda: transformers.ElectraForPreTraining(
            transformers.ElectraConfig(hidden_size=16, embedding_size=16, num_attention_heads=2, num_hidden_layers=1)
        ),
        NotImplementedError,
        "ElectraForPreTraining is not known to make its outputs and its loss of each token by itself",
    ),
    "an encoder of sound": (
        lambda: transformers.Wav2Vec2ForCTC(
            transformers.Wav2Vec2Config(
                vocab_size=33,
                hidden_size=16,
                intermediate_size=16,
                num_attention_heads=2,
                num_hidden_layers=1,
                conv_dim=[16],
                conv_kernel=[3],
                conv_stride=[2],
                num_conv_pos_embeddings=4,
                num_conv_pos_embedding_groups=2,
                do_stable_layer_norm=False,
                feat_extract_norm="layer",
            )
        ),
        NotImplementedError,
        "takes input_values, no tokens: its layers convolve them, and a CTC loss runs, along the whole sequence",
    ),
    "without the interface": (
        lambda: transformers.GPTJForCausalLM(transformers.GPTJConfig(vocab_size=97, n_embd=16, n_head=2, n_layer=1, rotary_dim=4)),
        NotImplementedError,
        "do not look their attention up",
    ),
    "the share of masked tokens": (
        lambda: transformers.EsmForMaskedLM(
            transformers.EsmConfig(
                vocab_size=33,
                hidden_size=16,
                num_attention_heads=2,
                num_hidden_layers=1,
                intermediate_size=16,
                pad_token_id=1,
                mask_token_id=32,
                token_dropout=True,
                position_embedding_type="rotary",
            )
        ),
        NotImplementedError,
        "token_dropout",
    ),
    "a head on one token beside another": (
        lambda: transformers.GPT2DoubleHeadsModel(transformers.GPT2Config(vocab_size=97, n_embd=16, n_head=2, n_layer=1)),
        NotImplementedError,
        "the head of GPT2DoubleHeadsModel reads tokens that one rank has",
    ),
    "a projection of a pooled token": (
        lambda: transformers.CLIPTextModelWithProjection(tiny.clip_text().config),
        NotImplementedError,
        "the head of CLIPTextModelWithProjection reads tokens that one rank has",
    ),
    "embeddings of neighbours": (
        tiny.mobilebert,
        NotImplementedError,
        "embeddings joins each token's embedding with those of its neighbours, which another rank may have",
    ),
    "a pooler": (
        lambda: transformers.BertModel(transformers.BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)),
        NotImplementedError,
        "pooler reads the first token",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_sharded_are_refused(name):
    make, kind, words = REFUSED[name]
    if int(transformers.__version__.split(".")[0]) < 5:
        words += "|do not look their attention up"  # of older versions some models cannot be sharded at all
    with pytest.raises(kind, match=words):
        context_parallel(make(), "local")


def test_what_counts_tokens_by_itself_takes_no_positions():
    cp = context_parallel(tiny.seq2seq("BartForConditionalGeneration", "Bart")(), "local")
    ids = tiny.tokens()
    with pytest.raises(ValueError, match="BartForConditionalGeneration takes no decoder_position_ids: it counts them itself"):
        cp.shard({"input_ids": ids, "decoder_input_ids": ids, "decoder_position_ids": torch.arange(27)})


@FROM_5
def test_experts_that_drop_tokens_must_have_room_for_all():
    cp = context_parallel(tiny.switch(expert_capacity=26), "local")
    with pytest.raises(ValueError, match=r"drops the tokens beyond expert_capacity=26.* at least the sequence's length, 27"):
        cp.shard({"input_ids": tiny.tokens(), "labels": tiny.tokens()})


@FROM_5
def test_whole_inputs_of_models_that_pass_their_mask_on():
    model = tiny.paligemma().eval()
    ids = tiny.tokens()
    expected = model(ids).logits
    cp = context_parallel(model, "local")
    assert torch.equal(model(ids).logits, expected)
    torch.testing.assert_close(cp(input_ids=ids).logits[:, :27], expected, atol=TOLERANCE, rtol=0)


def test_what_a_sharded_batch_is_given_after_it_was_made_counts(local):
    """The count of labels of all micro-batches does; other labels and a mask would be too late, and are refused."""
    model, cp = local
    batch = cp.shard(tiny.batch())
    items = batch["num_items_in_batch"]
    loss = model(**batch).loss
    torch.testing.assert_close(model(**batch | {"num_items_in_batch": items * 2}).loss, loss / 2)
    torch.testing.assert_close(cp.loss(model(**batch), batch | {"num_items_in_batch": items * 2}), loss / 2)
    with pytest.raises(ValueError, match=r"shift_labels of a sharded batch is not what cp\.shard made"):
        model(**batch | {"shift_labels": batch["labels"].roll(1, 1)})
    mask = batch["attention_mask"].clone()
    mask[:, :3] = 0
    with pytest.raises(ValueError, match="mask of a sharded batch was changed"):
        model(**batch | {"attention_mask": mask})


def test_a_wrapper_may_call_forward_past_the_hooks(local):
    model, cp = local
    batch = cp.shard(tiny.batch())
    torch.testing.assert_close(model.forward(**batch).loss, model(**batch).loss)


def test_the_base_model_takes_the_batch_as_it_is(local):
    """Labels and their count included: the head is the caller's, and so is the loss."""
    model, cp = local
    batch = tiny.batch("left")
    expected, sharded = llama()(**batch).loss, cp.shard(batch)
    for base in (model.model, model.base_model, cp.model.get_decoder(), model.model.forward):  # the last is past the hooks
        outputs = base(**sharded)
        logits = model.lm_head(outputs.last_hidden_state)
        assert "loss" not in outputs
        for given in (logits, transformers.modeling_outputs.CausalLMOutput(logits=logits)):
            torch.testing.assert_close(cp.loss(given, sharded), expected, atol=TOLERANCE, rtol=0)
    assert torch.equal(model(**sharded).logits, logits)
    assert torch.equal(model.model(**sharded, return_dict=False)[0], outputs.last_hidden_state)


class Wrapper(torch.nn.Module):
    """As PEFT's: ``wrapper.base_model.model`` is the model, and older releases call its ``forward``."""

    def __init__(self, model):
        super().__init__()
        self.base_model = torch.nn.ModuleDict({"model": model})

    def forward(self, **batch):
        return self.base_model.model.forward(**batch)


def test_virtual_tokens_of_peft_are_refused(local):
    """Where PEFT wraps the model first, and where it does so afterwards."""
    wrapped = Wrapper(llama())
    wrapped.active_peft_config = types.SimpleNamespace(is_prompt_learning=True)
    with pytest.raises(NotImplementedError, match=r"virtual tokens .* Use LoRA; or make context_parallel of model\.get_base_model"):
        context_parallel(wrapped, "local")
    model, cp = local
    batch = cp.shard(tiny.batch())
    embedded = model.get_input_embeddings()(batch.pop("input_ids"))
    with pytest.raises(ValueError, match=r"inputs_embeds took the place of input_ids .* before cp\.shard"):
        model(**batch, inputs_embeds=embedded)


def test_the_base_model_of_a_wrapped_model():
    whole, wrapped, batch = llama(), Wrapper(llama()), tiny.batch("right")
    cp = context_parallel(wrapped, "local")
    sharded, model = cp.shard(batch), wrapped.base_model.model
    logits = model.lm_head(model.model(**sharded).last_hidden_state)
    torch.testing.assert_close(cp.loss(logits, sharded), whole(**batch).loss, atol=TOLERANCE, rtol=0)
    assert torch.equal(wrapped(**sharded).logits, logits)


def test_a_model_without_a_head_is_its_own_base_model():
    model, ids = llama().model, tiny.tokens()
    expected = model(ids).last_hidden_state
    cp = context_parallel(model, "local", layout="contiguous", buckets=0)
    for base in (model, model.base_model, model.forward):
        hidden = base(**cp.shard({"input_ids": ids})).last_hidden_state
        torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=0)


def test_the_base_model_checks_its_batch_as_the_whole_model_does(local, monkeypatch):
    model, cp = local
    batch, other = cp.shard(tiny.batch()), context_parallel(llama(), "local")
    mask = batch["attention_mask"].clone()
    mask[:, :3] = 0
    with pytest.raises(ValueError, match="sharded by another ContextParallel"):
        model.model(**other.shard(tiny.batch()))
    with pytest.raises(NotImplementedError, match="output_attentions cannot be given"):
        model.model(**batch, output_attentions=True)
    with pytest.raises(ValueError, match="mask of a sharded batch was changed"):
        model.model(**batch | {"attention_mask": mask})
    layers, model.model.layers = model.model.layers, model.model.layers[:1]
    with pytest.raises(NotImplementedError, match="1 attentions of LlamaForCausalLM went through the ring, but it has 2 layers"):
        model.model(**batch)
    model.model.layers = layers
    monkeypatch.setattr(Ring, "size", 2)
    for way_in in (model, model.model):
        with pytest.raises(ValueError, match=r"not sharded over the ring of 2 ranks: call batch = cp\.shard"):
            way_in(input_ids=tiny.tokens(), use_cache=False)


@FROM_5
@pytest.mark.parametrize("make", [tiny.clip_text, tiny.siglip_text])
def test_pooled_outputs_are_not_to_be_had_from_a_shard(make, monkeypatch):
    """Each rank would make them of a token of its own; hidden states are right."""
    cp, ids = context_parallel(make(), "local"), tiny.tokens(16)
    batch = cp.shard({"input_ids": ids})
    assert cp.model(**batch).pooler_output.shape == (2, 32)
    monkeypatch.setattr(Ring, "size", 2)
    for pooled in (cp.model(**batch).pooler_output, cp.model(**batch, return_dict=False)[1]):
        assert "OfOneToken" in repr(pooled)
        for use in (lambda x: x @ x.T, torch.relu, lambda x: torch.nn.functional.linear(torch.ones(2, 32), x), lambda x: x.shape):
            with pytest.raises(NotImplementedError, match=r"made of a token that one rank has .* cp\.unshard"):
                use(pooled)
    assert cp.model(**batch).last_hidden_state.shape[0] == 2


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_inside_a_forward_ends_it(local, error):
    """And with it that of the base model in it, or else the next one would be taken for a part of it."""
    model, cp = local
    batch, whole = cp.shard(tiny.batch("left")), tiny.tokens()
    expected, hidden = model(**batch).loss, model.model(whole).last_hidden_state

    def fails(*_):
        raise error

    handle = model.model.norm.register_forward_pre_hook(fails)
    for way_in in (model, model.model):
        with pytest.raises(error):
            way_in(**batch)
    handle.remove()
    assert torch.equal(model.model(whole).last_hidden_state, hidden)
    assert torch.equal(model(**batch).loss, expected)


def test_a_call_that_is_lent_to_another_function(local):
    """As TRL lends it, to make a loss inside DDP's forward: base model and model may be called from there."""
    model, cp = local
    batch, forward = cp.shard(tiny.batch("left")), model.forward
    expected = model(**batch).loss

    def instead(batch):
        model.forward = forward
        logits = model.lm_head(model.model(**batch).last_hidden_state)
        return [cp.loss(logits, batch), model(**batch).loss]

    model.forward = instead
    assert model(batch) == [expected] * 2


def test_another_part_of_a_model_is_refused(local):
    model, _ = local
    hidden = torch.ones(1, 4, 32)
    with pytest.raises(RuntimeError, match=r"LlamaAttention of layer 0 .* outside its forward: .* or its base model"):
        model.model.layers[0](hidden, position_embeddings=(torch.ones(1, 4, 8), torch.ones(1, 4, 8)))
    images = tiny.gemma3_with_images()
    context_parallel(images, "local")
    with pytest.raises(RuntimeError, match="a mask of a context-parallel model is asked for outside its forward"):
        images.model.language_model(tiny.tokens())


def test_the_base_model_of_whole_inputs_runs_as_before(local):
    model, cp = local
    ids = tiny.tokens()
    expected = llama().model(ids).last_hidden_state
    assert torch.equal(model.model(ids).last_hidden_state, expected)
    model.generate(ids, max_new_tokens=2, do_sample=False)
    cp.remove()
    assert torch.equal(model.model(ids).last_hidden_state, expected)
    for module in (model, model.model):
        assert "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


def test_arrays_of_numpy_are_a_batch(local):
    _, cp = local
    arrays = {name: value.numpy() for name, value in tiny.batch().items()}
    torch.testing.assert_close(cp(**arrays).loss, cp(**tiny.batch()).loss)


def test_a_model_is_made_parallel_once(local):
    model, _ = local
    with pytest.raises(ValueError, match="context-parallel already"):
        context_parallel(model, "local")


def test_layers_that_do_not_come_through_the_ring_are_noticed(local):
    model, cp = local
    model.model.layers[1].self_attn.config = copy.deepcopy(llama().config)
    model.model.layers[1].self_attn.config._attn_implementation = "sdpa"
    with pytest.raises((NotImplementedError, AttributeError, TypeError)):
        cp(**tiny.batch())
