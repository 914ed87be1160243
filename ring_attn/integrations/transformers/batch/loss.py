"""The loss over the ring, and the auxiliary loss of routers, whose means are over all tokens."""

from typing import NamedTuple

from torch import Tensor

from ring_attn.integrations.transformers.batch.head import Head, Outputs
from ring_attn.integrations.transformers.calls import Items, Sharded
from ring_attn.integrations.transformers.model.plan import Plan
from ring_attn.integrations.transformers.versions import load_balancing_loss
from ring_attn.ring import Ring
from ring_attn.training.chunked_loss import chunked_loss
from ring_attn.training.loss import cross_entropy, total_loss


class InChunks(NamedTuple):
    """Hidden states of which no logits are there: those of few tokens at a time are made by ``head``."""

    head: Head
    hidden: Tensor


def loss_of(
    plan: Plan,
    ring: Ring,
    outputs: Outputs | Tensor,
    labels: Tensor,
    sharded: Sharded,
    items: Items,
    chunks: InChunks | None = None,
) -> Tensor:
    """The loss of the whole ring, divided by ``items``, with the gradient of this rank's share of it."""
    if chunks is None:
        share = cross_entropy(logits_of(outputs), labels, ring=ring, num_items=items)
    else:
        head, hidden = chunks
        share = chunked_loss(head, head.parameters, hidden, labels, head.chunk, ring=ring, num_items=items)
    routers = getattr(outputs, "router_logits", None)
    if routers is not None:
        share = share + _balance(plan, routers, sharded) / ring.size
    return share + (total_loss(share, ring=ring) - share.detach())


def _balance(plan: Plan, routers: tuple[Tensor, ...], sharded: Sharded) -> Tensor:
    """The model's own auxiliary loss, of the router logits of the whole sequence: it is a product of means."""
    balance, model = load_balancing_loss(plan.model), plan.model
    coefficient = getattr(model, "router_aux_loss_coef", None)
    if balance is None or coefficient is None:
        raise NotImplementedError(
            f"output_router_logits: how {type(model).__name__} makes a loss of its router logits is not known, and over a ring it "
            "must be made of all ranks' tokens; leave it out"
        )
    sequence = sharded.sequences["decoder"]
    mask = None if sequence.hidden is None else ~sequence.hidden[:, : sequence.length]

    def whole(logits: Tensor) -> Tensor:
        split = logits.view(sequence.batch, sequence.local, -1)
        return sequence.ring.unshard(split, length=sequence.length).flatten(0, 1)

    gathered = tuple(whole(logits) for logits in routers)
    return coefficient * balance(gathered, model.num_experts, model.num_experts_per_tok, mask)


def logits_of(outputs: Outputs | Tensor) -> Tensor:
    """Of a model's outputs, or logits themselves."""
    logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs[0] if isinstance(outputs, tuple) else outputs.logits
    return logits


def with_loss(outputs: Outputs, loss: Tensor, logits: bool) -> Outputs:
    """The outputs with this loss, in the place where transformers has it; without the routers' loss of this rank's tokens, and,
    where there are none of all tokens, without logits."""
    if isinstance(outputs, tuple):
        return (loss, *outputs[0 if logits else 1 :])
    without = {"aux_loss": None} if "aux_loss" in outputs else {}
    without |= {} if logits else {"logits": None}
    return type(outputs)(**{**outputs, **without, "loss": loss})


def without_logits(outputs: Outputs) -> Outputs:
    """The outputs of a model with a head, without their logits."""
    return outputs[1:] if isinstance(outputs, tuple) else type(outputs)(**{**outputs, "logits": None})
