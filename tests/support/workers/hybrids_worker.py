"""One rank of the tests of transformers' hybrid models, run by tests/integrations/test_hybrids.py under torch.distributed.run.

Loss, logits and every gradient of the sharded model must be those of the model in one process, of packed rows those of the
documents one by one, which transformers joins without fla. Another first document must not move the others by a bit.
"""

import copy
import sys
import time
import traceback
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import tiny_hybrids
import tiny_transformers as tiny
import torch
import torch.distributed as dist
import transformers
from effort import ALL, of_the_day
from state_torch import stepwise, stepwise_ssd
from torch import Tensor
from transformers_worker import TOLERANCE, flash, gradients

from ring_attn.integrations.accelerate import RingParallelism
from ring_attn.integrations.transformers import context_parallel

DOCUMENTS = (10, 5, 12)
BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "plain": tiny.batch,
    "left": lambda: tiny.batch("left"),
    "right": lambda: tiny.batch("right"),
    "packed": lambda: tiny.packed(*DOCUMENTS),
    "packed, all said": flash,  # documents by seq_idx and cu_seq_lens_q, too, which some layers would take themselves
}
LAYOUTS = ("zigzag", "contiguous")
ON_FOUR = ("qwen 3 next", "bamba")
# A rank's tokens by operators of torch's, as by fla's and mamba_ssm's: one family of each operator.
BY_OPERATORS = ("qwen 3.5", "kimi linear", "granite 4")
OPERATORS = {"gated_delta_rule": stepwise, "kda": stepwise, "ssd": stepwise_ssd}


class Case(NamedTuple):
    family: str
    kind: str
    layout: str
    by: str = "plain JAX"

    def __str__(self) -> str:
        return ", ".join(self)


def cases(size: int) -> list[Case]:
    """All; or of each day one family in six, on a ring of four one of its two, with one of its batches in one layout."""
    families = list(tiny_hybrids.ON_RINGS) if size == 2 else list(ON_FOUR)
    every = [Case(*x) for x in product(families, BATCHES, LAYOUTS)]
    every += [Case(*x) for x in product(BY_OPERATORS, BATCHES, LAYOUTS, ["operators"]) if size == 2]
    return every if ALL else [case for case in every if _is_todays(case, size)]


def _is_todays(case: Case, size: int) -> bool:
    parts = 6 if size == 2 else len(ON_FOUR)
    others = [f"{kind}, {layout}" for kind, layout in product(BATCHES, LAYOUTS)]
    todays = others[of_the_day(f"{case.family} {size} {case.by}", len(others))]
    number = [*tiny_hybrids.ON_RINGS].index(case.family) if size == 2 else ON_FOUR.index(case.family)
    return number % parts == of_the_day(f"family {size} {case.by}", parts) and todays == f"{case.kind}, {case.layout}"


def expected_of(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Loss and logits in one process, and the gradients of the parameters."""
    if "position_ids" not in batch:
        outputs = model(**batch, use_cache=False)
        outputs.loss.backward()
        return outputs.loss.detach(), outputs.logits.detach()
    labels = int((batch["labels"] != -100).sum())
    loss, logits = torch.zeros(()), []
    for ids in batch["input_ids"].split(DOCUMENTS, 1):
        outputs = model(input_ids=ids, labels=ids, use_cache=False)
        share = outputs.loss * (ids.shape[1] - 1) / labels
        share.backward()
        loss += share.detach()
        logits.append(outputs.logits.detach())
    return loss, torch.cat(logits, 1)


def compare(case: Case, model: Any) -> str:
    reference, batch = copy.deepcopy(model), BATCHES[case.kind]()
    loss, logits = expected_of(reference, batch)
    cp = context_parallel(model, layout=case.layout, operators=OPERATORS if case.by == "operators" else None)
    sharded = cp.shard(batch)
    outputs = model(**sharded)
    outputs.loss.backward()
    cp.reduce_gradients()
    found = cp.unshard(outputs.logits.detach(), sharded)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    wrong = {
        "loss": (outputs.loss.detach() - loss).abs().item(),
        "logits": (found - logits)[real].abs().max().item() / max(1.0, logits.abs().max().item()),
        **gradients(str(case), model, reference),
    }
    check_again(case, model, cp, sharded)
    if "position_ids" in batch:
        check_documents(case, model, cp, batch, found)
    cp.remove()
    worst = max(wrong, key=wrong.__getitem__)
    assert all(x < TOLERANCE for x in wrong.values()), f"{case}: {worst} is {wrong[worst]} off"
    return f"{wrong[worst]:.1e} ({worst})"


def check_again(case: Case, model: Any, cp: Any, sharded: dict[str, Any]) -> None:
    """Layers that are run again in the backward, with all they send, give the same bits."""
    before = [x.grad for x in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": case.layout == "contiguous"})
    model(**sharded).loss.backward()
    cp.reduce_gradients()
    model.gradient_checkpointing_disable()
    for (name, parameter), first in zip(model.named_parameters(), before, strict=True):
        assert (parameter.grad is None) == (first is None) and (first is None or torch.equal(parameter.grad, first)), name


@torch.no_grad()
def check_documents(case: Case, model: Any, cp: Any, batch: dict[str, Tensor], logits: Tensor) -> None:
    first = torch.arange(sum(DOCUMENTS)) < DOCUMENTS[0]
    ids = torch.where(first, batch["input_ids"].flip(1), batch["input_ids"])
    sharded = cp.shard({**batch, "input_ids": ids})
    moved = (cp.unshard(model(**sharded).logits, sharded) != logits).any(-1)[0]
    experts = any(hasattr(model.config, name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    assert moved[first].all() and (experts or not moved[~first].any()), f"{case}: documents see each other"


def check_ring_parallelism() -> None:
    """accelerate's and the Trainer's way: every rank calls the model with the whole batch."""
    torch.manual_seed(0)
    model, batch = tiny_hybrids.FAMILIES["lfm2"]().train(), tiny.batch("left")
    expected = model(**batch, use_cache=False).loss
    RingParallelism(model).build_device_mesh("cpu")
    assert (model(**batch).loss - expected).abs() < TOLERANCE


def main() -> None:
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    failed = []
    size, chosen = dist.get_world_size(), sys.argv[1:]
    for case in cases(size):
        if chosen and case.family not in chosen:
            continue
        begun = time.monotonic()
        try:
            torch.manual_seed(0)
            words = compare(case, tiny_hybrids.ON_RINGS[case.family]().train())
        except Exception:
            failed.append(f"{case}\n{traceback.format_exc()}")
            words = "FAILED"
        if dist.get_rank() == 0:
            print(f"{case}: {words}, {time.monotonic() - begun:.1f} s", flush=True)
    if size == 2 and not chosen:
        check_ring_parallelism()
    dist.barrier()
    dist.destroy_process_group()
    assert not failed, "\n".join(failed)


if __name__ == "__main__":
    main()
