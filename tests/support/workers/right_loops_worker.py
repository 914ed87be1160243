"""Loops that are right, on two rings of two beside each other: each must be told nothing, neither by an error nor by a warning.

Run by tests/ring_attn/test_right_loops.py (a model of one's own) and tests/integrations/test_mistakes.py (``llama``).
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from decoder import VOCABULARY, decoder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import kl_div, logsigmoid
from torch.nn.parallel import DistributedDataParallel

import ring_attn
from ring_attn import Ring, cross_entropy, sync_gradients, total_loss
from tests.support.healthy import gloo_world

STEPS = 2
NAME = "llama" if "llama" in sys.argv else "own model"


class Own:
    """A model that calls ``ring.attention``; the loss is a share of that of the ring."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.ring = mesh, Ring(mesh, mesh_dim="cp", layout="zigzag")
        self.model: Any = decoder(self.ring).float()
        self.embedding: nn.Embedding = self.model.tokens
        self.layer: nn.Module = self.model.blocks["0"]
        self.columns: tuple[str, ...] = ("attention.q", "attention.k", "attention.v", "up")
        self.rows: tuple[str, ...] = ("attention.out", "down")

    def shard(self, ids: Tensor) -> Any:
        return self.ring.shard_batch(ids)

    def logits(self, batch: Any) -> Tensor:
        return self.model(batch.input_ids)

    def labels(self, batch: Any) -> Tensor:
        return batch.labels

    def loss(self, batch: Any, items: Any = None) -> Tensor:
        return cross_entropy(self.logits(batch), batch, num_items=items)

    def items(self, batch: Any) -> Tensor:
        return batch.num_labels

    def sum(self) -> None:
        sync_gradients(self.model, ring=self.ring)

    def close(self) -> None:
        pass


class Llama(Own):
    def __init__(self, mesh: DeviceMesh) -> None:
        import tiny_transformers as tiny

        from ring_attn.integrations.transformers import context_parallel

        torch.manual_seed(0)
        self.mesh, self.model = mesh, tiny.CAUSAL["llama"]()
        self.cp = context_parallel(self.model, mesh["cp"])
        self.ring = self.cp.ring
        self.embedding, self.layer = self.model.model.embed_tokens, self.model.model.layers[0]
        self.columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        self.rows = ("self_attn.o_proj", "mlp.down_proj")

    def shard(self, ids: Tensor) -> Any:
        return self.cp.shard({"input_ids": ids, "labels": ids})

    def logits(self, batch: Any) -> Tensor:
        return self.model(**batch).logits

    def labels(self, batch: Any) -> Tensor:
        return batch["labels"]

    def loss(self, batch: Any, items: Any = None) -> Tensor:
        batch = batch if items is None else {**batch, "num_items_in_batch": items}
        return self.model(**batch).loss

    def items(self, batch: Any) -> Tensor:
        return batch["num_items_in_batch"]

    def sum(self) -> None:
        self.cp.reduce_gradients()

    def close(self) -> None:
        self.cp.remove()


def ids(number: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(number))


def steps(side: Own, backward: Callable[[int], None], *, before: Callable[[], object] = bool, **options: Any) -> None:
    """Ordinary ones. ``before``: the sum; ``in_place``, ``trained``: of ``zero_grad`` and the optimizer."""
    in_place, after = options.get("in_place", False), options.get("after", bool)
    optimizer = torch.optim.SGD(options.get("trained", list(side.model.parameters())), 0.1)
    for number in range(STEPS):
        backward(number)
        before()
        side.sum()
        after()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not in_place)


def of_loss(side: Own) -> Callable[[int], None]:
    return lambda number: side.loss(side.shard(ids(number))).backward()


def accumulated(side: Own) -> None:
    def backward(number: int) -> None:
        batches = [side.shard(ids(10 * number + part)) for part in range(3)]
        items = sum(side.items(batch) for batch in batches)
        for batch in batches:
            side.loss(batch, items).backward()

    steps(side, backward)
    steps(side, backward, in_place=True)


def zeroed_by_data(side: Own) -> None:
    """As code from before ``zero_grad`` does, which bumps no version."""
    for number in range(STEPS):
        of_loss(side)(number)
        side.sum()
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad.data.zero_()


def clipped_after(side: Own) -> None:
    steps(side, of_loss(side), after=lambda: nn.utils.clip_grad_norm_(side.model.parameters(), 0.1))


def scaled(side: Own) -> None:
    for early in (True, False):
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(side.model.parameters(), 0.1)
        for number in range(STEPS):
            scaler.scale(side.loss(side.shard(ids(number)))).backward()
            if early:
                scaler.unscale_(optimizer)
            side.sum()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def frozen(side: Own) -> None:
    side.embedding.requires_grad_(False)
    steps(side, of_loss(side))


def adapters_alone(side: Own) -> None:
    """What the optimizer does not have gets gradients as well, which nobody drops."""
    for in_place in (False, True):
        steps(side, of_loss(side), trained=list(side.layer.parameters()), in_place=in_place)


def log_probabilities(side: Own, batch: Any) -> Tensor:
    labels = side.labels(batch)
    every = side.logits(batch).log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return (every * (labels >= 0)).sum()


