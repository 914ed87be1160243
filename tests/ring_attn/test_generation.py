"""Generation from a KVCache: every step against the oracle, what is generated against recomputing it, and what is refused."""

import pickle

import pytest
import torch
from generation_cases import BATCH, DIM, HEADS, KV_HEADS, SEQUENCES, SmallModel, check, make_arrays, prompts, run
from launch import torchrun

from ring_attn import Ring, RingAttention, ring_attention
from ring_attn.generation import KVCache, Sampler, cache, decode, generate, step
from ring_attn.generation.layer import CacheSlots, Layer, whole_layer, window_layer

LENGTHS = torch.tensor([37, 5, 20])


@pytest.mark.slow
@pytest.mark.parametrize("name", SEQUENCES)
def test_steps_are_attention_over_the_grown_sequence(name: str):
    check(SEQUENCES[name], Ring())


def test_forked_entries_go_on_by_themselves():
    case = SEQUENCES["sinks, soft cap, lengths"]
    arrays, index = make_arrays(case), torch.tensor([2, 0, 2])
    cache, _ = run(case, Ring(), arrays)
    fork = cache.fork(index)
    before = cache.layers[0].contents.key.clone()
    fork.grow(case.whole + 1)
    new = [torch.randn(BATCH, 1, heads, DIM, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    forked = fork.attend(0, *new, softcap=3.0, sinks=arrays["sinks"])
    assert torch.equal(cache.layers[0].contents.key, before)
    cache.grow(case.whole + 1)
    cache.reorder(index)
    assert torch.equal(cache.attend(0, *new, softcap=3.0, sinks=arrays["sinks"]), forked)
    own = torch.cat([arrays["k"][2, : case.lengths[2] + sum(case.steps)], new[1][0]])[None]
    values = torch.cat([arrays["v"][2, : case.lengths[2] + sum(case.steps)], new[2][0]])[None]
    alone = ring_attention(new[0][:1], own, values, softcap=3.0, sinks=arrays["sinks"])
    torch.testing.assert_close(forked[:1], alone, atol=1e-12, rtol=0)


def test_a_cache_is_loaded_as_it_was_saved():
    model, tokens = SmallModel(), prompts()
    cache = KVCache(Ring(), max_length=60)
    said = generate(model, tokens, cache, 4, lengths=LENGTHS)
    loaded = pickle.loads(pickle.dumps(cache))
    more = [decode(model, said[:, -1], each, 6) for each in (loaded, cache)]
    assert torch.equal(*more)


@pytest.mark.slow
def test_sixty_four_prompts_say_what_each_says_alone():
    model, tokens = SmallModel(), prompts(64)
    lengths = torch.randint(1, 38, (64,), generator=torch.Generator().manual_seed(3))
    said = generate(model, tokens, KVCache(Ring(), max_length=60), 5, lengths=lengths)
    for entry in (5, 63):
        alone = generate(model, tokens[entry : entry + 1, : lengths[entry]], KVCache(Ring(), max_length=60), 5)
        assert torch.equal(said[entry : entry + 1], alone)


@pytest.mark.slow
def test_a_compiled_model_says_the_same():
    model, tokens = SmallModel(), prompts()
    said = generate(model, tokens, KVCache(Ring(), max_length=60), 12, lengths=LENGTHS)
    compiled = torch.compile(model, backend="aot_eager")
    assert torch.equal(generate(compiled, tokens, KVCache(Ring(), max_length=60), 12, lengths=LENGTHS), said)


def test_what_a_compiled_step_has_computed_is_gone_in_the_next():
    """As with mode="reduce-overhead", where a CUDA graph writes its results to the same memory whenever it runs."""
    results: list[torch.Tensor] = []

    def in_the_same_memory(graph, _):
        def run(*given):
            found = graph(*given)
            results.extend(x for x in found if isinstance(x, torch.Tensor))
            return found

        return run

    class Step(SmallModel):
        def forward(self, *given):
            for x in results:
                x.fill_(7)
            results.clear()
            return compiled(self, *given)

    compiled = torch.compile(SmallModel.forward, backend=in_the_same_memory)
    model = SmallModel(dtype=torch.float32)
    plain = generate(model, prompts(), KVCache(Ring(), max_length=60), 8, lengths=LENGTHS)
    model.__class__ = Step
    assert torch.equal(generate(model, prompts(), KVCache(Ring(), max_length=60), 8, lengths=LENGTHS), plain)


def test_positions_of_padded_prompts_are_in_a_learned_table():
    tokens = torch.ones(1, 1100, dtype=torch.int64)
    with KVCache(Ring(), max_length=1200).prompt(tokens) as part:
        assert part.position_ids.shape[1] == 1152 and int(part.position_ids.max()) == 1099


@pytest.mark.slow
def test_cross_attention_is_written_once():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, length, 2, 8, generator=generator).double() for length in (7, 10, 10))
    padding = torch.zeros(2, 10, dtype=torch.int64)
    padding[1, 6:] = -1
    cache = KVCache(Ring(), max_length=16)
    cache.write(3, k, v, padding)
    wanted = torch.cat([ring_attention(q[:1], k[:1], v[:1]), ring_attention(q[1:], k[1:, :6], v[1:, :6])])
    with cache.prompt(torch.zeros(2, 5, dtype=torch.int64)):
        torch.testing.assert_close(cache.attend(3, q[:, :5]), wanted[:, :5], atol=1e-12, rtol=0)
    torch.testing.assert_close(cache.attend(3, q[:, 5:]), wanted[:, 5:], atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="written once, for cross attention"):
        cache.attend(3, q[:, 5:], k[:, :2], v[:, :2])


