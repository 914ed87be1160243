"""Shards, whole sequences, padding, positions and batches: properties in one process, and the real thing over four."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import torchrun

from jax_core.masks.layout import LAYOUTS, shard_indices, shard_multiple
from ring_attn import Ring, RingAttention
from ring_attn.sharding.sequence import pad, positions, shard, shard_batch, unshard
from torch_bridge.backends import shared_memory
from torch_bridge.call import sanity_checks

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class FakeRing:
    """A rank of a ring that needs no processes: everything but unshard sends nothing."""

    rank: int
    size: int

    @property
    def ranks_here(self) -> tuple[int, ...]:
        return (self.rank,)

    def split(self, tensor, dim):
        return tensor


@pytest.fixture(autouse=True)
def fake_rings(monkeypatch):
    real = shared_memory.resolve
    monkeypatch.setattr(shared_memory, "resolve", lambda mesh, dim: mesh if isinstance(mesh, FakeRing) else real(mesh, dim))


def on_every_rank(size, call):
    return [call(FakeRing(rank, size)) for rank in range(size)]


def shifted(labels, segments):
    """The rule for labels, one element at a time."""
    batch, length = labels.shape
    result = torch.full_like(labels, -100)
    for b in range(batch):
        for i in range(length - 1):
            if segments[b, i] == segments[b, i + 1] >= 0:
                result[b, i] = labels[b, i + 1]
    return result


def whole_of(parts, layout, dim=1):
    """The shards of all ranks in natural order, from the layout's list of indices."""
    size = len(parts)
    joined = torch.cat(parts, dim)
    order = [i for rank in range(size) for i in shard_indices(layout, rank, size, joined.shape[dim])]
    return joined.index_select(dim, torch.tensor(order, dtype=torch.int64).argsort())


@given(st.sampled_from(LAYOUTS), st.integers(1, 5), st.integers(0, 6), st.integers(-3, 2), st.booleans())
@settings(deadline=None, max_examples=60)
def test_shards_hold_the_positions_of_the_layout(layout, size, blocks, dim, as_bool):
    length = blocks * size * shard_multiple(layout)
    shape = [2, 3, 4]
    shape[dim] = length
    whole = torch.randn(shape) > 0 if as_bool else torch.randn(shape)
    # Hypothesis runs many examples under one fixture, which holds for all of them.
    for rank in range(size):
        indices = torch.tensor(shard_indices(layout, rank, size, length), dtype=torch.int64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_memory, "resolve", lambda mesh, _: mesh)
            own = shard(whole, FakeRing(rank, size), dim=dim, layout=layout)
        assert own.is_contiguous()
        assert torch.equal(own, whole.index_select(dim, indices))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradient_of_a_shard_lands_at_its_positions(layout):
    whole = torch.randn(2, 12, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, 3, dtype=torch.float64)
    for rank in range(3):
        shard(whole, FakeRing(rank, 3), layout=layout).mul(weight).sum().backward()
        expected = torch.zeros(2, 12, 3, dtype=torch.float64)
        expected[:, shard_indices(layout, rank, 3, 12)] = weight
        assert torch.equal(whole.grad, expected)
        whole.grad = None
    assert torch.autograd.gradcheck(lambda x: shard(x, FakeRing(1, 3), layout=layout), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ring_of_one_needs_no_processes(layout):
    whole = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.equal(shard(whole, layout=layout), whole)
    assert torch.equal(unshard(whole, layout=layout), whole)
    assert torch.equal(unshard(whole, "local", layout=layout, dim=-2, length=5), whole[:, :5])
    assert torch.autograd.gradcheck(lambda x: unshard(x, layout=layout, length=5), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [0, 1, 7, 8, 13, 16])
def test_pad_and_positions_agree(layout, length):
    ramp = torch.arange(length)[None]
    for size in (1, 2, 4):
        padded = pad(ramp, FakeRing(0, size), layout=layout, value=-7)
        assert padded.shape[1] % (size * shard_multiple(layout)) == 0
        assert padded.shape[1] - length < size * shard_multiple(layout)
        assert torch.equal(padded[:, :length], ramp)
        assert bool((padded[:, length:] == -7).all())
        everyone = torch.arange(padded.shape[1])[None]
        for ring in (FakeRing(rank, size) for rank in range(size)):
            own = positions(length, ring, layout=layout)
            assert own.dtype == torch.int64
            assert torch.equal(own, shard(everyone, ring, layout=layout)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_any_length_is_one_of_few(layout):
    met = set()
    for length in range(1, 300):
        ids = torch.arange(length)[None]
        parts = on_every_rank(2, lambda ring: Ring(ring, layout=layout).shard_batch(ids))  # noqa: B023
        ring = Ring(FakeRing(0, 2), layout=layout)
        (padded,) = {2 * part.input_ids.shape[1] for part in parts}
        assert padded == ring.pad(ids).shape[1] == 2 * ring.positions(length).shape[0]
        assert torch.equal(whole_of([part.input_ids for part in parts], layout)[:, :length], ids)
        assert parts[0].num_labels == length - 1 and parts[0].length == length
        met.add(padded)
    assert len(met) < 16 + 8 * 5


def test_pad_keeps_dtype_and_gradient_and_returns_what_fits():
    fits = torch.randn(2, 8, 3)
    assert pad(fits, FakeRing(0, 4)) is fits
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64):
        padded = pad(torch.ones(3, 5).to(dtype), FakeRing(0, 4), dim=-1, value=1)
        assert padded.dtype == dtype
        assert torch.equal(padded, torch.ones(3, 8).to(dtype))
    leaf = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: pad(x, FakeRing(0, 4), value=2.5), leaf)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 7, 16, 21])
