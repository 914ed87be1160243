"""The loss over a ring and the sum of its gradients: in one process, and the real thing over two."""

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from launch import torchrun
from torch import nn

from ring_attn import (
    DoubtWarning,
    Ring,
    causal_conv1d,
    cross_entropy,
    ring_attention,
    shard_batch,
    shard_packed,
    sync_gradients,
    total_loss,
)
from ring_attn.training import batches, gradients, loss, token_losses
from torch_bridge.call.sanity_checks import warn_once

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
LOGITS = torch.randn(1, 8, 11, generator=torch.Generator().manual_seed(0))


def test_one_process_gets_the_ordinary_mean():
    batch = shard_batch(IDS, mesh="local")
    assert batch.num_labels.item() == 7
    expected = nn.functional.cross_entropy(LOGITS.flatten(0, 1), batch.labels.flatten())
    for labels in (batch, batch.labels, batch.labels.int()):
        torch.testing.assert_close(cross_entropy(LOGITS, labels, mesh="local"), expected)
    assert total_loss(expected.requires_grad_(), "local").requires_grad is False
    losses = cross_entropy(LOGITS, batch, reduction="none")
    assert losses.shape == IDS.shape
    torch.testing.assert_close(losses.sum() / 7, expected)


def test_what_is_counted_already_needs_no_other_rank():
    batch = shard_batch(IDS, mesh="local")
    torch.testing.assert_close(cross_entropy(logits=LOGITS, batch=batch), cross_entropy(LOGITS, batch))
    assert loss.where_counted(LOGITS, batch) is None and loss.where_counted(LOGITS, batch=batch) is None
    assert loss.where_counted(LOGITS, batch.labels) is not None


def test_only_losses_with_a_gradient_belong_to_a_step():
    """Evaluation does not; ranks compare what they sum gradients of."""
    ring = SimpleNamespace(ranks=(0, 1), size=2, rank=0)
    labels = IDS.clone()
    labels.ring_attn_whole = ring.ranks, torch.tensor([3, 5])  # as shard_batch marks it
    logits = LOGITS.clone().requires_grad_()
    with torch.no_grad():
        cross_entropy(logits, labels, mesh="local")
    cross_entropy(LOGITS, labels, mesh="local")
    assert not batches.taken(ring, logits.device).any()
    cross_entropy(logits, labels, mesh="local")
    assert batches.taken(ring, logits.device).tolist() == [[1, 3 * 1 + 5 * 2], [0, 0]]


def test_a_packed_batch_knows_its_count():
    shard = shard_packed({"input_ids": IDS, "cu_seqlens": torch.tensor([0, 3, 8])}, mesh="local")
    losses = cross_entropy(LOGITS, shard, reduction="none")
    torch.testing.assert_close(cross_entropy(LOGITS, shard), losses.sum() / 6)
    torch.testing.assert_close(cross_entropy(LOGITS, shard), (losses * shard.loss_weights).sum())
    weights = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1))
    counted = weights.masked_fill(shard.labels == -100, 0)
    mean = cross_entropy(LOGITS, shard, weights=weights, mesh="local")
    torch.testing.assert_close(mean, (losses * weights).sum() / counted.sum())


def test_num_labels_counts_what_the_loss_counts():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    segments = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
    batch = shard_batch(IDS, attention_mask=mask, segment_ids=segments, mesh="local", ignore_index=-1)
    assert batch.num_labels.item() == (batch.labels != -1).sum().item() == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    batch, half = shard_batch(IDS, mesh="local"), LOGITS.to(dtype).requires_grad_()
    loss = cross_entropy(half, batch)
    torch.testing.assert_close(loss, cross_entropy(half.detach().float(), batch))
    loss.backward()
    assert half.grad.dtype == dtype