@pytest.mark.slow
def test_generation_is_recomputing_the_whole():
    model, tokens = SmallModel(), prompts()
    found = generate(model, tokens, KVCache(Ring(), max_length=45), 8, lengths=LENGTHS)

    class Whole:
        def attend(self, layer, q, k, v, **options):
            return ring_attention(q, k, v, causal=True, **options)

    for entry, length in enumerate(LENGTHS.tolist()):
        whole = torch.cat([tokens[entry, :length], found[entry]])[None]
        with torch.no_grad():
            logits = model(whole, torch.arange(whole.shape[1])[None], Whole())
        assert logits[0, length - 1 : -1].argmax(-1).tolist() == found[entry].tolist()


def test_a_stop_ends_an_entry_and_then_all():
    model, tokens = SmallModel(), prompts()
    free = generate(model, tokens, KVCache(Ring(), max_length=60), 12, lengths=LENGTHS)
    stop = int(free[1, 2])
    stopped = generate(model, tokens, KVCache(Ring(), max_length=60), 12, lengths=LENGTHS, stop=stop)
    for with_stop, without in zip(stopped.tolist(), free.tolist(), strict=True):
        end = without.index(stop) + 1 if stop in without else len(without)
        assert with_stop == (without[:end] + [stop] * 12)[: stopped.shape[1]]
    one = generate(model, tokens[1:2, :5], KVCache(Ring(), max_length=60), 12, stop=stop)
    assert one.tolist() == [free[1, :3].tolist()]


def test_one_seed_gives_one_text_and_a_prompt_of_one_token_is_enough():
    model, sampler = SmallModel(), Sampler(temperature=1.0, top_p=0.9, seed=3)
    texts = [generate(model, prompts(2, 1), KVCache(Ring(), max_length=20), 12, sampler=sampler).tolist() for _ in range(2)]
    assert texts[0] == texts[1] != generate(model, prompts(2, 1), KVCache(Ring(), max_length=20), 12).tolist()