@pytest.mark.parametrize("packed", [False, True])
def test_shard_batch_is_the_whole_batch_with_the_rule_for_labels(layout, length, packed):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(1, 99, (2, length), generator=generator)
    segments = torch.randint(0, 3, (2, length), generator=generator).sort(1).values if packed else None
    parts = on_every_rank(4, lambda ring: shard_batch(ids, segment_ids=segments, mesh=ring, layout=layout, pad_id=55))
    assert {part.length for part in parts} == {length}
    whole = [whole_of([part[field] for part in parts], layout) for field in range(4)]
    assert all(tensor.dtype == torch.int64 for tensor in whole)
    known_segments = torch.zeros_like(ids) if segments is None else segments
    assert torch.equal(whole[0][:, :length], ids)
    assert torch.equal(whole[1][:, :length], shifted(ids, known_segments))
    assert torch.equal(
        whole[2], torch.arange(whole[2].shape[1]).clamp_max(length - 1).expand(2, -1)
    )  # learned embeddings have these
    assert torch.equal(whole[3][:, :length], known_segments)
    for tensor, fill in zip((whole[0], whole[1], whole[3]), (55, -100, -1), strict=True):
        assert bool((tensor[:, length:] == fill).all())


def test_labels_are_shifted_as_transformers_shifts_them():
    # transformers' ForCausalLMLoss: nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    labels = torch.tensor([[5, -100, 7, 8, 9, 3, 2]])
    parts = on_every_rank(2, lambda ring: shard_batch(torch.ones_like(labels), labels, mesh=ring, layout="zigzag"))
    expected = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    assert torch.equal(whole_of([part.labels for part in parts], "zigzag")[:, :7], expected)


def test_given_labels_positions_and_attention_mask():
    ids = torch.arange(10, 17)[None].expand(2, -1).int()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])  # left and right padding
    own = torch.arange(2, 9)
    batch = shard_batch(ids, position_ids=own, attention_mask=mask, mesh="local")
    assert torch.equal(batch.segment_ids, mask - 1)
    assert torch.equal(batch.position_ids, own.expand(2, -1))
    nothing = -100
    assert batch.labels.tolist() == [
        [nothing, nothing, 13, 14, 15, 16, nothing],
        [11, 12, 13, 14, nothing, nothing, nothing],
    ]
    again = shard_batch(ids, batch.labels, attention_mask=mask.bool(), mesh="local", shift_labels=False)
    assert torch.equal(again.labels, batch.labels)
    other = shard_batch(ids, attention_mask=mask, mesh="local", ignore_index=-1)
    assert torch.equal(other.labels, batch.labels.masked_fill(batch.labels == -100, -1))


