"""A model's own head by itself: what its forward does with the base model's result, a few tokens at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd

from ring_attn.integrations.transformers.model.plan import Plan
from ring_attn.integrations.transformers.versions import ModelOutput, pretrained_in
from ring_attn.training.chunked_loss import check_chunk_size

FIRST = 2  # tokens of which the model's forward makes logits: one sees another if a head looks at more than one
_NEAR = 0.02  # of the largest logit: other shapes of a product may round otherwise in 16 bits

Outputs: TypeAlias = ModelOutput | tuple[Tensor, ...]  # of a model, as its user asks for them


class Head:
    """From hidden states ``[tokens, hidden]`` to logits ``[tokens, vocabulary]``, whatever the model does between them (Gemma 2
    caps its logits, Granite and Cohere scale them): its forward runs, with the hidden states in the place of the base model's."""

    def __init__(self, plan: Plan, chunk: int) -> None:
        """``chunk``: of how many tokens logits are made at a time. NotImplementedError for a model that holds no base model beside
        its head."""
        check_chunk_size(chunk, "loss_chunk")
        self._model, self.chunk = plan.model, chunk
        children = {name: pretrained_in(child) for name, child in plan.model.named_children()}
        self._name = next((name for name, child in children.items() if child is plan.base), "")
        if plan.head is None or not self._name:
            raise NotImplementedError(
                f"the logits of {type(plan.model).__name__} cannot be made a few tokens at a time: it is no base model and a head "
                "on its hidden states; leave loss_chunk out"
            )
        self._tried = False

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that a head may use: all outside of the base model, and the embedding that it shares with it."""
        inside = set(getattr(self._model, self._name).parameters())
        shared = self._model.get_output_embeddings()
        outside = [x for x in self._model.parameters() if x not in inside]
        tied = [] if shared is None else [x for x in shared.parameters() if x in inside]
        return [*outside, *tied]

    def __call__(self, hidden: Tensor) -> Tensor:
        with self._replaced_base(hidden[None]):
            outputs = self._model.forward(inputs_embeds=hidden[None])
        logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs.logits
        return logits[0]

    def check(self, hidden: Tensor, logits: Tensor) -> None:
        """Once, against what the model's forward made of the first ``FIRST`` of these hidden states ``[batch, seq, hidden]``."""
        if self._tried:
            return
        first = hidden[0, :FIRST]
        with torch.no_grad(), self._without_dropout() as dropped:
            usual = (self(first) if dropped else logits.detach()[0]).float()
            alone = torch.cat([self(token) for token in first.split(1)]).float()
        if alone.shape != usual.shape or bool((alone - usual).abs().max() > _NEAR * usual.abs().max()):
            raise NotImplementedError(
                f"the logits of {type(self._model).__name__} cannot be made a few tokens at a time: they depend on more than their "
                "tokens' hidden states; leave loss_chunk out"
            )
        self._tried = True

    @contextmanager
    def _without_dropout(self) -> Iterator[bool]:
        """Outside of the base model; whether there was any, by which the same tokens have other logits each time."""
        inside = set(getattr(self._model, self._name).modules())
        dropouts = [x for x in self._model.modules() if x not in inside and isinstance(x, _DropoutNd) and x.training and x.p]
        for x in dropouts:
            x.eval()
        try:
            yield bool(dropouts)
        finally:
            for x in dropouts:
                x.train()

    @contextmanager
    def _replaced_base(self, hidden: Tensor) -> Iterator[None]:
        base = self._model._modules[self._name]
        self._model._modules[self._name] = _StandIn(base, hidden)
        try:
            yield
        finally:
            self._model._modules[self._name] = base


class _StandIn(nn.Module):
    """In the place of a base model: its result is there."""

    def __init__(self, base: nn.Module | None, hidden: Tensor) -> None:
        super().__init__()
        object.__setattr__(self, "_base", base)
        self._hidden = hidden

    def forward(self, *_: object, **__: object) -> "_Result":
        return _Result(last_hidden_state=self._hidden)

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_base"], name)


@dataclass
class _Result(ModelOutput):
    """A base model's, of which all but the hidden states is None, whatever it is called."""

    last_hidden_state: Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Context(FunctionCtx):
    rest: int


class _Cut(torch.autograd.Function):
    """Hidden states ``[batch, seq, hidden]``, and those of the first tokens, of one node: what waits for the backward of either, as
    FSDP does to gather parameters, is called before it goes on, though no gradient comes by the first tokens."""

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.rest = max(0, hidden.shape[1] - FIRST)
        return hidden.view_as(hidden), hidden[:, :FIRST].clone()

    @staticmethod
    def backward(ctx: _Context, of_all: Tensor | None, of_first: Tensor | None) -> Tensor | None:
        if of_first is None:  # as ever: their logits are not among the outputs
            return of_all
        padded = functional.pad(of_first, (0, 0, 0, ctx.rest))
        return padded if of_all is None else of_all + padded


def first_tokens(output: Outputs) -> tuple[Outputs, Tensor]:
    """A base model's result with the hidden states of the first tokens alone, of which the head is then made; and all of them."""
    hidden, first = _Cut.apply(output[0])
    if isinstance(output, tuple):
        return (first, *output[1:]), hidden
    return type(output)(**{**output, "last_hidden_state": first}), hidden
