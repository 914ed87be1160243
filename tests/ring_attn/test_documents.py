"""Where the documents of a batch begin is decided in one place: the same table for all that read a batch (transformers' models:
tests/integrations/test_transformers.py)."""

import warnings

import pytest
import torch
from document_cases import CASES, Case, same

from ring_attn import ring_attention, shard_batch, shard_packed
from ring_attn.arguments import documents, local_lengths
from ring_attn.arguments.local_lengths import warn_of_local_lengths
from ring_attn.documents.cumulative import check_cumulative
from ring_attn.documents.positions import of_text
from ring_attn.documents.reading import read_documents
from ring_attn.documents.table import of_cumulative, of_numbers
from ring_attn.flash import flash_attn_varlen_func
from ring_attn.sharding import marks
from ring_attn.sharding.marks import bounds_of, mark_bounds
from torch_bridge.attention import functional
from torch_bridge.attention.operation import OPERANDS
from torch_bridge.call import autograd, sanity_checks


def of_the_reading(case: Case):
    return read_documents(case.batch, case.batch["input_ids"].shape, torch.device("cpu")).numbers


def of_shard_batch(case: Case):
    """Its ``attention_mask``, ``segment_ids`` and ``position_ids``; it has no other argument for them."""
    return shard_batch(**case.batch, mesh="local").segment_ids


def of_shard_packed(case: Case):
    shard = shard_packed(case.batch, mesh="local")
    numbers = torch.full((case.batch["input_ids"].numel(),), -1)
    numbers[shard.tokens] = shard.segment_ids[0][shard.places].long()
    return numbers.view_as(case.batch["input_ids"])


READERS = {"the reading": of_the_reading, "shard_batch": of_shard_batch, "shard_packed": of_shard_packed}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("reader", READERS)
def test_all_understand_the_same(reader, name):
    case = CASES[name]
    if reader == "shard_batch" and not case.entries.keys() <= {"position_ids", "segment_ids", "attention_mask"}:
        with pytest.raises(TypeError, match="unexpected keyword"):
            of_shard_batch(case)
        return
    if isinstance(case.understood, str):
        with pytest.raises(ValueError, match=case.understood):
            READERS[reader](case)
        return
    assert same(READERS[reader](case), torch.tensor(case.understood))


def test_numbers_that_come_back():
    """Equal ids see each other wherever they are; what is placed by documents cannot have it so."""
    ids, again = torch.arange(6)[None], torch.tensor([[0, 0, 1, 1, 0, 0]])
    assert torch.equal(shard_batch(ids, segment_ids=again, mesh="local").segment_ids, again)
    with pytest.raises(ValueError, match="segment_ids gives one number to tokens that are apart"):
        shard_packed({"input_ids": ids, "segment_ids": again}, mesh="local")


def test_the_longest_document_is_as_long_as_is_told():
    """Padding is none of its tokens."""
    batch = {"input_ids": torch.arange(9)[None], "cu_seqlens": torch.tensor([0, 3, 5])}
    for longest in (3, 9):
        read_documents({**batch, "max_length_q": longest}, torch.Size((1, 9)), torch.device("cpu"))
    with pytest.raises(ValueError, match="max_length_q is 2, but a document has 3 tokens"):
        read_documents({**batch, "max_length_q": 2}, torch.Size((1, 9)), torch.device("cpu"))


def test_of_four_rows_of_positions_the_first_is_the_texts():
    rows = torch.arange(24).view(4, 1, 6)
    assert torch.equal(of_text(rows, 3), rows[0])
    assert of_text(rows[:3], 3) is None and of_text(rows[0], 3) is not None


def test_labels_stay_within_what_the_mask_numbers():
    batch = shard_batch(torch.arange(6)[None], attention_mask=torch.tensor([[1, 1, 2, 2, 2, 0]]), mesh="local")
    assert batch.segment_ids.tolist() == [[0, 0, 1, 1, 1, -1]]
    assert batch.labels.tolist() == [[1, -100, 3, 4, -100, -100]]


@pytest.mark.parametrize(
    ("ends", "longest", "words"),
    [
        ([0, 3, 13], None, "at most the 12 tokens"),
        ([0, 12, 5], None, "ascend from 0"),
        ([1, 12], None, "ascend from 0"),
        ([0, 5, 12], 6, "in steps of at most max_seqlen_q=6"),
        (3, None, "must be a tensor of ints"),
        ([[0, 12]], None, "must be a tensor of ints"),
        ([], None, "must be a tensor of ints"),
        ([0.0, 12.0], None, "must be a tensor of ints"),
        ([False, True], None, "must be a tensor of ints"),
    ],
    ids=str,
)
def test_cumulative_lengths_are_checked(ends, longest, words):
    with pytest.raises(ValueError, match=words):
        check_cumulative("cu_seqlens_q", torch.tensor(ends), 12, torch.device("cpu"), longest)
    for right in ([0, 12], [0, 5, 5, 12], [0, 3, 9], [0]):
        check_cumulative("cu_seqlens_q", torch.tensor(right), 12, torch.device("cpu"), 12)


