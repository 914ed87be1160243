"""One rank of the tests of sums of gradients that begin while the backward runs. Run by test_early_sums.py under torchrun.

Each loop runs with and without ``overlap``, and must leave gradients with the same bits after every sum: of two ranks a sum is the
same in any order. Ranks have inputs of their own, as of a sequence that they share.
"""

import copy
import gc
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ring_attn import Ring, RingAttention, keep_attention, start, sync_gradients
from ring_attn.training import early_sums, gradients
from tests.support.healthy import gloo_world

LAYERS, WIDTH, STEPS = 5, 8, 6
SMALL = WIDTH * WIDTH * 4  # bytes: a layer is a bucket


class Model(nn.Module):
    """Layers in a row, each of which may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, without: Iterable[int] = ()) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number in without else torch.tanh(layer(x))
        return x


def inputs(seed: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))


class Run:
    """A model, and the gradients that its sums have left."""

    def __init__(self, overlap: bool, model: nn.Module | None = None) -> None:
        self.overlap, self.found = overlap, list[Tensor | None]()
        self.model = Model() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def backward(self, seed: int, **options: object) -> None:
        self.model(inputs(seed), **options).square().sum().backward()

    def sum(self) -> None:
        sync_gradients(self.model, overlap=self.overlap)
        self.found += [None if x.grad is None else x.grad.clone() for x in self.model.parameters()]

    def step(self, in_place: bool = False) -> None:
        self.sum()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not in_place)


def plain(run: Run) -> None:
    for number in range(STEPS):
        run.backward(number)
        run.step()


def zeroed_in_place(run: Run) -> None:
    for number in range(STEPS):
        run.backward(number)
        run.step(in_place=True)


def accumulated(run: Run) -> None:
    for number in range(STEPS):
        for part in range(3):
            run.backward(3 * number + part)
        run.step()


def accumulated_by_other_numbers(run: Run) -> None:
    for number, parts in enumerate((1, 3, 1, 1, 2, 2, 2, 1, 3, 3, 3)):
        for part in range(parts):
            run.backward(3 * number + part)
        run.step()


def frozen_for_a_while(run: Run) -> None:
    for number in range(2 * STEPS):
        run.model.layers[2].requires_grad_(not 3 <= number < 6)
        run.backward(number)
        assert number != 5 or not run.overlap or planned(run) == 2 * (LAYERS - 1)
        run.step()


def planned(run: Run) -> int:
    """How many parameters are to be summed early."""
    return sum(len(bucket.parameters) for sums in early_sums.early_sums(run.model.parameters()) for bucket in sums._chosen)


def not_used_on_a_rank(run: Run) -> None:
    """And other sums over the same ranks between backward and sum, which must not be mixed with those that have begun."""
    for number in range(2 * STEPS):
        turn = (number // 2) % 3
        run.backward(number, without=[turn] if turn == dist.get_rank() else [])
        total = torch.tensor(1.0)
        dist.all_reduce(total)
        assert total == 2
        run.step()


def never_used_on_a_rank(run: Run) -> None:
    for number in range(STEPS):
        run.backward(number, without=[1] if dist.get_rank() else [])
        run.step()


def used_nowhere_for_a_while(run: Run) -> None:
    for number in range(2 * STEPS):
        run.backward(number, without=[3] if number % 5 in (3, 4) else [])
        run.step()


def failed_in_the_backward(run: Run) -> None:
    """On one rank, then on both: some buckets have begun."""

    def fail(_: Tensor) -> None:
        raise KeyError("in the middle")

    for number in range(2 * STEPS):
        if number in (3, 6):
            handle = run.model.layers[2].weight.register_hook(fail)
            with pytest.raises(KeyError) if number == 6 or dist.get_rank() == 0 else nothing():
                (run.backward if number == 6 or dist.get_rank() == 0 else int)(50 + number)
            handle.remove()
            run.model.zero_grad()
        run.backward(number)
        run.step()


def retained(run: Run) -> None:
    for number in range(STEPS):
        loss = run.model(inputs(number)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        run.step()


def with_a_graph_of_gradients(run: Run) -> None:
    for number in range(STEPS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of the cycle that such gradients are
            run.model(inputs(number)).square().sum().backward(create_graph=True)
        for sums in early_sums.early_sums(run.model.parameters()):
            assert not any(begun.total.requires_grad for begun in sums._begun.values())
        run.step()


def dropped(run: Run) -> None:
    """Steps that are left out after the backward, and gradients that are only asked for."""
    for number in range(2 * STEPS):
        run.backward(number)
        torch.autograd.grad(run.model(inputs(number)).sum(), run.model.layers[0].weight)
        if number % 4 == 3:
            run.model.zero_grad()
        else:
            run.step()


def on_one_rank_once(run: Run) -> None:
    """A backward that one rank makes alone and drops."""
    for number in range(2 * STEPS):
        if dist.get_rank() == 0 and number % 4 == 3:
            run.backward(77)
            run.model.zero_grad()
        run.backward(number)
        run.step()


def changed_before_the_sum(change: Callable[[Tensor], object]) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        for number in range(STEPS):
            run.backward(number)
            if number > 1:
                for parameter in run.model.parameters():
                    change(parameter)
            run.step()

    loop.__name__ = change.__name__
    return loop


def clipped(parameter: Tensor) -> None:
    torch.nn.utils.clip_grad_norm_(parameter, 0.1)


def clipped_by_data(parameter: Tensor) -> None:
    parameter.grad.data.clamp_(-0.05, 0.05)


def reversed_(parameter: Tensor) -> None:
    parameter.grad.neg_()


def turned(parameter: Tensor) -> None:
    """The same numbers elsewhere."""
    parameter.grad.copy_(parameter.grad.flip(0))


def replaced(parameter: Tensor) -> None:
    parameter.grad = parameter.grad * (1 + dist.get_rank())


def of_one_rank(parameter: Tensor) -> None:
    if dist.get_rank():
        parameter.grad.data.mul_(3)


def scaled(run: Run) -> None:
    for early in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number in range(STEPS):
            scaler.scale(run.model(inputs(number)).square().sum()).backward()
            if early:
                scaler.unscale_(run.optimizer)
            run.sum()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()


def in_two_dtypes(run: Run) -> None:
    """And one that is changed on the way."""
    run.model.layers[1].bfloat16()
    run.model.layers[3].double()
    run.model.layers[1].register_forward_pre_hook(lambda layer, given: (given[0].to(layer.weight.dtype),))
    run.model.layers[3].register_forward_pre_hook(lambda layer, given: (given[0].to(layer.weight.dtype),))
    for layer in (run.model.layers[2], run.model.layers[4]):
        layer.register_forward_pre_hook(lambda layer, given: (given[0].to(layer.weight.dtype),))
    for number in range(2 * STEPS):
        if number == STEPS:
            run.model.layers[3].float()
        run.backward(number)
        run.step()


def tied(run: Run) -> None:
    run.model.layers[4].weight = run.model.layers[0].weight
    plain(run)


def reentrant(run: Run) -> None:
    """A parameter inside and outside of such a checkpoint comes twice in a backward."""
    for number in range(STEPS):
        x = checkpoint(run.model, inputs(number).requires_grad_(), use_reentrant=True)
        run.model(x).square().sum().backward()
        run.step()


def some_by_themselves(run: Run) -> None:
    """Parameters that are summed in two calls."""
    first, rest = list(run.model.layers[0].parameters()), list(run.model.layers[1:].parameters())
    for number in range(STEPS):
        run.backward(number)
        sync_gradients(rest, overlap=run.overlap)
        sync_gradients(first, overlap=run.overlap)
        run.found += [x.grad.clone() for x in run.model.parameters()]
        run.optimizer.step()
        run.model.zero_grad()


def turned_off_and_on(run: Run) -> None:
    asked = run.overlap
    for number in range(2 * STEPS):
        run.overlap = asked and number % 5 != 4
        run.backward(number)
        run.step()


def new_parameters(run: Run) -> None:
    for number in range(2 * STEPS):
        if number == 4:
            run.model.layers.append(nn.Linear(WIDTH, WIDTH))
            with torch.no_grad():
                run.model.layers[-1].weight.copy_(torch.eye(WIDTH))
        run.backward(number)
        run.step()


def zeroed_by_data(run: Run) -> None:
    """Which bumps no version."""
    for number in range(STEPS):
        run.backward(number)
        run.sum()
        run.optimizer.step()
        for parameter in run.model.parameters():
            parameter.grad.data.zero_()


def adapters_alone(run: Run) -> None:
    """Gradients that nobody drops: the next backward adds to their sum, which is then summed."""
    run.optimizer = torch.optim.SGD(run.model.layers[1].parameters(), 0.1)
    for number in range(STEPS):
        run.backward(number)
        run.step()


LOOPS = (
    plain,
    zeroed_in_place,
    accumulated,
    accumulated_by_other_numbers,
    frozen_for_a_while,
    not_used_on_a_rank,
    never_used_on_a_rank,
    used_nowhere_for_a_while,
    failed_in_the_backward,
    retained,
    with_a_graph_of_gradients,
    dropped,
    on_one_rank_once,
    *map(changed_before_the_sum, (clipped, clipped_by_data, reversed_, turned, replaced, of_one_rank)),
    scaled,
    in_two_dtypes,
    tied,
    reentrant,
    some_by_themselves,
    turned_off_and_on,
    new_parameters,
    zeroed_by_data,
    adapters_alone,
)
# Where every sum must begin early once the loop is as it was in the step before; and where none can.
EARLY = (plain, zeroed_in_place, accumulated, retained, tied, reentrant, some_by_themselves)


@contextmanager
def nothing() -> Iterator[None]:
    yield


class Counted(NamedTuple):
    """Of each bucket whether it began in the call; of each call how many gradients it summed by itself."""

    late: list[bool]
    left: list[int]


@contextmanager
def counted() -> Iterator[Counted]:
    count, begin, sum_now = Counted([], []), early_sums.EarlySums._begin, gradients._sum_now

    def beginning(self: early_sums.EarlySums, number: int, late: bool = False) -> object:
        count.late.append(late)
        return begin(self, number, late)

    def summing(left: list[Tensor], *where: Any) -> None:
        count.left.append(len(left))
        sum_now(left, *where)

    with patch.object(early_sums.EarlySums, "_begin", beginning), patch.object(gradients, "_sum_now", summing):
        yield count


def check_loops_have_the_same_bits() -> None:
    for loop in LOOPS:
        try:
            loop(usual := Run(False))
            with counted() as count:
                loop(ours := Run(True))
            same = [a is b if a is None else torch.equal(a, b) for a, b in zip(usual.found, ours.found, strict=True)]
            assert all(same) and any(x is not None and x.any() for x in ours.found), same
            if loop in EARLY:  # the first call listens, the second plans, the third sums by the plan: all others early
                buckets = len({id(x) for x in ours.model.parameters()}) // 2
                assert count.late == [True] * buckets + [False] * buckets * (STEPS - 3), count
                assert any(count.left) and not any(count.left[-(STEPS - 3) :]), count
            assert False in count.late, "nothing began early"
            assert loop is not in_two_dtypes or not any(count.left[-2:]), count
        except BaseException as error:
            error.add_note(f"in {loop.__name__}")
            raise


def check_sums_begin_before_the_backward_ends() -> None:
    """In the order in which gradients came, the last layer's first, each before the gradient of the layer below it."""
    run, seen = Run(True), list[str]()
    for number in range(3):
        run.backward(number)
        run.step()
    for number, layer in enumerate(run.model.layers):
        layer.weight.register_hook(lambda _, number=number: seen.append(f"layer {number}"))
    reduce = dist.all_reduce
    with patch.object(dist, "all_reduce", lambda *given, **how: (seen.append("sum"), reduce(*given, **how))[1]):
        run.backward(3)
    assert seen == [word for number in reversed(range(LAYERS)) for word in (f"layer {number}", "sum")], seen


