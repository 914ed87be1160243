"""Training steps on a ring, right ones and ones with a mistake that raises no error, and what ``ring_attn.verify(step=)`` says; run
by tests/ring_attn/test_verify.py on two ranks, and on four (data parallelism beside the ring)."""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ring_attn import Ring, RingAttention, Verdict, context_parallel_sdpa, cross_entropy, sync_gradients, verify
from tests.support.effort import ALL, of_the_day
from tests.support.healthy import gloo_world

VOCABULARY, WIDTH, HEADS, LENGTH = 23, 16, 4, 46
RANK = int(os.environ["RANK"])  # read by the program when it begins


class Model(nn.Module):
    """One layer. Every change of an option is a mistake, or another road to the same."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor], noise: Tensor | float = 0.0) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.places(positions)) + noise
        q, k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.qkv(x).chunk(3, -1))
        return self.head(self.norm(x + self.out(attend(q, k, v).flatten(2))))


def ids_of(turn: int, rank: int = 0, micro: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(100 * turn + 10 * micro + rank))


def labels_of(ids: Tensor) -> Tensor:
    """Those of a prompt do not count: ranks hold different numbers."""
    return ids.masked_fill(torch.arange(LENGTH) < 9, -100)


def batch_of(turn: int, ring: Ring, **which: int) -> Any:
    ids = ids_of(turn, **which)
    return ring.shard_batch(ids, labels_of(ids))


def causal(ring: Ring, **options: Any) -> Callable[..., Tensor]:
    return partial(ring.attention, causal=True, **options)


@dataclass
class Loop:
    """A loop of two steps; its parts are what mistakes are made of."""

    ring: Ring
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def loss(self, turn: int, **which: int) -> Tensor:
        batch = batch_of(turn, self.ring, **which)
        return cross_entropy(self.logits(batch), batch)

    def logits(self, batch: Any) -> Tensor:
        return self.model(batch.input_ids, batch.position_ids, causal(self.ring))

    def sync(self) -> None:
        sync_gradients(self.model, ring=self.ring)

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)

    def backward(self, turn: int) -> None:
        self.loss(turn).backward()
        self.sync()

    def between(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self) -> nn.Module:
        for turn in range(2):
            self.backward(turn)
            self.between()
        return self.model


def made(ring: Ring, loop: type[Loop] = Loop, seed: int = 0, lr: float = 0.1, sgd: bool = True, dropout: float = 0.0) -> Loop:
    torch.manual_seed(seed)
    model = Model(dropout)
    return loop(ring, model, (torch.optim.SGD if sgd else torch.optim.AdamW)(model.parameters(), lr))


STEPS: dict[str, tuple[Callable[..., Any], str | None]] = {}  # and what is said of it; None: right


def program(says: str | None = None) -> Callable[[Any], Any]:
    """A subclass of Loop, or a step."""

    def add(what: Any) -> Any:
        def step(ring: Ring) -> Any:
            return made(ring, what).run()

        step.__name__ = what.__name__
        step = step if isinstance(what, type) else what
        STEPS[what.__name__] = step, says
        return what

    return add


# ------------------------------------------------------------------------------------------------- right


@program()
class plain(Loop):
    pass


@program()
def adam(ring: Ring) -> Any:
    """The bias of the keys has a gradient of rounding alone, and goes by its sign."""
    return made(ring, sgd=False, lr=1e-3).run()


@program()
class clipped_after_the_sum(Loop):
    def sync(self) -> None:
        super().sync()
        self.clip()


@program()
class accumulated(Loop):
    def backward(self, turn: int) -> None:
        batches = [batch_of(turn, self.ring, micro=micro) for micro in range(2)]
        for batch in batches:
            cross_entropy(self.logits(batch), batch, num_items=sum(x.num_labels for x in batches)).backward()
        self.sync()


@program()
class scaled(Loop):
    def run(self) -> nn.Module:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for turn in range(2):
            scaler.scale(self.loss(turn)).backward()
            self.sync()
            scaler.unscale_(self.optimizer)
            self.clip()
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()
        return self.model


@program()
def frozen(ring: Ring) -> Any:
    loop = made(ring)
    loop.model.tokens.requires_grad_(False)
    loop.model.qkv.bias.requires_grad_(False)
    return loop.run()


@program()
def adapters(ring: Ring) -> Any:
    """LoRA's: low ranks beside frozen weights, their second factor zero at first."""
    loop = made(ring)
    loop.model.requires_grad_(False)
    down, up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 3 * WIDTH, bias=False)
    nn.init.zeros_(up.weight)
    frozen = loop.model.qkv
    loop.model.qkv = nn.Sequential()
    loop.model.qkv.add_module("frozen", frozen)
    loop.model.qkv.add_module("down", down)
    loop.model.qkv.add_module("up", up)
    loop.model.qkv.forward = lambda x: frozen(x) + up(down(x))
    loop.optimizer = torch.optim.AdamW([*down.parameters(), *up.parameters()], 1e-2)
    return loop.run()