def doubted(ends: torch.Tensor, shard: int = 8, total: int = 24) -> list[str]:
    sanity_checks.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_local_lengths("cu_seqlens_q", ends, shard, total)
    return [str(warning.message) for warning in caught]


def test_cumulative_lengths_of_one_rank_are_doubted_in_every_call():
    """Where those of the whole sequence are meant, all tokens after them would be padding, in silence."""
    right, local = torch.tensor([0, 5, 9]), torch.tensor([0, 5, 8])
    assert not doubted(right)
    (words,) = doubted(local)
    assert "cu_seqlens_q ends at 8, within the first rank's shard of 8 tokens" in words
    assert not doubted(local), "looked at once"
    right.copy_(local)
    assert doubted(right) == doubted(torch.tensor([0, 8])) == [words]
    assert not doubted(torch.tensor([0, 4]), 4, 4), "a ring of one"


def test_on_a_device_they_are_read_once_they_have_come(monkeypatch):
    class Event:
        done = False

        def query(self):
            return self.done

    monkeypatch.setattr(local_lengths, "recorded", lambda device: event)
    event = Event()
    assert not doubted(torch.tensor([0, 8])) and not doubted(torch.tensor([0, 9]))
    event.done = True
    assert len(doubted(torch.tensor([0, 10]))) == 1
    assert not local_lengths._asked


def test_a_packed_call_doubts_them():
    """Over a ring of two they are those of the whole, and after a right call, too."""
    called = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "warn_of_local_lengths", lambda *given: called.append(given))
        for ends in (torch.tensor([0, 5, 12]), torch.tensor([0, 5, 12])):
            flash_attn_varlen_func(*[torch.randn(12, 2, 8)] * 3, ends, ends, 7, 7, group="local")
    assert [(name, shard, total) for name, _, shard, total in called] == [("cu_seqlens_q", 12, 12)] * 2


ROWS = {
    "two documents": [0, 0, 1, 1, 1],
    "padding at both ends": [-1, 4, 4, 7, -1],
    "padding alone": [-1, -1, -1, -1, -1],
    "padding within": [0, -1, 0, 1, 1],
    "padding between": [0, 0, -1, 1, 1],
    "one that comes back": [0, 1, 1, 0, 0],
    "one": [3, 3, 3, 3, 3],
}
NO_INTERVALS = ("padding within", "padding between", "one that comes back")


@pytest.mark.parametrize("names", [*([name] for name in ROWS), ["two documents", "padding at both ends", "padding alone"]], ids=str)
def test_a_table_says_what_the_numbers_say(names):
    numbers = torch.tensor([ROWS[name] for name in names])
    found = of_numbers(numbers)
    assert (found is None) == any(name in NO_INTERVALS for name in names)
    if found is None:
        return
    table, padding, *_ = found
    assert padding == bool((numbers < 0).any())
    assert table.dtype == torch.int32 and table.shape == (len(names), 17)
    index = torch.arange(numbers.shape[1])
    inside = (table[:, :-1, None] <= index) & (index < table[:, 1:, None])  # [rows, documents, seq]
    same = (inside[:, :, :, None] & inside[:, :, None]).any(1)
    assert torch.equal(same, (numbers[:, :, None] == numbers[:, None]) & (numbers >= 0)[:, :, None])


def test_a_table_has_places_for_twice_as_many_or_none():
    assert of_numbers(torch.arange(17)[None]).table.shape == (1, 33)
    assert of_numbers(torch.arange(5000)[None]) is None
    assert torch.equal(of_cumulative(torch.tensor([0, 2, 5])), of_numbers(torch.tensor([[0, 0, 1, 1, 1]])).table)


@pytest.fixture
def told(monkeypatch):
    """The documents that calls tell their kernels."""
    found, apply = [], autograd.apply

    def noting(key, operands):
        found.append(operands[OPERANDS.index("documents")])
        return apply(key, operands)

    monkeypatch.setattr(autograd, "apply", noting)
    return found


@pytest.mark.parametrize("compiles", [False, True])
def test_kernels_are_told_the_pieces_of_a_packed_batch(told, compiles):
    """Not those of ids without the positions that belong to them."""
    batch = shard_packed({"input_ids": torch.arange(9)[None], "cu_seqlens": torch.tensor([0, 3, 9])}, mesh="local", buckets=0)
    q = torch.randn(1, 9, 2, 8)

    def attend(x, segments, positions):
        return ring_attention(x, x, x, causal=True, mesh="local", q_segment_ids=segments, q_position_ids=positions)

    run = torch.compile(attend, backend="eager", fullgraph=True) if compiles else attend
    out = run(q, *batch.attention.values())
    assert told[-1].shape == (1, 16, 3) and told[-1][0, :3].tolist() == [[0, 0, 3], [1, 0, 6], [2**31 - 1, 0, 0]]
    changed = attend(q, batch.segment_ids, batch.offsets + 1)
    assert told[-1] is None
    torch.testing.assert_close(out, changed)
    ring_attention(q, q, q, causal=True, mesh="local", q_segment_ids=batch.segment_ids)
    assert told[-1] is None