def test_what_a_sampler_draws():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().repeat(4000, 1)

    def counts(**settings):
        sampler = Sampler(**settings)
        return torch.bincount(sampler(logits, sampler.generator(logits.device)), minlength=4).float() / len(logits)

    for first_only in ({}, {"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 0.4}):
        assert counts(**first_only).tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(counts(temperature=1.0), logits[0].exp(), atol=0.04, rtol=0)
    torch.testing.assert_close(counts(temperature=1.0, top_p=0.7), torch.tensor([0.625, 0.375, 0, 0]), atol=0.04, rtol=0)
    hot = logits[0].div(2).softmax(0)[:3]
    torch.testing.assert_close(counts(temperature=2.0, top_k=3)[:3], hot / hot.sum(), atol=0.04, rtol=0)
    with pytest.raises(ValueError, match="0 < top_p <= 1"):
        Sampler(top_p=0.0)


@pytest.mark.slow
def test_ring_attention_with_a_cache():
    torch.manual_seed(0)
    module = RingAttention(32, 4, num_kv_heads=2, sinks=True, causal=True, sliding_window=(5, 0), batch_first=True).double().eval()
    torch.nn.init.normal_(module.sinks)
    x, cache = torch.randn(2, 14, 32, dtype=torch.float64), KVCache(Ring(), max_length=14)
    with torch.no_grad():
        wanted = module(x, x, x)[0]
        with cache.prompt(torch.zeros(2, 8, dtype=torch.int64)):
            parts = [module(*[x[:, :8]] * 3, cache=cache)[0]]
        parts += [module(*[x[:, at : at + n]] * 3, cache=cache)[0] for at, n in ((8, 1), (9, 4), (13, 1))]
        torch.testing.assert_close(torch.cat(parts, 1), wanted, atol=1e-12, rtol=0)
        with pytest.raises(ValueError, match=r"masks and ids are the cache's own.*got q_position_ids, kv_position_ids"):
            module(x, x, x, cache=cache, q_position_ids=torch.arange(14), kv_position_ids=torch.arange(14))
        with pytest.raises(ValueError, match="with cache=, query, key and value must be one tensor"):
            module(x, x + 1, x, cache=cache)
        with pytest.raises(ValueError, match="with cache=, module and cache must have one ring"):
            module(x, x, x, cache=KVCache(Ring(layout="striped"), max_length=14))


# ---------------------------------------------------------------------------------------------------------- graphs


class Recorded:
    """A CUDA graph as far as a CPU has one: a step that is captured changes nothing, and one that is replayed changes nothing that
    the host knows."""

    def __init__(self, token: torch.Tensor) -> None:
        self.token, self.ended = token.clone(), False

    def capture(self, function) -> None:
        self.function, self.cache = function, function.__self__._cache
        kept = [x for layer in self.cache.layers.values() for x in layer.contents] + [self.cache._count]
        before = [x.clone() for x in kept]
        self.replay(self.token, restored=False)
        for x, old in zip(kept, before, strict=True):
            x.copy_(old)

    def reset(self) -> None:
        self.ended = True

    def replay(self, token: torch.Tensor, restored: bool = True) -> torch.Tensor:
        counts = self.cache.counts()
        self.token.copy_(token)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cache, "is_captured", lambda _: True)
            logits = self.function(self.token)
        if restored:
            self.cache.set_counts(counts)
        return logits


@pytest.fixture
def graphs(monkeypatch) -> list[Recorded]:
    made: list[Recorded] = []
    monkeypatch.setattr(step, "capturable", lambda _: True)
    monkeypatch.setattr(step, "Graph", lambda token: made.append(Recorded(token)) or made[-1])
    return made


def test_a_captured_step_counts_on_the_device(graphs):
    model, tokens = SmallModel(), prompts()
    plain = generate(model, tokens, KVCache(Ring(), max_length=60), 12, lengths=LENGTHS, cuda_graph=False)
    assert not graphs
    kept = KVCache(Ring(), max_length=60)
    found = generate(model, tokens, kept, 12, lengths=LENGTHS)
    assert len(graphs) == 1 and kept.appended == 12
    assert graphs[0].ended
    assert torch.equal(found, plain)
    index = torch.tensor([1, 0, 1])
    kept.grow(70)
    kept.reorder(index)
    again = decode(model, found[index, -1], kept, 5)
    other = KVCache(Ring(), max_length=70)
    generate(model, tokens, other, 12, lengths=LENGTHS, cuda_graph=False)
    assert torch.equal(again, decode(model, found[index, -1], other.fork(index), 5, cuda_graph=False))
    assert len(graphs) == 2


def test_a_prompt_of_one_token_makes_its_layers_before_the_capture(graphs):
    model, tokens = SmallModel(), prompts()[:, :1]
    plain = generate(model, tokens, KVCache(Ring(), max_length=60), 6, cuda_graph=False)
    assert torch.equal(generate(model, tokens, KVCache(Ring(), max_length=60), 6), plain)
    assert len(graphs) == 1


def test_the_graph_ends_with_an_error(graphs):
    """NCCL would wait for it, before anybody sees the error."""
    model, tokens = SmallModel(), prompts()
    kept = KVCache(Ring(), max_length=int(LENGTHS.max()) + 3)
    with pytest.raises(ValueError, match="room for"):
        generate(model, tokens[:, : int(LENGTHS.max())], kept, 12, lengths=LENGTHS)
    assert [graph.ended for graph in graphs] == [True]


def test_a_layer_that_a_capture_has_made_is_gone(graphs):
    """Its memory was filled in the graph alone."""
    model, tokens, steps, others = SmallModel(), prompts()[:, :1], iter(range(100)), []

    def one_more(token, positions, kept):
        logits = model(token, positions, kept)
        if next(steps) == 1:
            new = torch.zeros(len(token), 1, 2, 8)
            kept.attend(99, new, new, new)
            others.append(kept.layers[99])
        return logits

    kept = KVCache(Ring(), max_length=60)
    with pytest.warns(RuntimeWarning, match="the second step needed other memory of the cache than the first"):
        generate(one_more, tokens, kept, 6)
    assert others and 99 not in kept.layers
    assert [graph.ended for graph in graphs] == [True]


def test_a_step_goes_on_in_the_same_memory_after_a_reorder(graphs):
    model, tokens, index = SmallModel(), prompts(), torch.tensor([2, 0, 0])
    caches = [KVCache(Ring(), max_length=60) for _ in range(2)]
    steps = [step.DecodingStep(model, each, cuda_graph=graph) for each, graph in zip(caches, (True, False), strict=True)]
    for each in caches:
        generate(model, tokens, each, 0, lengths=LENGTHS)
    token = torch.tensor([3, 4, 5])
    with torch.no_grad():
        for number in range(6):
            if number == 3:
                for each in caches:
                    each.reorder(index)
            one, other = (run(token) for run in steps)
            assert torch.equal(one, other)
    assert len(graphs) == 1


def test_a_step_that_cannot_be_captured_runs_as_it_is(graphs):
    model, tokens, counts = SmallModel(), prompts(), iter(range(100))

    def once_refused(*given):
        logits = model(*given)
        if next(counts) == 2:  # after the prompts and the first token: while it is captured
            raise RuntimeError("not permitted when stream is capturing")
        return logits

    plain = generate(model, tokens, KVCache(Ring(), max_length=60), 6, lengths=LENGTHS, cuda_graph=False)
    with pytest.warns(RuntimeWarning, match="cannot be captured in a CUDA graph: RuntimeError: not permitted"):
        found = generate(once_refused, tokens, KVCache(Ring(), max_length=60), 6, lengths=LENGTHS)
    assert torch.equal(found, plain) and len(graphs) == 1


# ---------------------------------------------------------------------------------------------------------- slots


def held(tokens: int, first: int = 0) -> CacheSlots:
    """The key of a token is its position."""
    positions = torch.arange(first, first + tokens, dtype=torch.int32)[None]
    x = positions[..., None, None].double()
    return CacheSlots(x, x.clone(), positions, torch.zeros_like(positions))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_new_tokens_go_round_the_ranks(size: int):
    layers = [whole_layer(held(5, 5 * rank), rank, size, room=10) for rank in range(size)]
    appended = 0
    for tokens in (1, 1, 3, 1, 4):
        for layer in layers:
            layer.append(held(tokens, 5 * size + appended), layer.places(torch.tensor(appended), tokens))
        appended += tokens
        kept = [int((layer.contents.segments >= 0).sum()) for layer in layers]
        assert max(kept) - min(kept) <= 1
        assert sum(kept) == 5 * size + appended
    assert sorted(positions(layers)) == list(range(5 * size + 10))
    assert all(layer.room == layer.slots * size - 5 * size - 10 for layer in layers)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_window_keeps_what_a_query_can_see_on_as_few_slots_as_that_takes(size: int):
    reach, at_once, lengths = 7, 3, torch.tensor([5 * size])
    shards = [held(5, 5 * rank) for rank in range(size)]
    windows = []
    for rank in range(size):
        # Every rank adds its own tokens to the others'; here all of them are in this process.
        parts = iter(zip(*(gathered(shard, reach, at_once, lengths, size) for shard in shards), strict=True))
        windows.append(window_layer(shards[rank], rank, size, reach, at_once, lengths, lambda x, parts=parts: sum(next(parts))))
    check_window(windows, 5 * size, reach)
    appended = 0
    for tokens in (1, 3, 1, 2, 3, 3, 1, 1):
        for layer in windows:
            layer.append(held(tokens, 5 * size + appended), layer.places(torch.tensor(appended), tokens))
        appended += tokens
        check_window(windows, 5 * size + appended, reach)
    assert all(layer.slots == max(-(-reach // size), -(-(reach + at_once) // size)) for layer in windows)


def gathered(shard: CacheSlots, reach: int, at_once: int, lengths: torch.Tensor, size: int) -> list[torch.Tensor]:
    """What one rank contributes to the sums."""
    given: list[torch.Tensor] = []
    window_layer(shard, 0, size, reach, at_once, lengths, lambda x: given.append(x) or x)
    return given


def positions(layers: list[Layer]) -> list[int]:
    return [position for layer in layers for position in layer.contents.positions[layer.contents.segments >= 0].tolist()]


def check_window(layers: list[Layer], length: int, reach: int) -> None:
    assert set(positions(layers)) >= set(range(max(0, length - reach), length))
    for layer in layers:
        real = layer.contents.segments >= 0
        assert torch.equal(layer.contents.key[real][:, 0, 0], layer.contents.positions[real].double())


# ------------------------------------------------------------------------------------------------------- refusals


def filled(**settings) -> KVCache:
    cache = KVCache(Ring(), **{"max_length": 8, "at_once": 2} | settings)
    with cache.prompt(torch.zeros(1, 6, dtype=torch.int64)):
        cache.attend(0, *torch.zeros(3, 1, 6, 2, 8), sliding_window=(3, 0))
    return cache


def begin(max_length: int, *lengths: torch.Tensor) -> None:
    with KVCache(Ring(), max_length=max_length).prompt(torch.zeros(1, 6, dtype=torch.int64), *lengths):
        pass


NEW = torch.zeros(3, 1, 1, 2, 8)
REFUSED = {
    "no layer": (lambda: filled().attend(1, *NEW), "layer 1 holds no keys"),
    "no prompt": (lambda: KVCache(Ring(), max_length=8).positions(), "has had no prompt"),
    "two prompts": (lambda: filled().prompt(torch.zeros(1, 2, dtype=torch.int64)).__enter__(), "has had its prompt"),
    "no ring": (lambda: KVCache(None, max_length=8), "made for a ring_attn.Ring, got NoneType"),
    "sizes": (lambda: KVCache(Ring(), max_length=0), "max_length must be a positive int"),
    "long prompt": (lambda: begin(4), "more than the cache's max_length=4"),
    "lengths": (lambda: begin(8, torch.tensor([7])), "no prompt is longer than the 6 tokens"),
    "full": (lambda: filled(max_length=6).attend(0, *NEW, sliding_window=(3, 0)), "after a prompt of 6 and 0 new tokens 1 more"),
    "too many at once": (
        lambda: filled(max_length=20).attend(0, *torch.zeros(3, 1, 6, 2, 8), sliding_window=(3, 0)),
        "at most 2 new tokens in one call, got 6",
    ),
    "other heads": (lambda: filled().attend(0, *torch.zeros(3, 1, 1, 4, 8), sliding_window=(3, 0)), "but new ones of"),
    "other tokens": (
        lambda: filled().attend(0, NEW[0], NEW[1], torch.zeros(1, 2, 2, 8), sliding_window=(3, 0)),
        "of \\[1, 2\\] tokens",
    ),
    "fewer keys": (lambda: filled().attend(0, torch.zeros(1, 2, 2, 8), *NEW[1:], sliding_window=(3, 0)), "of \\[1, 2\\] tokens"),
    "another device": (lambda: filled().attend(0, *NEW.to("meta"), sliding_window=(3, 0)), "meta"),
    "other window": (lambda: filled().attend(0, *NEW), "keeps 3 tokens before a query, but this call looks None back"),
    "one of two": (lambda: filled().attend(0, NEW[0], NEW[1]), "k and v come both"),
    "no keys": (lambda: filled().attend(0, NEW[0], sliding_window=(3, 0)), "needs k and v of the new tokens"),
    "gradients": (lambda: filled().attend(0, *NEW.clone().requires_grad_()), "within torch.no_grad"),
    "shrinking": (lambda: filled().grow(4), "a cache only grows"),
    "index": (lambda: filled().fork(torch.tensor([True])), "int64"),
    "no tokens": (lambda: generate(SmallModel(), prompts(1, 0), KVCache(Ring(), max_length=8), 1), "with a token each"),
    "no logits": (lambda: decode(lambda *_: None, torch.zeros(1).long(), filled(), 1), "must return logits"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_layers_share_positions_until_a_caller_gives_segments_of_its_own():
    """They are kept once a step, by the first layer; layers of other slots have their own."""
    cache, options = KVCache(Ring(), max_length=12), ({}, {}, {"sliding_window": (2, 0)}, {"sliding_window": (2, 0)})
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 10, 2, 8, dtype=torch.float64, generator=generator)
    with cache.prompt(torch.zeros(1, 6, dtype=torch.int64)):
        for layer, more in enumerate(options):
            cache.attend(layer, q[:, :6], k[:, :6], v[:, :6], **more)
    assert len({layer.contents.segments.data_ptr() for layer in cache.layers.values()}) == 2
    for place in range(6, 9):
        new = [x[:, place : place + 1] for x in (q, k, v)]
        found = [cache.attend(layer, *new, **more) for layer, more in enumerate(options)]
        for out, more in zip(found, options, strict=True):
            wanted = ring_attention(*(x[:, : place + 1] for x in (q, k, v)), causal=True, **more)[:, -1:]
            torch.testing.assert_close(out, wanted, atol=1e-12, rtol=0)
    new = [x[:, 9:] for x in (q, k, v)]
    alone = cache.attend(0, *new, segment_ids=torch.tensor([[5]]))  # it sees itself only
    torch.testing.assert_close(alone, v[:, 9:], atol=1e-12, rtol=0)
    together = cache.attend(1, *new)
    torch.testing.assert_close(together, ring_attention(q, k, v, causal=True)[:, -1:], atol=1e-12, rtol=0)


def test_layers_that_are_out_of_step_are_named():
    cache = filled()
    cache.keep(1, *torch.zeros(2, 1, 6, 2, 8), *torch.zeros(2, 1, 6, dtype=torch.int32))
    cache.attend(1, *NEW)
    with pytest.raises(ValueError, match=r"the layers have appended \{0: 0, 1: 1\}"):
        cache.positions()


# ---------------------------------------------------------------------------------------------- several processes


def processes(count: int, *arguments: str, **variables: str) -> str:
    return torchrun("generation_worker.py", count, *arguments, **variables)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_on_rings_of_two_and_four(count: int):
    """Steps against the oracle, and the text of one process."""
    text = generate(SmallModel(), prompts(), KVCache(Ring(), max_length=80), 13, lengths=LENGTHS)
    printed = processes(count, "short")
    assert printed.count("ok ") == {2: 4, 4: 1}[count], printed
    assert f"text {text.tolist()}" in printed, printed


@pytest.mark.slow
def test_a_long_prompt_on_four_processes_is_one_process_token_for_token():
    """Greedy and drawn tokens after 32k; a layer that sees everything, and one with a window."""
    alone, four = (processes(count, "long", XLA_FLAGS="") for count in (1, 4))
    texts = [[line for line in printed.splitlines() if line.startswith("text ")] for printed in (alone, four)]
    assert len(texts[0]) == 2 and texts[0] == texts[1], (alone, four)
    assert len(set(texts[0])) == 2


@pytest.mark.parametrize("window", [None, 5])
@torch.no_grad()
def test_tokens_are_taken_back(window):
    """After crop all is as if they had never come; a window gives back no more than it takes at once."""
    options = {} if window is None else {"sliding_window": (window, 0)}
    q, k, v = torch.randn(3, 2, 30, 2, 8, generator=torch.Generator().manual_seed(0))

    def prompted():
        cache = KVCache(Ring("local"), 64, at_once=4)
        with cache.prompt(torch.zeros(2, 12, dtype=torch.int64), torch.tensor([12, 9])):
            cache.attend(0, q[:, :12], k[:, :12], v[:, :12], **options)
        return cache

    def new(cache, *tokens):
        return cache.attend(0, *(x[:, list(tokens)] for x in (q, k, v)), **options)

    cache, fresh = prompted(), prompted()
    new(cache, 12, 13), new(cache, 20, 21, 22)
    cache.crop(2)
    assert cache.appended == 2
    new(fresh, 12, 13)
    for tokens in ((14,), (15, 16, 17), (18,)):
        assert torch.equal(new(cache, *tokens), new(fresh, *tokens))
    for count in (cache.appended + 1, -1):
        with pytest.raises(ValueError, match="crop must leave between 0 and the 7 tokens"):
            cache.crop(count)
    if window is not None:
        cache.crop(4)
        with pytest.raises(ValueError, match=r"has a window and has kept what .* are to be taken back"):
            cache.crop(0)