@program()
class rows_zeroed(Loop):
    """Only new tokens' rows are trained."""

    def backward(self, turn: int) -> None:
        self.loss(turn).backward()
        self.model.tokens.weight.grad[:20] = 0
        self.sync()


@program()
class noise_of_the_whole(Loop):
    """NEFTune's noise, of the whole sequence, and noise in the gradients, of one seed."""

    def logits(self, batch: Any) -> Tensor:
        noise = 0.1 * torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
        return self.model(batch.input_ids, batch.position_ids, causal(self.ring), self.ring.shard(self.ring.pad(noise)))

    def between(self) -> None:
        generator = torch.Generator().manual_seed(5)
        for x in self.model.parameters():
            x.grad += 0.01 * torch.randn(x.shape, generator=generator)
        super().between()


def log_probabilities(loop: Loop, batch: Any) -> Tensor:
    return -cross_entropy(loop.logits(batch), batch, reduction="none")


@program()
class preferences(Loop):
    """DPO: a sequence's log probability is a sum over the ring."""

    def loss(self, turn: int, **which: int) -> Tensor:
        of_rows = self.ring.unshard(log_probabilities(self, batch_of(turn, self.ring))).sum(1)
        return -F.logsigmoid(0.1 * (of_rows[0] - of_rows[1])) / self.ring.size


@program()
class policy(Loop):
    """A weighted policy loss, a KL to another model, and z-loss: sums of one's own."""

    def loss(self, turn: int, **which: int) -> Tensor:
        batch = batch_of(turn, self.ring)
        counted = (batch.labels != -100).unsqueeze(-1)
        logits = self.logits(batch)
        other = logits.detach().roll(1, -1).log_softmax(-1)
        kl = F.kl_div(logits.log_softmax(-1), other, reduction="none", log_target=True)
        advantages = torch.tensor([[1.0], [-0.5]])
        mine = (kl * counted).sum() + 1e-3 * (logits * counted).square().sum()
        return (mine - (advantages * log_probabilities(self, batch)).sum()) / batch.num_labels


@program()
def dropout(ring: Ring) -> Any:
    return made(ring, dropout=0.3).run()


@program()
class checkpointed(Loop):
    def logits(self, batch: Any) -> Tensor:
        return checkpoint(super().logits, batch, use_reentrant=False)


@program()
def compiled() -> Any:
    """The graph is made for a ring, which it does not ask for again. Without an argument: the ring is the step's own."""
    loop = made(Ring(layout="zigzag"))
    loop.model.qkv = torch.compile(loop.model.qkv, backend="aot_eager")
    return loop.run()


@program()
class compiled_attention(Loop):
    def logits(self, batch: Any) -> Tensor:
        attend = torch.compile(causal(self.ring), backend="aot_eager")
        return self.model(batch.input_ids, batch.position_ids, attend)