def test_a_compiled_function_takes_batches_of_which_other_parts_are_shared(told):
    batch = shard_packed({"input_ids": torch.arange(9)[None], "cu_seqlens": torch.tensor([0, 3, 9])}, mesh="local", buckets=0)
    table, q = bounds_of(batch.segment_ids, None), torch.randn(1, 9, 2, 8)
    assert table is not None

    @torch.compile(backend="eager", fullgraph=True)
    def attend(x, segments, positions):
        return ring_attention(x, x, x, causal=True, mesh="local", q_segment_ids=segments, q_position_ids=positions)

    for eighths in (3, 6, 8, 0):
        marked = table._replace(shared_eighths=eighths)
        ids = (mark_bounds(x.clone(), marked) for x in (batch.segment_ids, batch.offsets))
        assert torch.equal(attend(q, *ids), attend(q, *batch.attention.values())) and told[-1] is not None


@pytest.mark.parametrize("compiles", [False, True])
def test_kernels_are_told_the_documents_of_a_sharded_batch(told, compiles):
    """In compiled functions, too; not those of ids that were changed."""
    ids = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2]])
    batch = shard_batch(ids, segment_ids=ids, mesh="local")
    q = torch.randn(1, 8, 2, 8)

    def attend(x, segments):
        return ring_attention(x, x, x, causal=True, mesh="local", q_segment_ids=segments)

    run = torch.compile(attend, backend="eager", fullgraph=True) if compiles else attend
    out = run(q, batch.segment_ids)
    assert told[-1][0].tolist() == [0, 2, 6, *[8] * 14]
    changed = attend(q, batch.segment_ids + 1)
    assert told[-1] is None
    torch.testing.assert_close(out, changed)


@pytest.mark.parametrize("padded", [False, True])
def test_whether_there_is_padding_is_told_with_the_documents(monkeypatch, padded):
    seen = []
    describe = functional._described
    monkeypatch.setattr(
        functional, "_described", lambda where, options, *rest: seen.append(options) or describe(where, options, *rest)
    )
    ids = torch.tensor([[0, 0, 1, 1, 1, 1, 2, -1 if padded else 2]])
    batch = shard_batch(ids.clamp_min(0), segment_ids=ids, mesh="local")
    q = torch.randn(1, 8, 2, 24)
    ring_attention(q, q, q, causal=True, mesh="local", q_segment_ids=batch.segment_ids)
    assert seen[-1].padding == padded


def test_no_padding_is_checked():
    q, ids = torch.randn(1, 8, 2, 8), torch.tensor([[0, 0, 1, 1, 1, 1, 2, -1]])
    with pytest.raises(ValueError, match="q_segment_ids must not be negative where padding=False"):
        ring_attention(q, q, q, mesh="local", q_segment_ids=ids, padding=False)
    packed = dict(mesh="local", qkv_format="thd", causal=True, padding=False)
    with pytest.raises(ValueError, match="to the 8 tokens of the whole sequence where padding=False"):
        ring_attention(*[q[0]] * 3, cu_seqlens_q=torch.tensor([0, 3, 7]), **packed)
    ends = torch.tensor([0, 3, 8])
    with_it = ring_attention(*[q[0]] * 3, cu_seqlens_q=ends, **packed)
    assert torch.equal(with_it, ring_attention(*[q[0]] * 3, cu_seqlens_q=ends, **{**packed, "padding": True}))
    batch = shard_batch(ids.clamp_min(0), segment_ids=ids, mesh="local")  # whose documents are known
    with pytest.raises(ValueError, match="q_segment_ids must not be negative where padding=False"):
        ring_attention(q, q, q, causal=True, mesh="local", q_segment_ids=batch.segment_ids, padding=False)


def test_documents_of_a_shard_go_by_its_ids_where_it_is_attended_to_alone():
    """The table of documents has the places of the whole sequence, the layout's; a rank's rows by themselves have others."""
    ids = torch.tensor([[1, 1, 2, 2, 2, 2, 2, 3]])
    own = marks.mark_bounds(ids.clone(), of_numbers(torch.arange(16)[None] // 2))
    marks.mark_shard(own, marks.Shard((0, 1), "zigzag", 1, 16))
    q = torch.randn(1, 8, 2, 8)
    out, wanted = (ring_attention(q, q, q, mesh="local", q_segment_ids=x) for x in (own, ids))
    assert torch.equal(out, wanted)