def test_no_labels_give_zero():
    batch, logits = shard_batch(IDS, IDS * 0 - 100, mesh="local"), LOGITS.clone().requires_grad_()
    for items in (None, 0, torch.tensor(0)):
        loss = cross_entropy(logits, batch, num_items=items)
        loss.backward()
        assert loss.item() == 0 and not logits.grad.any()


LABELS = IDS % 11


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cross_entropy(LOGITS, LABELS[:, :4]), r"logits \[1, 8, 11\] torch.float32 and labels \[1, 4\]"),
        (lambda: cross_entropy(LOGITS[..., 0], LABELS), "the labels' shape and the vocabulary"),
        (lambda: cross_entropy(LOGITS.long(), LABELS), "logits must be floats"),
        (lambda: cross_entropy(LOGITS, LABELS.float()), "labels must hold integers"),
        (lambda: cross_entropy(LOGITS, [[1]]), "got Tensor and list"),
        (lambda: cross_entropy(LOGITS, LABELS, weights=LABELS), "weights must be floats"),
        (lambda: cross_entropy(LOGITS, LABELS, weights=torch.ones(1, 8, requires_grad=True)), "weights are data"),
        (lambda: cross_entropy(LOGITS, LABELS, reduction="average"), "reduction must be one of mean, sum, none"),
        (lambda: cross_entropy(LOGITS, LABELS, reduction="sum", num_items=3), "num_items is what the sum is divided by"),
        (lambda: cross_entropy(LOGITS, LABELS, num_items=-1), "must not be negative"),
        (lambda: cross_entropy(LOGITS, LABELS, num_items=torch.ones(2)), "one number, got a tensor of shape"),
        (lambda: cross_entropy(LOGITS, LABELS, ring=Ring("local"), mesh="local"), "give either ring"),
        (lambda: total_loss(1.0), "loss must be a torch.Tensor, got float"),
        (lambda: sync_gradients(["weight"], "local"), "a module or its parameters, got str"),
        (lambda: sync_gradients([], "nowhere"), "mesh must be a DeviceMesh"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_ring_of_one_keeps_its_gradients():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    sync_gradients([parameter], "local")
    assert parameter.grad.tolist() == [3.0, 3.0]


@pytest.mark.slow
def test_over_two_processes():
    printed = torchrun("loss_worker.py", 2)
    assert printed.count("loss worker: all right") == 2, printed


def ordinary(logits, labels, **options):
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten().long(), reduction="none", **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"ignore_index": 3}, {"label_smoothing": 0.1}], ids=str)
@pytest.mark.parametrize("at_once", [11, 35, 3 * 11])
def test_large_logits_have_the_ordinary_losses_and_gradients_to_the_bit(dtype, options, at_once, monkeypatch):
    """In chunks of one token, of three, and of three with a rest."""
    monkeypatch.setattr(token_losses, "_AT_ONCE", at_once)
    batch = shard_batch(IDS, mesh="local", ignore_index=options.get("ignore_index", -100))
    logits = LOGITS.to(dtype)
    weights = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(2))
    results = []
    for losses in (
        lambda x: cross_entropy(x, batch.labels, reduction="none", **options),
        lambda x: ordinary(x, batch.labels, **options),
    ):
        leaf = logits.clone().requires_grad_()
        found = losses(leaf).view(IDS.shape)
        (found * weights).sum().backward()
        results.append((found.detach(), leaf.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert results[0][1].dtype == dtype and results[0][1].any()


def test_large_logits_are_not_kept_in_float32(monkeypatch):
    monkeypatch.setattr(token_losses, "_AT_ONCE", 11)
    kept = []
    logits = LOGITS.bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        loss = cross_entropy(logits, shard_batch(IDS, mesh="local"))
    assert all(x.dtype != torch.float32 or x.numel() <= IDS.numel() for x in kept)
    assert len(kept) > 1
    loss.backward()


def test_large_logits_can_be_differentiated_twice(monkeypatch):
    batch, second = shard_batch(IDS, mesh="local"), []
    for at_once in (11, 2**25):
        monkeypatch.setattr(token_losses, "_AT_ONCE", at_once)
        leaf = LOGITS.bfloat16().requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(leaf, batch), leaf, create_graph=True)
        second.append(torch.autograd.grad(gradient.float().square().sum(), leaf)[0])
    assert torch.equal(*second) and second[0].any()


def test_transforms_and_compilers_see_large_logits_operators(monkeypatch):
    monkeypatch.setattr(token_losses, "_AT_ONCE", 11)
    batch, logits = shard_batch(IDS, mesh="local"), LOGITS.bfloat16()
    expected = torch.autograd.grad(cross_entropy(leaf := logits.clone().requires_grad_(), batch), leaf)[0]
    torch.testing.assert_close(torch.func.grad(lambda x: cross_entropy(x, batch))(logits), expected)
    compiled = torch.compile(lambda x: cross_entropy(x, batch), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits), cross_entropy(logits, batch))