def check_who_is_not_used_everywhere_is_summed_in_the_call() -> None:
    """From then on; all others early."""
    run, found = Run(True), list[Counted]()
    for number in range(2 * STEPS):
        with counted() as count:
            run.backward(number, without=[1] if number == 5 and dist.get_rank() else [])
            run.step()
        found.append(count)
    assert found[3:5] == [Counted([False] * LAYERS, [0])] * 2, found
    assert found[6:] == [Counted([False] * (LAYERS - 1), [2])] * (2 * STEPS - 6), found


def check_gradients_are_a_ranks_own_until_the_call() -> None:
    run = Run(True)
    for number in range(5):
        run.backward(number)
        parts = [x.grad.clone() for x in run.model.parameters()]
        alone = copy.deepcopy(run.model).requires_grad_()
        alone.zero_grad()
        alone(inputs(number)).square().sum().backward()
        assert all(torch.equal(a, b.grad) for a, b in zip(parts, alone.parameters(), strict=True))
        run.step()


def check_mistakes_are_told() -> None:
    for calls in range(1, 6):
        run = Run(True)
        for number in range(calls):
            run.backward(number)
            run.step()
        run.backward(9)
        run.sum()
        with pytest.raises(ValueError, match="are sums over the ring already"):
            run.sum()
        run.backward(10)
        with pytest.raises(ValueError, match="a backward has added to sums over the ring"):
            run.sum()
        run.model.zero_grad()
        run.backward(11)
        run.sum()
        usual = copy.deepcopy(run.model)
        usual.zero_grad()
        usual(inputs(11)).square().sum().backward()
        sync_gradients(usual)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(usual.parameters(), run.model.parameters(), strict=True))
    with pytest.raises(ValueError, match="every rank"):
        sync_gradients(Model(), overlap=dist.get_rank() == 0)


