"""transformers' ``generate`` with ``past_key_values=cp.cache(...)``: the tokens of one process with transformers' own cache."""

import pytest
import tiny_hybrids
import tiny_transformers as tiny
import torch
import transformers
from cached_generation import LENGTH, ROOM, SETTINGS, compare, generated, model_of, prompt
from launch import torchrun

from ring_attn.integrations.transformers import context_parallel

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
pytestmark = pytest.mark.skipif(VERSION < (4, 57), reason="older caches have no layers")
FROM_5_15 = pytest.mark.skipif(VERSION < (5, 15), reason="refused in older versions")
FROM_5 = pytest.mark.skipif(VERSION < (5, 0), reason="refused in older versions")
LOOKUP = dict(prompt_lookup_num_tokens=3, max_matching_ngram_size=1)


@pytest.fixture
def local():
    model = model_of("llama")
    cp = context_parallel(model, "local")
    yield model, cp
    cp.remove()


@pytest.mark.wide
@pytest.mark.parametrize("name", sorted(tiny.CAUSAL))
def test_families(name):
    if name == "qwen 2 moe" and VERSION < (5, 0):
        pytest.skip("looks no attention up in older versions")
    compare(name, "local", {}, dict(num_beams=3))


@FROM_5_15
@pytest.mark.wide
@pytest.mark.parametrize("name", sorted(tiny_hybrids.FAMILIES))
def test_hybrid_families(name):
    compare(name, "local", {}, dict(num_beams=3))


def test_each_way_of_choosing_tokens():
    sampled = dict(do_sample=True, temperature=0.8, top_p=0.9)
    several = dict(num_return_sequences=2, **sampled)
    never = transformers.LogitsProcessorList([lambda ids, scores: scores.index_fill(1, torch.arange(40), -torch.inf)])
    compare("mistral", "local", dict(logits_processor=never))
    compare("mistral", "local", several, dict(num_beams=2, do_sample=True), dict(attention_mask=None))
    compare("mistral", "local", dict(input_ids=torch.tensor([[5], [9]]), attention_mask=None))


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ["llama", "gemma 3"]),
        pytest.param(2, ["qwen 3 next", "bamba", "lfm2"], marks=[pytest.mark.costly, FROM_5_15]),
        pytest.param(4, ["llama 4", "gpt-oss"], marks=pytest.mark.costly),
    ],
    ids=str,
)
def test_over_a_ring(size, names):
    told = torchrun("cached_generation_worker.py", size, *names, timeout=400)
    assert told.count("all right") == size


@FROM_5  # older drafts need a token that ends the text
def test_a_draft_is_taken_back(local):
    """Prompt lookup appends several tokens at once and crops those that were not taken; windows, too."""
    for name in ("llama", "gemma 3"):
        model = model_of(name)
        ids = torch.tensor([[5, 9, 12, 5, 9, 12, 5, 9, 12, 5, 9]])
        settings = dict(input_ids=ids, attention_mask=None, max_new_tokens=12)
        expected, logits = generated(model, **settings)
        cp = context_parallel(model, "local")
        found = generated(model, **settings, **LOOKUP, past_key_values=cp.cache(ROOM, at_once=8))
        cp.remove()
        assert torch.equal(found[0], expected)
        torch.testing.assert_close(found[1], logits, rtol=0, atol=4e-6)


def test_a_second_turn_goes_on_from_the_cache(local):
    model, cp = local
    cache, batch = cp.cache(ROOM), prompt()
    first = model.generate(**batch, **SETTINGS, past_key_values=cache)
    more = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(2))
    whole = torch.cat([first, more], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones(2, whole.shape[1] - LENGTH, dtype=torch.int64)], 1)
    found = model.generate(whole, attention_mask=mask, **SETTINGS, past_key_values=cache)
    assert torch.equal(found, model.generate(whole, attention_mask=mask, **SETTINGS))
    cache.reset()
    assert cache.get_seq_length() == 0 and torch.equal(model.generate(**batch, **SETTINGS, past_key_values=cache), first)


@torch.no_grad()
def test_a_loop_of_ones_own(local):
    """The prompt on shards has no logits; new tokens are whole."""
    model, cp = local
    ids, cache = prompt()["input_ids"], cp.cache(ROOM)
    out = model(**cp.shard({"input_ids": ids[:, :-2]}), past_key_values=cache)
    assert out.logits is None and cache.get_seq_length() == LENGTH - 2
    logits = model(input_ids=ids[:, -2:], past_key_values=cache).logits
    with cp.detached():
        torch.testing.assert_close(logits, model(ids).logits[:, -2:], rtol=0, atol=2e-6)