@program()
class autocast(Loop):
    def logits(self, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().logits(batch)


@program()
class by_hand(Loop):
    """Without an optimizer of torch."""

    @torch.no_grad()
    def between(self) -> None:
        for x in self.model.parameters():
            x -= 0.1 * x.grad
            x.grad = None


@program()
def several_modules(ring: Ring) -> Any:
    model = made(ring).run()
    return {"embedding": model.tokens, "head": model.head}


@program()
def a_ring_of_its_own(ring: Ring) -> Any:
    """Of the same ranks, made from the environment."""
    return made(Ring(init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),)), layout="striped")).run()


@program()
class sdpa(Loop):
    def logits(self, batch: Any) -> Tensor:
        def attend(*qkv: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), is_causal=True).transpose(1, 2)

        with context_parallel_sdpa(ring=self.ring):
            return self.model(batch.input_ids, batch.position_ids, attend)


@program()
def fsdp_over_the_ring(ring: Ring) -> Any:
    """It takes the mean over the ring: the loss is multiplied by its size."""

    class Mean(Loop):
        def backward(self, turn: int) -> None:
            (self.loss(turn) * self.ring.size).backward()

    torch.manual_seed(0)
    model = fully_shard(Model(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return Mean(ring, model, torch.optim.SGD(model.parameters(), 0.1)).run()


@program()
def ddp_over_the_ring(ring: Ring) -> Any:
    class Mean(Loop):
        def backward(self, turn: int) -> None:
            (self.loss(turn) * dist.get_world_size()).backward()

    loop = made(ring, Mean)
    loop.model = DistributedDataParallel(loop.model)
    return loop.run()


@program()
class summed_by_hand(Loop):
    """By torch's collectives: over the default group, and over the ring's."""

    def sync(self) -> None:
        for place, x in enumerate(self.model.parameters()):
            dist.all_reduce(x.grad, group=self.ring.group if place % 2 else None)


class whole_projections(Loop):
    """Projections of the whole sequence, heads first, of which each rank takes its positions."""

    dim = 2

    def loss(self, turn: int, **which: int) -> Tensor:
        ids = F.pad(ids_of(turn), (0, 2))

        def attend(*qkv: Tensor) -> Tensor:
            q, k, v = (self.ring.shard(x.transpose(1, 2), dim=self.dim) for x in qkv)
            out = self.ring.attention(q, k, v, causal=True, qkv_format="bhsd")
            return self.ring.unshard(out, dim=self.dim).transpose(1, 2)

        logits = self.model(ids, torch.arange(LENGTH + 2).expand(2, -1), attend)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / self.ring.size


program()(whole_projections)

# ------------------------------------------------------------------------------------------------- wrong


@program("different batches")
class another_batch_on_each_rank(Loop):
    def loss(self, turn: int, **which: int) -> Tensor:
        return super().loss(turn, rank=RANK)


@program("Is the whole batch the same on all ranks?")
class another_batch_by_the_rank_in_torch(Loop):
    def loss(self, turn: int, **which: int) -> Tensor:
        return super().loss(turn, rank=dist.get_rank())


@program("were not summed over the ring")
class sync_forgotten(Loop):
    def sync(self) -> None:
        pass


@program("the gradients")
class mean_of_each_ranks_labels(Loop):
    def loss(self, turn: int, **which: int) -> Tensor:
        batch = batch_of(turn, self.ring)
        return F.cross_entropy(self.logits(batch).flatten(0, 1), batch.labels.flatten())


@program("differ")
class unshifted_labels(Loop):
    """Shifted within each shard, as a loop of one process does."""

    def loss(self, turn: int, **which: int) -> Tensor:
        batch = batch_of(turn, self.ring)
        labels = F.pad(batch.input_ids[:, 1:], (0, 1), value=-100)
        return cross_entropy(self.logits(batch), labels, ring=self.ring)


@program("differ")
class positions_of_the_rank(Loop):
    def logits(self, batch: Any) -> Tensor:
        positions = torch.arange(batch.input_ids.shape[1]).expand(2, -1)
        return self.model(batch.input_ids, positions, causal(self.ring))


@program("differ")
class heads_split(whole_projections):
    dim = 1


@program("differ")
class zigzag_called_contiguous(Loop):
    def logits(self, batch: Any) -> Tensor:
        return self.model(batch.input_ids, batch.position_ids, causal(replace(self.ring, layout="contiguous")))


@program("differ")
class heads_and_positions_swapped(Loop):
    def logits(self, batch: Any) -> Tensor:
        def attend(*qkv: Tensor) -> Tensor:
            return self.ring.attention(*(x.transpose(1, 2) for x in qkv), causal=True).transpose(1, 2)

        return self.model(batch.input_ids, batch.position_ids, attend)


@program("nothing in the step went over the ring")
def a_ring_of_one(ring: Ring) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "cp"))
    return made(Ring(mesh, mesh_dim="cp", layout="zigzag")).run()