@pytest.mark.parametrize("shape", [(), (0, 3), (1, 50), (7, 3), (40, 2, 5)], ids=str)
def test_the_shape_of_a_gradient_alone_says_where_it_is_cut(shape, monkeypatch):
    """Ranks may have it in other strides, and must send the same pieces."""
    monkeypatch.setattr(gradients, "_BUCKET", 64)
    contiguous = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    strided = contiguous.mT.contiguous().mT if len(shape) > 1 else contiguous
    pieces, others = gradients._pieces(contiguous), gradients._pieces(strided)
    assert [x.shape for x in pieces] == [x.shape for x in others]
    assert torch.equal(torch.cat([x.reshape(-1) for x in pieces]), contiguous.reshape(-1))
    assert all(x.nbytes <= 64 or x.shape[0] == 1 for x in pieces if x.dim())
    for piece in others:
        piece.zero_()
    assert not strided.any()  # they are views


@pytest.fixture
def warned() -> Callable[[Callable[[], object]], list[str]]:
    """What a call is warned of, whatever was said before."""

    def of(call: Callable[[], object]) -> list[str]:
        warn_once.cache_clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            call()
        return [str(each.message) for each in seen if each.category is DoubtWarning]

    return of


@pytest.mark.slow
def test_documents_that_no_attention_was_told_of_are_doubted(warned):
    positions, mask = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), torch.ones(8, 8, dtype=torch.bool)
    x = torch.randn(1, 8, 2, 4, generator=torch.Generator().manual_seed(0))

    def step(batch, attended=True, **told):
        if attended:
            ring_attention(x, x, x, mesh="local", causal=True, **told)
        cross_entropy(LOGITS, batch)

    packed = shard_packed({"input_ids": IDS, "cu_seqlens": torch.tensor([0, 3, 8])}, mesh="local")
    for batch in (shard_batch(IDS, position_ids=positions, mesh="local"), packed):
        (warning,) = warned(lambda batch=batch: step(batch))
        assert "several documents in a row, and no attention since the last loss was told" in warning
        for told in ({"q_segment_ids": batch.segment_ids}, {"mask": mask}, {"mask_mod": lambda batch, head, q, k: q >= k}):
            assert warned(lambda batch=batch, told=told: step(batch, **told)) == []
        layer = partial(causal_conv1d, x[..., 0], torch.ones(2, 2), mesh="local", segment_ids=batch.segment_ids)
        (warning,) = warned(lambda batch=batch, layer=layer: (layer(), step(batch)))  # another kind of call was told
        assert "and no attention since" in warning
        assert warned(lambda batch=batch: step(batch, attended=False)) == []  # it was compiled, or is none of the library's
    assert warned(lambda: step(shard_batch(IDS, position_ids=torch.arange(8)[None], mesh="local"))) == []
    assert warned(lambda: step(shard_batch(IDS, segment_ids=torch.zeros_like(IDS), mesh="local"))) == []