def check_two_models() -> None:
    """Whose backwards and sums take turns, in other orders on the way."""
    found = []
    for overlap in (False, True):
        runs = [Run(overlap), Run(overlap)]
        with counted() as count:
            for number in range(2 * STEPS):
                alone = (number // 3) % 2
                for run in runs[::-1] if number % 3 == 1 else runs:
                    run.backward(number, without=[0, 2] if alone == dist.get_rank() and run is runs[0] else [])
                for run in runs if number % 3 == 1 else runs[::-1]:
                    run.step()
        assert (False in count.late) == overlap
        found.append([x for run in runs for x in run.found])
    assert all(a is b if a is None else torch.equal(a, b) for a, b in zip(*found, strict=True))


class Attending(nn.Module):
    def __init__(self, ring: Ring) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"batch_first": True, "causal": True, "ring": ring}
        self.layers = nn.ModuleList(RingAttention(16, 2, **options) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: y + layer(y, y, y)[0], x, use_reentrant=False, context_fn=keep_attention)
        return x


def check_checkpoints_around_attention() -> None:
    """Collectives of the ring's own, and of its recomputation, in the same backward."""
    ring, found = Ring(layout="zigzag"), []
    for overlap in (False, True):
        run = Run(overlap, Attending(ring))
        with counted() as count:
            for number in range(STEPS):
                whole = torch.randn(1, 32, 16, generator=torch.Generator().manual_seed(number))
                run.model(ring.shard(whole)).square().mean().backward()
                run.step()
        assert (False in count.late) == overlap
        found.append(run.found)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def check_nothing_is_left() -> None:
    """Neither hooks after a call without overlap, nor anything of a model that is gone, garbage collection or not."""
    run = Run(True)
    for number in range(4):
        run.backward(number)
        run.step()
    assert not any(x._post_accumulate_grad_hooks for x in copy.deepcopy(run.model).parameters())
    run.overlap = False
    run.backward(4)
    held = weakref.ref(early_sums.early_sums(run.model.parameters())[0])
    run.sum()
    assert held() is None and not any(x._post_accumulate_grad_hooks for x in run.model.parameters())
    gc.disable()
    try:
        run = Run(True)
        for number in range(5):
            run.backward(number)
            if number < 4:
                run.step()
        held = weakref.ref(early_sums.early_sums(run.model.parameters())[0])
        totals = [weakref.ref(begun.total) for begun in held()._begun.values()]
        assert totals and all(total() is not None for total in totals)
        run.sum()
        assert not held()._begun
        until = time.monotonic() + 10  # gloo's thread lets go of a buffer a moment after it has said that it is done
        while any(total() is not None for total in totals) and time.monotonic() < until:
            time.sleep(0.01)
        assert not any(total() is not None for total in totals)
        parameter = weakref.ref(run.model.layers[0].weight)
        del run
        assert parameter() is None and held() is None
    finally:
        gc.enable()


