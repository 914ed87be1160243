"""Packed batches: what collators return, every rank's shard of it, packed attention in one process, and on rings."""

import pytest
import torch
from launch import torchrun
from packed_mixes import mixes
from packed_reference import axolotl_batch, of_documents, trl_batch
from workers import packed_worker

from ring_attn import Ring, ring_attention, shard_batch, shard_packed
from ring_attn.packed.documents import read_documents
from torch_bridge.backends import shared_memory


class FakeRing:
    """A rank of a ring that needs no processes."""

    def __init__(self, rank, size):
        self.rank, self.size, self.ranks_here, self.group = rank, size, (rank,), None

    def split(self, tensor, dim):
        return tensor


@pytest.fixture
def shards(monkeypatch):
    """``shards(batch, size, **options)``: those of all ranks."""
    real = shared_memory.resolve
    monkeypatch.setattr(shared_memory, "resolve", lambda mesh, dim: mesh if isinstance(mesh, FakeRing) else real(mesh, dim))
    return lambda batch, size, **options: [shard_packed(batch, mesh=FakeRing(rank, size), **options) for rank in range(size)]


DOCUMENTS = packed_worker.documents_of(1, 3, 21, 1, 9, 6)


@pytest.mark.parametrize("kept", ["position_ids", "cu_seq_lens_q", "seq_idx", "all"])
def test_documents_of_a_batch_of_trl(kept):
    batch = trl_batch(DOCUMENTS)
    if kept != "all":
        batch = {"input_ids": batch["input_ids"], kept: batch[kept]}
    assert read_documents(batch).lengths == [3, 21, 1, 9, 6]


@pytest.mark.parametrize("left_out", ["position_ids", "attention_mask", None])
def test_documents_of_a_batch_of_axolotl(left_out):
    batch = axolotl_batch([DOCUMENTS[:2], DOCUMENTS[2:]])
    batch.pop(left_out, None)
    padding = [] if left_out != "attention_mask" else [8]  # without a mask padding is a document
    assert read_documents(batch).lengths == [3, 21, 1, 9, 6, *padding]