@program("nothing in the step went over the ring")
class attention_of_torch(Loop):
    """And the whole sequence on each rank: no ring anywhere."""

    def backward(self, turn: int) -> None:
        ids = ids_of(turn)

        def attend(*qkv: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv), is_causal=True).transpose(1, 2)

        logits = self.model(ids, torch.arange(LENGTH).expand(2, -1), attend)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()


@program("2 times what they must be: summed twice")
class summed_twice(Loop):
    def sync(self) -> None:
        super().sync()
        super().sync()


@program("0.5 times what they must be: averaged")
class averaged(Loop):
    def sync(self) -> None:
        super().sync()
        for x in self.model.parameters():
            x.grad /= dist.get_world_size()


@program("0.5 times what they must be: averaged")
class mean_over_ranks(Loop):
    def sync(self) -> None:
        for x in self.model.parameters():
            dist.all_reduce(x.grad, op=dist.ReduceOp.SUM)
            x.grad /= int(os.environ["WORLD_SIZE"])


@program("differ")
class clipped_before_the_sum(Loop):
    def sync(self) -> None:
        self.clip()
        super().sync()


@program("differ")
class summed_after_each_micro_batch(Loop):
    def backward(self, turn: int) -> None:
        batches = [batch_of(turn, self.ring, micro=micro) for micro in range(2)]
        for batch in batches:
            cross_entropy(self.logits(batch), batch, num_items=sum(x.num_labels for x in batches)).backward()
            self.sync()


@program("what an earlier step left")
class zero_grad_forgotten(Loop):
    def between(self) -> None:
        self.optimizer.step()


@program("times what they must be")
class divided_by_tokens_of_the_shard(Loop):
    """The sum over all labels, divided by another number than theirs."""

    def loss(self, turn: int, **which: int) -> Tensor:
        batch = batch_of(turn, self.ring)
        return cross_entropy(self.logits(batch), batch, reduction="sum") / batch.labels.numel()


@program("or made of parameters (a learning rate?)")
def another_learning_rate(ring: Ring) -> Any:
    return made(ring, lr=0.1 * ring.size).run()


@program("begin with other parameters")
def another_seed_on_each_rank(ring: Ring) -> Any:
    return made(ring, seed=RANK).run()


@program("begin with other parameters")
def a_seed_of_the_rank_in_torch(ring: Ring) -> Any:
    return made(ring, seed=dist.get_rank()).run()


@program("other random numbers")
class noise_of_each_shard(Loop):
    def logits(self, batch: Any) -> Tensor:
        noise = 0.1 * torch.randn(*batch.input_ids.shape, WIDTH)
        return self.model(batch.input_ids, batch.position_ids, causal(self.ring), noise)