@FROM_5  # older checkpoints warn that nothing needs a gradient
def test_the_model_may_be_training(local):
    """As rollouts are made between steps: activation checkpointing, which takes transformers' own cache away, is no matter."""
    model, cp = local
    expected, _ = generated(model)
    model.train()
    model.activation_checkpointing_enable()
    assert torch.equal(generated(model, past_key_values=cp.cache(ROOM))[0], expected)


def refused(kind, words, call, *arguments, **options):
    with pytest.raises(kind, match=words):
        call(*arguments, **options)


def test_what_is_refused_by_generate(local):
    model, cp = local
    batch = {**prompt(), **SETTINGS}
    for name, value, words in (
        ("max_time", 1.0, "the clocks of the ranks"),
        ("assistant_model", model, "each rank would draft by itself"),
        ("output_attentions", True, "no rank ever has"),
        ("output_hidden_states", True, "spread over the ranks"),
        ("pixel_values", torch.ones(2, 3), "pixel_values cannot be given"),
    ):
        refused(NotImplementedError, words, model.generate, **batch, past_key_values=cp.cache(ROOM), **{name: value})
    refused(ValueError, "all else by name", model.generate, batch["input_ids"], SETTINGS, past_key_values=cp.cache(ROOM))
    clock = transformers.StoppingCriteriaList([transformers.generation.stopping_criteria.MaxTimeCriteria(1.0)])
    refused(NotImplementedError, "the clocks", model.generate, **batch, stopping_criteria=clock, past_key_values=cp.cache(ROOM))
    ids = batch["input_ids"].clone()
    ids[1, 0] = 0
    given = dict(**SETTINGS, past_key_values=cp.cache(ROOM))
    refused(ValueError, "give its attention_mask", model.generate, ids, **given)
    refused(ValueError, "on the left alone", model.generate, ids, attention_mask=ids.flip(1) != 0, **given)
    refused(ValueError, "needs its cache", model.generate, **batch, use_cache=False, past_key_values=cp.cache(ROOM))
    refused(ValueError, "needs one prompt", model.generate, past_key_values=cp.cache(ROOM))
    refused(ValueError, "rows of 28 tokens, .* room for 26", model.generate, **batch, past_key_values=cp.cache(26))
    model.generate(**batch, past_key_values=cp.cache(27))
    config = transformers.GenerationConfig(max_length=30)
    refused(ValueError, "rows of 30 tokens", model.generate, **prompt(), generation_config=config, past_key_values=cp.cache(28))
    refused(ValueError, "this one is sharded", model.generate, **cp.shard(prompt()), past_key_values=cp.cache(ROOM))
    another = context_parallel(model_of("llama"), "local").cache(ROOM)
    refused(ValueError, "another ContextParallel", model.generate, **batch, past_key_values=another)


@torch.no_grad()
def test_what_is_refused_of_a_cache(local):
    model, cp = local
    ids, mask = prompt().values()
    cache = cp.cache(ROOM)
    refused(ValueError, "more than the cache's max_length=12", model, **cp.shard({"input_ids": ids}), past_key_values=cp.cache(12))
    refused(ValueError, "the cache of cp.cache is empty", model, input_ids=ids, past_key_values=cache)
    with_labels = cp.shard({"input_ids": ids, "labels": ids})
    refused(NotImplementedError, "cannot have labels", model, **with_labels, past_key_values=cache)
    model(**cp.shard({"input_ids": ids, "attention_mask": mask}), past_key_values=cache)
    refused(ValueError, "has had its prompt", model, **cp.shard({"input_ids": ids}), past_key_values=cache)
    new = dict(input_ids=ids[:, :1], past_key_values=cache)
    refused(ValueError, r"must be \[batch, 22\]", model, **new)
    refused(ValueError, "must be the prompt's", model, **new, attention_mask=torch.ones(2, LENGTH + 1))
    refused(ValueError, "2 prompts, and 3 rows", model, input_ids=ids[:1, :1].expand(3, 1), past_key_values=cache)
    refused(ValueError, "must leave between 0 and the 0 tokens", cache.crop, -1)
    new |= dict(attention_mask=torch.cat([mask, mask[:, -1:]], 1))
    refused(NotImplementedError, "no rank ever has", model, **new, output_attentions=True)
    assert cache.get_seq_length() == LENGTH  # nothing was appended
    model(**new)


