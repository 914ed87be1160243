"""``context_parallel(loss_chunk=)``: a loss of few tokens' logits at a time, in models of many kinds, against the model's own."""

from typing import Any

import pytest
import tiny_transformers as tiny
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ring_attn import chunked_cross_entropy
from ring_attn.integrations.transformers import context_parallel

CHUNK = 5
# What a head may do with hidden states: nothing more, a cap, a scale, a bias of its own; a tied one; routers' loss; other parts.
MODELS = {
    **{name: tiny.CAUSAL[name] for name in ("llama", "llama 4", "mixtral", "gemma 2", "cohere 2", "phi")},
    "gpt2": tiny.gpt2,
    "llava": tiny.llava,
    "gemma3 with images": tiny.gemma3_with_images,
    "bart": tiny.seq2seq("BartForConditionalGeneration", "Bart"),
}


def made(name: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, context_parallel(model, "local", buckets=0, **options)


def stepped(name: str, batch: dict[str, Tensor], **options: Any) -> tuple[Any, Tensor, list[Tensor]]:
    model, cp = made(name, **options)
    outputs = model(**cp.shard(batch))
    outputs.loss.backward()
    return outputs, outputs.loss.detach(), [x.grad for x in model.parameters() if x.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_loss_in_chunks_is_that_of_all_logits(name):
    batch = tiny.batch()
    _, loss, gradients = stepped(name, batch)
    outputs, own_loss, own = stepped(name, batch, loss_chunk=CHUNK)
    assert outputs.logits is None
    torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own, gradients, rtol=1e-4, atol=1e-6)


class Largest(TorchDispatchMode):
    """The most numbers of a tensor whose last dimension is the vocabulary, beside the head's weights and their gradients."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.numel, self.weights = 0, weights

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.ndim and x.shape[-1] == tiny.VOCABULARY and x.numel() != self.weights:
                self.numel = max(self.numel, x.numel())
        return out


def test_logits_never_exist_as_a_whole():
    model, cp = made("llama", loss_chunk=CHUNK)
    with Largest(model.lm_head.weight.numel()) as seen:
        model(**cp.shard(tiny.batch())).loss.backward()
    assert 0 < seen.numel <= CHUNK * tiny.VOCABULARY


def test_of_the_base_models_outputs():
    """``cp.loss`` makes the logits in chunks; so does the plain function of the head."""
    _, loss, gradients = stepped("llama", tiny.batch())

    def plainly(model: Any, cp: Any, outputs: Any, batch: Any) -> Tensor:
        items = batch["num_items_in_batch"]
        return chunked_cross_entropy(model.lm_head, outputs.last_hidden_state, batch["labels"], num_items=items, chunk_size=CHUNK)

    for loss_of in (lambda model, cp, *given: cp.loss(*given), plainly):
        model, cp = made("llama")
        batch = cp.shard(tiny.batch())
        own = loss_of(model, cp, model.model(**batch), batch)
        own.backward()
        torch.testing.assert_close(own.detach(), loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close([x.grad for x in model.parameters()], gradients, rtol=1e-4, atol=1e-6)


def test_evaluation_and_no_labels():
    model, cp = made("llama", loss_chunk=CHUNK)
    batch = cp.shard(tiny.batch())
    with torch.no_grad():
        loss = model(**batch).loss
    torch.testing.assert_close(loss, stepped("llama", tiny.batch())[1], rtol=1e-5, atol=1e-6)
    without = {name: x for name, x in batch.items() if name not in ("labels", "shift_labels")}
    assert model(**without).logits.shape[1] == batch["input_ids"].shape[1]
    assert model.generate(tiny.tokens(4), max_new_tokens=2, do_sample=False).shape == (2, 6)


def test_what_cannot_be_made_in_chunks_is_refused():
    with pytest.raises(ValueError, match="loss_chunk must be a positive int"):
        made("llama", loss_chunk=0)
    torch.manual_seed(0)
    with pytest.raises(NotImplementedError, match="no base model and a head"):
        context_parallel(tiny.t5(), "local", loss_chunk=CHUNK)

    class Neighbours(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + x.mean(dim=1, keepdim=True))

    for rows in (1, 2):
        model, cp = made("llama", loss_chunk=CHUNK)
        model.lm_head = Neighbours(model.config.hidden_size, tiny.VOCABULARY)
        with pytest.raises(NotImplementedError, match="more than their tokens' hidden states"):
            model(**cp.shard({name: x[:rows] for name, x in tiny.batch().items()}))


def test_a_head_with_dropout_is_none_that_sees_its_neighbours():
    model, cp = made("llama", loss_chunk=CHUNK)
    model.lm_head = nn.Sequential(nn.Dropout(0.5), nn.Linear(model.config.hidden_size, tiny.VOCABULARY))
    model.train()
    model(**cp.shard(tiny.batch())).loss.backward()
    assert model.lm_head[0].training