def test_rows_are_documents_where_nothing_else_is_said():
    ids = torch.arange(12).view(2, 6)
    assert read_documents({"input_ids": ids}).lengths == [6, 6]
    padded = read_documents({"input_ids": ids, "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])})
    assert padded.lengths == [4, 3]
    assert padded.offsets.tolist() == [0, 1, 2, 3, 0, 1, 2]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (dict(position_ids=torch.tensor([[0, 1, 2, 7, 8, 9]])), "2 is followed by 7"),
        (dict(position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), cu_seqlens=torch.tensor([0, 4, 6])), "different tokens"),
        (dict(cu_seqlens=torch.tensor([0, 4, 7])), "at most the 6 tokens"),
        (dict(cu_seqlens=torch.tensor([1, 6])), "ascend from 0"),
        (dict(cu_seqlens=torch.tensor([0, 6]), max_seqlen=5), "max_seqlen is 5"),
        (dict(seq_idx=torch.zeros(1, 5, dtype=torch.int32)), "seq_idx must be integers"),
        (dict(attention_mask=torch.ones(1, 1, 6, 6)), "attention_mask must be integers"),
        (dict(num_items_in_batch=3), "num_items_in_batch must be a tensor"),
        (dict(labels=torch.zeros(1, 5, dtype=torch.int64)), "labels must be a tensor"),
        (dict(position_ids=torch.zeros(3, 1, 6, dtype=torch.int64)), "position_ids must have the shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_batch_that_contradicts_itself_is_refused(wrong, text):
    with pytest.raises(ValueError, match=text):
        shard_packed({"input_ids": torch.arange(6)[None], **wrong}, mesh="local")
    with pytest.raises(ValueError, match="mapping with input_ids"):
        shard_packed({"labels": torch.zeros(1, 6)}, mesh="local")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_shards_hold_the_whole_batch_once(shards, size):
    batch = axolotl_batch([DOCUMENTS[:2], DOCUMENTS[2:]])
    batch["weights"] = torch.rand(2, 24, 3, 2)
    held = shards(batch, size, pad_to_multiple_of=3, layout="zigzag")
    assert {shard.input_ids.shape for shard in held} == {(1, 12 if size == 4 else 24 if size == 2 else 42)}
    joined = {name: torch.cat([getattr(shard, name)[0] for shard in held]) for name in ("input_ids", "labels", "position_ids")}
    first = held[0]
    for name, tensor in joined.items():
        if name != "labels":
            assert torch.equal(tensor[first.places], batch[name].flatten()[first.tokens])
    following = [token for document in DOCUMENTS for token in [*document[1:], -100]]
    assert joined["labels"][first.places].tolist() == following
    weights = torch.cat([shard.others["weights"][0] for shard in held])
    assert torch.equal(weights[first.places], batch["weights"].flatten(0, 1)[first.tokens])
    padding = torch.ones(len(weights), dtype=torch.bool).index_fill(0, first.places, False)
    segments = torch.cat([shard.segment_ids[0] for shard in held])
    assert bool((segments[padding] == -1).all()) and bool((segments[~padding] >= 0).all())
    assert bool((joined["labels"][padding] == -100).all())
    assert {shard.label_count for shard in held} == {40 - 5}
    total = sum(float(shard.loss_weights.sum()) for shard in held)
    assert total == pytest.approx(1)


def test_packed_batches_of_any_length_have_few(shards):
    met = set()
    for length in range(64, 128):
        batch = trl_batch(packed_worker.documents_of(1, length // 3, length - length // 3))
        held = shards(batch, 2, layout="zigzag")
        assert torch.equal(torch.cat([x.input_ids[0] for x in held])[held[0].places], batch["input_ids"][0])
        assert held[0].label_count == length - 2
        met.add(held[0].input_ids.shape[1])
    assert met == {32, 36, 40, 44, 48, 52, 56, 60, 64}
    assert shards(trl_batch(packed_worker.documents_of(1, 97)), 2, layout="zigzag", buckets=0)[0].input_ids.shape[1] == 50


def test_labels_that_are_given_are_masked_and_shifted(shards):
    batch = trl_batch(DOCUMENTS)
    batch["labels"][0, 4:10] = -100  # a prompt
    (shard,) = shards(batch, 1)
    flat = shard.labels[0][shard.places]
    assert flat[3:9].tolist() == [-100] * 6 and int(flat[9]) == int(batch["labels"][0, 10])
    assert shard.label_count == 40 - 5 - 6
    batch["shift_labels"] = torch.arange(40)[None]
    (shard,) = shards(batch, 1)
    assert shard.labels[0][shard.places].tolist() == list(range(40))


def test_unshard_gives_the_batch_back():
    batch = axolotl_batch([DOCUMENTS[:2], DOCUMENTS[2:]])
    shard = shard_packed(batch=batch, ring=Ring("local"))
    assert torch.equal(shard.unshard(shard.input_ids), batch["input_ids"])
    with pytest.raises(ValueError, match="unshard needs a tensor"):
        shard.unshard(torch.zeros(2, 40))


def test_a_batch_without_tokens_is_all_padding(shards):
    held = shards({"input_ids": torch.ones(1, 4, dtype=torch.int64), "attention_mask": torch.zeros(1, 4, dtype=torch.int64)}, 2)
    assert all(bool((shard.segment_ids == -1).all()) and shard.label_count == 0 for shard in held)
    assert all(float(shard.loss_weights.sum()) == 0 for shard in held)


def test_real_mixes_are_balanced_when_sharded(shards):
    lengths = mixes()["conversations"]
    ids = torch.ones(1, sum(lengths), dtype=torch.int64)
    ends = torch.cat([torch.zeros(1), torch.tensor(lengths).cumsum(0)]).int()
    work = [int((shard.offsets + 1).sum()) for shard in shards({"input_ids": ids, "cu_seqlens": ends}, 4)]
    assert max(work) / (sum(work) / 4) < 1.05


def test_shard_batch_understands_positions_that_restart():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])
    batch = shard_batch(torch.arange(6)[None], position_ids=positions, mesh="local")
    assert batch.segment_ids.tolist() == [[0, 0, 0, 1, 1, 2]]
    assert batch.labels.tolist() == [[1, 2, -100, 4, -100, -100]]
    assert shard_batch(torch.arange(6)[None], position_ids=torch.arange(3, 9), mesh="local").segment_ids.unique().tolist() == [0]


def tokens(length=12):
    return [torch.randn(length, heads, 8) for heads in (4, 2, 2)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(qkv_format="bshd", cu_seqlens_q=torch.tensor([0, 12])), 'qkv_format="thd"'),
        (dict(cu_seqlens_k=torch.tensor([0, 12])), "cu_seqlens_q=none"),
        (dict(cu_seqlens_q=torch.tensor([0, 12]), q_segment_ids=torch.zeros(12).int()), "instead of ids"),
        (dict(cu_seqlens_q=torch.tensor([0, 13])), "at most the 12 tokens"),
        (dict(cu_seqlens_q=torch.tensor([0, 8, 4])), "ascend"),
        (dict(cu_seqlens_q=torch.tensor([0, 8, 12]), max_seqlen_q=7), "max_seqlen_q=7"),
        (dict(cu_seqlens_q=torch.tensor([0.0, 12])), "tensor of ints"),
        (dict(cu_seqlens_q=torch.tensor([0, 12]), cu_seqlens_k=torch.tensor([0, 3, 12])), "one length"),
        (dict(bottom_right=True, q_position_ids=torch.arange(12), causal=True), "bottom_right says where"),
        (dict(bottom_right=True, q_position_ids=torch.arange(12), chunk_size=3), "bottom_right says where"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_packed_call_that_makes_no_sense_is_refused(options, text):
    q, k, v = tokens()
    options = dict(qkv_format="thd") | options
    if options["qkv_format"] == "bshd":
        q, k, v = q[None], k[None], v[None]
    with pytest.raises(ValueError, match=text):
        ring_attention(q, k, v, mesh="local", **options)


def test_thd_has_three_dimensions_and_formats_are_named():
    q, k, v = tokens()
    with pytest.raises(ValueError, match="3 dimensions"):
        ring_attention(q[None], k[None], v[None], mesh="local", qkv_format="thd")
    with pytest.raises(ValueError, match="bshd, bhsd, sbhd, thd"):
        ring_attention(q, k, v, mesh="local", qkv_format="htd")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_compiled_packed_attention():
    q, k, v = tokens()
    ends = torch.tensor([0, 5, 12])

    @torch.compile(fullgraph=True, backend="eager")
    def compiled(q, k, v, ends):
        return ring_attention(q, k, v, mesh="local", qkv_format="thd", cu_seqlens_q=ends, causal=True)

    torch.testing.assert_close(compiled(q, k, v, ends), of_documents(q, k, v, [0, 5, 12], causal=True)[0])


@pytest.mark.slow
@pytest.mark.parametrize("check", packed_worker.CHECKS)
def test_on_a_ring_of_one(check):
    packed_worker.CHECKS[check]("local", 0, 1)


@pytest.mark.slow
@pytest.mark.costly
def test_on_rings_of_two_and_four():
    out = torchrun("packed_worker.py", 4, timeout=280)
    assert out.count("ok ") == len(packed_worker.ON_FOUR) + len(packed_worker.ON_TWO), out