def check_beside_data_parallelism() -> None:
    """On four ranks: sums over both dimensions in turn, a ring over both; nothing of FSDP2's begins early, and
    DistributedDataParallel is refused."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    both = Ring(mesh, mesh_dim=("dp", "cp"))
    for ring, shard in ((Ring(mesh, mesh_dim="cp"), False), (Ring(mesh, mesh_dim="cp"), True), (both, False)):
        found = []
        for overlap in (False, True):
            model = Model()
            if shard:
                fully_shard(model, mesh=mesh["dp"])
            sums = []
            with counted() as count:
                for number in range(STEPS):
                    model.zero_grad()
                    model(inputs(number)).square().sum().backward()
                    sync_gradients(model, ring=ring, overlap=overlap)
                    if ring is not both and not shard:
                        sync_gradients(model, mesh, mesh_dim="dp")
                    sums += [x.grad.to_local().clone() if shard else x.grad.clone() for x in model.parameters()]
            assert (False in count.late) == (overlap and not shard)
            found.append(sums)
        for usual, ours in zip(*found, strict=True):
            torch.testing.assert_close(ours, usual, rtol=1e-6, atol=1e-6)
    parallel = DistributedDataParallel(Model(), process_group=mesh.get_group("dp"))
    with pytest.raises(ValueError, match="DistributedDataParallel changes gradients after that"):
        sync_gradients(parallel, mesh, mesh_dim="cp", overlap=True)


CHECKS = (
    check_loops_have_the_same_bits,
    check_sums_begin_before_the_backward_ends,
    check_who_is_not_used_everywhere_is_summed_in_the_call,
    check_gradients_are_a_ranks_own_until_the_call,
    check_mistakes_are_told,
    check_two_models,
    check_checkpoints_around_attention,
    check_nothing_is_left,
)


if __name__ == "__main__":
    with gloo_world("early sums") as (_, size):
        start()
        with patch.object(early_sums, "_BUCKET", SMALL):
            for check in CHECKS if size == 2 else (check_beside_data_parallelism,):
                check()