@program("differ")
class documents_joined(Loop):
    """Segment ids that attention does not get on the ring, as a hook that is lost."""

    def logits(self, batch: Any) -> Tensor:
        given = {} if self.ring.size > 1 else {"q_segment_ids": batch.segment_ids}
        return self.model(batch.input_ids, batch.position_ids, causal(self.ring, **given))

    def loss(self, turn: int, **which: int) -> Tensor:
        ids, counts = ids_of(turn), torch.cat([torch.arange(20), torch.arange(LENGTH - 20)])
        batch = self.ring.shard_batch(ids, position_ids=counts[None])
        return cross_entropy(self.logits(batch), batch)


LOADER: Iterator[int] = iter(range(1000))
OUTSIDE: list[Loop] = []


@program("not repeatable")
class the_next_batches_of_a_loader(Loop):
    def loss(self, turn: int, **which: int) -> Tensor:
        return super().loss(next(LOADER))


@program("does not begin anew")
def a_model_made_outside(ring: Ring) -> Any:
    OUTSIDE[:] = OUTSIDE or [made(ring)]
    OUTSIDE[0].ring = ring
    return OUTSIDE[0].run()


# ------------------------------------------------------------------------------------------------- verdicts


def said(given: Callable[..., Any], ring: Ring) -> tuple[bool, str]:
    """Whether it is right, and what verify says, or what a check of the library said before it could."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            verdict = given() if isinstance(given, partial) else verify(step=given, ring=ring)
        except ValueError as error:
            return False, f"told by {error}"
    assert isinstance(verdict, Verdict)
    return verdict.ok, str(verdict)


def alike(text: str, ring: Ring) -> None:
    """That all ranks got the same."""
    everywhere: list[Any] = [None] * ring.size
    dist.all_gather_object(everywhere, text, group=ring.group)
    assert len(set(everywhere)) == 1, everywhere


def check(name: str, step: Callable[..., Any], says: str | None, ring: Ring) -> str:
    begun = time.monotonic()
    ok, text = said(step, ring)
    if dist.get_rank() == 0:
        print(f"{name} ({time.monotonic() - begun:.1f} s): {text}", flush=True)
    if says is None:
        return "" if ok else f"{name} is accused: {text}"
    if not text.startswith("told by"):
        alike(text, ring)
    return "" if not ok and (says in text or text.startswith("told by")) else f"{name}, {says!r}: {text}"


class Plain(nn.Module):
    """A model of its own, with a ring of its own."""

    def __init__(self, ring: Ring) -> None:
        super().__init__()
        self.ring, self.layers, self.local = ring, Model(dropout=0.2), False

    def forward(self, ids: Tensor, position_ids: Tensor, segment_ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1]).expand_as(ids) if self.local else position_ids
        return self.layers(ids, positions, causal(self.ring, q_segment_ids=segment_ids))


def check_models(ring: Ring) -> list[str]:
    """As they are, on short whole batches; neither they nor their gradients change."""
    torch.manual_seed(0)
    packed = {"input_ids": ids_of(0), "position_ids": torch.cat([torch.arange(20), torch.arange(LENGTH - 20)])[None]}
    padded = {"input_ids": ids_of(0), "attention_mask": torch.arange(LENGTH).expand(2, -1) < 31}
    model, module = Plain(ring), RingAttention(WIDTH, HEADS, batch_first=True, ring=ring, causal=True)
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))

    def of_module(model: nn.Module, whole: Any, ring: Ring) -> Tensor:
        part = ring.shard(ring.pad(whole["x"]))
        return model(part, part, part)[0].square().sum()

    def twice(model: nn.Module, whole: Any, ring: Ring) -> Tensor:
        return of_module(model, whole, ring) * ring.size

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    random, values = torch.get_rng_state(), [x.clone() for x in model.parameters()]
    cases: dict[str, tuple[Any, str | None]] = {
        "tokens": ((model, ids_of(0)), None),
        "packed": ((model, packed), None),
        "padded": ((model, padded), None),
        "a module": ((module, {"x": x}, of_module), None),
        "a loss of another size": ((module, {"x": x}, twice), "the loss differs"),
        "another batch on each rank": ((model, ids_of(0, rank=RANK)), "different batches"),
    }

    def of(model: nn.Module, batch: Any, forward: Any = None) -> Verdict:
        return verify(model, batch, ring=ring, forward=forward)

    wrong = [check(name, partial(of, *given), says, ring) for name, (given, says) in cases.items()]
    model.local = True
    wrong.append(check("positions of the rank", partial(of, model, ids_of(0)), "first that differs is layers.places", ring))
    assert torch.equal(random, torch.get_rng_state()) and model.training and model.layers.dropout.training
    assert all(bool((x.grad == 1).all()) for x in model.parameters())
    assert all(map(torch.equal, model.parameters(), values))
    with pytest.raises(ValueError, match="takes no segment_ids"):
        verify(nn.Embedding(VOCABULARY, VOCABULARY), packed, ring=ring)
    return wrong


def check_arguments(ring: Ring) -> None:
    for step, words in ((lambda ring: None, "must return a module"), (lambda ring: 1 / 0, "division")):
        try:
            verify(step=step, ring=ring)
        except (ValueError, ZeroDivisionError) as error:
            assert words in str(error)
        else:
            raise AssertionError(words)
    random = torch.get_rng_state()
    verify(step=lambda ring: made(ring).run(), ring=ring)
    assert torch.equal(torch.get_rng_state(), random)
    alone = verify(step=lambda ring: made(ring).run(), ring=Ring("local"))
    assert not alone.ok and "one process" in str(alone)


def beside_data_parallelism() -> list[str]:
    """DDP, or FSDP, over dp alone; then the sum over cp. And FSDP over both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    ring, dp = Ring(mesh, mesh_dim="cp", layout="zigzag"), mesh["dp"]

    class Parallel(Loop):
        factor: Callable[[Ring], int] = staticmethod(lambda ring: dp.size())

        def loss(self, turn: int, **which: int) -> Tensor:
            batch = batch_of(turn, self.ring, rank=dp.get_local_rank())
            labels = batch.num_labels.clone()
            dist.all_reduce(labels, group=dp.get_group())
            return cross_entropy(self.logits(batch), batch, num_items=labels) * self.factor(self.ring)

    class OverBoth(Parallel):
        factor = staticmethod(lambda ring: dp.size() * ring.size)

        def sync(self) -> None:
            pass

    class Forgotten(Parallel):
        def sync(self) -> None:
            pass

    def ddp(ring: Ring, loop: type[Loop] = Parallel) -> nn.Module:
        made_loop = made(ring, loop)
        made_loop.model = DistributedDataParallel(made_loop.model, process_group=dp.get_group())
        return made_loop.run()

    def fsdp(ring: Ring) -> nn.Module:
        torch.manual_seed(0)
        model = fully_shard(Model(), mesh=mesh._flatten("dp_cp"))
        return OverBoth(ring, model, torch.optim.SGD(model.parameters(), 0.1)).run()

    def swapped(_: Ring) -> nn.Module:
        return ddp(Ring(init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "cp")), mesh_dim="cp"))

    cases: dict[str, tuple[Any, str | None]] = {
        "ddp over dp": (ddp, None),
        "fsdp over both": (fsdp, None),
        "sync forgotten beside ddp": (lambda ring: ddp(ring, Forgotten), "were not summed"),
        "a mesh of (4, 1)": (swapped, "nothing in the step went over"),
    }
    return [check(name, step, says, ring) for name, (step, says) in cases.items()]


def main() -> None:
    with gloo_world("verify") as (_, size):
        begun = time.monotonic()
        if size == 2:
            ring = Ring(init_device_mesh("cpu", (size,)), layout="zigzag")
            check_arguments(ring)
            today = {name: case for name, case in STEPS.items() if ALL or of_the_day(name, 2) == 0}
            wrong = [check(name, step, says, ring) for name, (step, says) in today.items()]
            wrong += check_models(ring)
        else:
            wrong = beside_data_parallelism()
        assert not any(wrong), "\n".join(filter(None, wrong))
        print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