def test_another_history_is_refused(local):
    """transformers would take the cache's tokens for those that came."""
    model, cp = local
    cache, ids = cp.cache(ROOM), prompt()["input_ids"]
    whole = model.generate(ids, **SETTINGS, past_key_values=cache)
    new = dict(**SETTINGS, past_key_values=cache)
    refused(ValueError, "the 27 tokens that the cache holds", model.generate, whole.flip(0), **new)
    refused(ValueError, "the 27 tokens that the cache holds", model.generate, whole[:, :20], **new)
    more = torch.randint(3, 60, (2, 40))
    refused(ValueError, "all of input_ids", model.generate, more, attention_mask=torch.ones(2, 67), **new)
    beams = model.generate(ids, **SETTINGS, num_beams=3, past_key_values=(searched := cp.cache(ROOM)))
    refused(ValueError, "After beams", model.generate, torch.cat([beams, beams], 1), **SETTINGS, past_key_values=searched)


def test_other_rows_than_the_cache_holds_are_refused(local):
    """Also where a loop of one's own gave the prompt, whose tokens the cache does not know."""
    model, cp = local
    cache, ids = cp.cache(ROOM), prompt()["input_ids"]
    with torch.no_grad():
        model(**cp.shard({"input_ids": ids[:1, :-1]}), past_key_values=cache)
    refused(ValueError, "the 20 tokens that the cache holds", model.generate, ids, **SETTINGS, past_key_values=cache)
    assert torch.equal(model.generate(ids[:1], **SETTINGS, past_key_values=cache), model.generate(ids[:1], **SETTINGS))


def test_a_cache_serves_its_model_alone(local):
    model, cp = local
    with cp.detached():
        refused(
            ValueError, "serves the context-parallel model", model.generate, **prompt(), **SETTINGS, past_key_values=cp.cache(ROOM)
        )


@torch.no_grad()
def test_a_forward_that_failed_half_way_is_known(local):
    model, cp = local
    cache, ids = cp.cache(ROOM), prompt()["input_ids"]
    model(**cp.shard({"input_ids": ids}), past_key_values=cache)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: pytest.fail("as it may"))
    with pytest.raises(pytest.fail.Exception):
        model(input_ids=ids[:, :1], past_key_values=cache)
    hook.remove()
    refused(ValueError, "ended half way", model, input_ids=ids[:, :1], past_key_values=cache)
    cache.reset()
    model(**cp.shard({"input_ids": ids}), past_key_values=cache)


def test_gradients_are_refused(local):
    model, cp = local
    refused(ValueError, "keeps no gradients", model, **cp.shard(prompt()), past_key_values=cp.cache(ROOM))


@FROM_5
@pytest.mark.parametrize(("make", "words"), [(tiny.t5, "encoder's output"), (tiny.bert, "not causal")], ids=["T5", "BERT"])
def test_models_without_such_a_cache(make, words):
    model, ids = make().eval(), prompt()["input_ids"]
    cp = context_parallel(model, "local")
    batch = {"input_ids": ids, "decoder_input_ids": ids} if model.config.is_encoder_decoder else {"input_ids": ids}

    @torch.no_grad()
    def whole():
        model(**cp.shard(batch), past_key_values=cp.cache(ROOM))

    refused(NotImplementedError, words, whole)


def test_dropout_in_a_step_is_refused(local):
    model, cp = local
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    refused(NotImplementedError, "model.eval", model.generate, **prompt(), **SETTINGS, past_key_values=cp.cache(ROOM))


@FROM_5_15
def test_what_layers_with_a_state_cannot_do():
    model = model_of("lfm2")
    cp = context_parallel(model, "local")
    lookup = dict(input_ids=torch.tensor([[5, 9, 12, 5, 9, 12, 5]]), **SETTINGS, **LOOKUP)
    refused(NotImplementedError, "take no token back", model.generate, **lookup, past_key_values=cp.cache(ROOM))
    model.train()
    model.activation_checkpointing_enable()
    refused(NotImplementedError, "model.eval", model.generate, **prompt(), **SETTINGS, past_key_values=cp.cache(ROOM))