IDS = torch.ones(2, 6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: shard(IDS, FakeRing(0, 4)), "pad it to 8"),
        (lambda: shard(IDS, FakeRing(0, 2), layout="zigzag"), "divisible by 4, got 6"),
        (lambda: shard(IDS, "local", dim=2), "dim must be one of the 2 dims"),
        (lambda: shard(IDS, "local", dim=-3), "dim must be one of the 2 dims"),
        (lambda: shard(IDS, "local", layout="diagonal"), "layout must be one of"),
        (lambda: shard([[1, 2]], "local"), "torch.Tensor is needed, got list"),
        (lambda: unshard(IDS, "local", length=7), "length must lie between 0 and .* 6; got 7"),
        (lambda: unshard(IDS, "local", dim=5), "dim must be one of"),
        (lambda: unshard(IDS[:, :3], "local", layout="zigzag"), "divisible by 2, got 3"),
        (lambda: unshard(IDS, "local", layout="diagonal"), "layout must be one of"),
        (lambda: pad(IDS, "local", layout="diagonal"), "layout must be one of"),
        (lambda: pad(IDS, "local", dim=2), "dim must be one of"),
        (lambda: pad(IDS, "local", value=0.5), "value must be one that torch.int64 can hold"),
        (lambda: pad(IDS.to(torch.uint8), "local", value=-1), "value must be one that torch.uint8 can hold"),
        (lambda: pad(IDS.bool(), "local", value=2), "value must be one that torch.bool can hold"),
        (lambda: positions(-1, "local"), "must not be negative"),
        (lambda: positions(4, "local", layout="diagonal"), "layout must be one of"),
        (lambda: shard_batch(IDS[0], mesh="local"), r"input_ids must be \[batch, seq\]"),
        (lambda: shard_batch(IDS.float(), mesh="local"), "input_ids must hold integers"),
        (lambda: shard_batch(IDS.bool(), mesh="local"), "input_ids must hold integers"),
        (lambda: shard_batch(IDS, IDS[:, 1:], mesh="local"), "labels must have the shape of input_ids"),
        (lambda: shard_batch(IDS, IDS.float(), mesh="local"), "labels must hold integers"),
        (lambda: shard_batch(IDS, [[1]], mesh="local"), "labels must be a torch.Tensor"),
        (lambda: shard_batch(IDS, segment_ids=IDS[:1], mesh="local"), "segment_ids must have the shape"),
        (lambda: shard_batch(IDS, position_ids=IDS[0, 1:], mesh="local"), "position_ids must have the shape"),
        (lambda: shard_batch(IDS, attention_mask=-IDS, mesh="local"), "attention_mask must not be negative"),
        (lambda: shard_batch(IDS, attention_mask=IDS[:, None], mesh="local"), "attention_mask must have the shape"),
        (lambda: shard_batch(IDS, shift_labels=False, mesh="local"), "shifted already"),
        (lambda: shard_batch(IDS, mesh="local", layout="diagonal"), "layout must be one of"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def attend(x, **options):
    return Ring("local", layout="zigzag").attention(x, x, x, **options)


HIDING = {
    "causal": {"causal": True},
    "a window": {"sliding_window": (4, 0)},
    "segment ids": {"q_segment_ids": torch.tensor([0] * 7 + [-1]), "kv_segment_ids": torch.tensor([0] * 7 + [-1])},
    "a mask": {"mask": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()},
}


def test_padding_that_all_queries_see_is_refused():
    """A call that gets the padded shards themselves knows; what is computed of them is doubted, by its length."""
    ring = Ring("local", layout="zigzag")
    x = ring.shard(ring.pad(torch.randn(1, 7, 2, 8)))
    with pytest.raises(ValueError, match="the key was padded from 7 positions, which all queries see here: give q_segment_ids"):
        attend(x)
    sanity_checks.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="a sequence of 7 positions was padded to 8; if these are its keys, the padding all"):
        attend(x * 2)
    for options in HIDING.values():
        attend(x, **options)
    ring.pad(torch.randn(1, 8, 2, 8))
    attend(x * 2)  # the last one of this length fitted


def test_the_padding_of_a_batch_is_known_to_the_model():
    module = RingAttention(16, 2, batch_first=True, mesh="local")
    ids = torch.ones(1, 7, dtype=torch.int64)
    batch = Ring("local", layout="zigzag").shard_batch(ids)
    x = torch.randn(1, 8, 16)
    module(x, x, x, q_segment_ids=batch.segment_ids)
    sanity_checks.warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="a sequence of 7 positions was padded to 8"):
        module(x, x, x)


@pytest.mark.slow
def test_importing_loads_no_jax():
    code = "import sys, ring_attn.sharding.sequence, ring_attn.module; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=_environment(), timeout=120)


@pytest.mark.slow
def test_over_four_processes():
    printed = torchrun("sequence_worker.py", 4, PYTHONWARNINGS="default")
    assert printed.count("sequence worker: all right") == 4, printed


def _environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