def preferences(side: Own) -> None:
    """DPO: of a pair's log-probabilities over the whole sequences, and those of a reference."""

    def whole(share: Tensor) -> Tensor:
        return share + (total_loss(share, ring=side.ring) - share.detach())

    def backward(number: int) -> None:
        chosen, rejected = (side.shard(ids(2 * number + part)) for part in range(2))
        with torch.no_grad():
            reference = log_probabilities(side, chosen) - log_probabilities(side, rejected)
        margin = log_probabilities(side, chosen) - log_probabilities(side, rejected)
        (-logsigmoid(0.1 * (whole(margin) - total_loss(reference, ring=side.ring)))).backward()

    steps(side, backward)


def distilled(side: Own) -> None:
    def backward(number: int) -> None:
        batch = side.shard(ids(number))
        with torch.no_grad():
            teacher = side.logits(batch).mul(2).log_softmax(-1)
        kl_div(side.logits(batch).log_softmax(-1), teacher, reduction="sum", log_target=True).div(32).backward()

    steps(side, backward)


def policy(side: Own) -> None:
    steps(side, lambda number: (-(number + 0.5) * log_probabilities(side, side.shard(ids(number))) / 32).backward())


def squares(side: Own) -> None:
    steps(side, lambda number: side.logits(side.shard(ids(number))).square().sum().mul(1e-3).backward())


def changed_before_the_sum(side: Own) -> None:
    def rows() -> None:
        side.embedding.weight.grad[:20] = 0

    def noise() -> None:
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=1e-3)

    def own_factor() -> None:
        for parameter in side.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 + dist.get_rank())

    for change in (rows, noise, own_factor):
        steps(side, of_loss(side), before=change)


def summed_over_dp_too(side: Own) -> None:
    steps(side, of_loss(side), after=lambda: sync_gradients(side.model, side.mesh, mesh_dim="dp"))


def ddp_over_dp(side: Own) -> None:
    wrapper = side.model = DistributedDataParallel(side.model, process_group=side.mesh.get_group("dp"))
    part = side.mesh.get_local_rank("dp")
    steps(side, lambda number: side.loss(side.shard(ids(2 * number + part))).backward())
    with wrapper.no_sync():
        steps(side, of_loss(side))


def ddp_over_all(side: Own) -> None:
    """Its mean is the sum, of losses that are multiplied by the number of ranks."""
    side.model = DistributedDataParallel(side.model)
    optimizer = torch.optim.SGD(side.model.parameters(), 0.1)
    for number in range(STEPS):
        side.loss(side.shard(ids(number))).mul(side.mesh.size()).backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp_over_dp(side: Own) -> None:
    fully_shard(side.model, mesh=side.mesh["dp"])
    steps(side, of_loss(side))


def hsdp(side: Own) -> None:
    fully_shard(side.model, mesh=side.mesh)
    optimizer = torch.optim.SGD(side.model.parameters(), 0.1)
    for number in range(STEPS):
        side.loss(side.shard(ids(number))).mul(side.mesh.size()).backward()
        optimizer.step()
        optimizer.zero_grad()


def tensor_parallel(side: Own) -> None:
    """Heads of a layer over the dimension beside the ring's; its parameters are DTensors there."""
    plan = dict.fromkeys(side.columns, ColwiseParallel()) | dict.fromkeys(side.rows, RowwiseParallel())
    parallelize_module(side.layer, side.mesh["dp"], plan)
    steps(side, of_loss(side))


def streamed(side: Own) -> None:
    """With an evaluation, on a batch that was sharded once, between steps, and a batch that one rank alone looks at."""
    held = side.shard(ids(99))
    batches = (side.shard(ids(number)) for number in range(STEPS))

    def backward(_: int) -> None:
        side.loss(next(batches)).backward()
        with torch.no_grad():
            side.loss(held)
        if dist.get_rank() == 0:
            side.shard(ids(77))

    steps(side, backward)


def looked_at(side: Own) -> None:
    """A backward whose gradients are dropped, one that only asks for some, and a step that is left out."""
    of_loss(side)(0)
    side.model.zero_grad()
    torch.autograd.grad(side.loss(side.shard(ids(1))), side.embedding.weight)
    for number in range(STEPS):
        of_loss(side)(number)
        side.sum()
        side.model.zero_grad()


LOOPS = (
    accumulated,
    zeroed_by_data,
    clipped_after,
    scaled,
    frozen,
    adapters_alone,
    preferences,
    distilled,
    policy,
    squares,
    changed_before_the_sum,
    summed_over_dp_too,
    ddp_over_dp,
    ddp_over_all,
    fsdp_over_dp,
    hsdp,
    tensor_parallel,
    streamed,
    looked_at,
)


def assert_ranks_are_one(side: Own) -> None:
    """A loop that is right leaves the same weights on all ranks of a ring."""
    local = [x.to_local() if hasattr(x, "to_local") else x for x in side.model.parameters()]
    mine = torch.stack([x.detach().double().sum() for x in local])
    ranks = [torch.empty_like(mine) for _ in range(side.ring.size)]
    dist.all_gather(ranks, mine, group=side.mesh.get_group("cp"))
    torch.testing.assert_close(ranks[0], ranks[1], rtol=1e-5, atol=1e-5)


def main() -> None:
    with gloo_world("right loops"):
        ring_attn.start()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        for loop in LOOPS:
            side = (Llama if NAME == "llama" else Own)(mesh)
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                try:
                    loop(side)
                except Exception as error:
                    error.add_note(f"in {loop.__name__} of {NAME}")
                    raise
            if loop is not hsdp:  # whose shards differ by design
                assert_ranks_are_one(side)
            side.close()


if __name__ == "__main__":
    main()
