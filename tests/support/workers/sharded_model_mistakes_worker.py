"""Two ranks train a tiny Llama on a ring and make the mistakes that raise no error by themselves; run by test_mistakes.py under
torch.distributed.run. Each must be told, in words that name it; the same work done right must be told nothing."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tiny_transformers as tiny
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ring_attn.integrations.transformers import ContextParallel, context_parallel
from tests.support.healthy import gloo_world
from torch_bridge.call import sanity_checks

LABELS = tiny.batch()["labels"]


@contextmanager
def ours(seed: int = 0, lr: float = 0.1) -> Iterator[tuple[ContextParallel, torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    model = tiny.CAUSAL["llama"]()
    cp = context_parallel(model)
    yield cp, torch.optim.SGD(model.parameters(), lr)
    cp.remove()


def told(words: str, work: Callable[[], object]) -> None:
    """That the work raises ValueError, or warns, with these words; none: that it is told nothing."""
    sanity_checks.warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            work()
            heard = "; ".join(str(warning.message) for warning in caught)
        except ValueError as error:
            heard = str(error)
    assert (words in heard) if words else not heard, f"{words!r} is not in {heard!r}"
    dist.barrier()


def same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other)


def backward(cp: ContextParallel, batch: dict[str, Tensor] | None = None, **changed: object) -> None:
    sharded = cp.shard(tiny.batch() if batch is None else batch)
    cp.model(**{**sharded, **changed}).loss.backward()


def check_what_ranks_share(rank: int) -> None:
    other = tiny.batch()["input_ids"].roll(rank, 1)
    with ours() as (cp, _):
        told("inputs differ", lambda: cp.model(**cp.shard({**tiny.batch(), "input_ids": other})))
        told("labels differ", lambda: cp.model(**cp.shard({**tiny.batch(), "labels": LABELS.roll(rank, 1)})))
        told("", lambda: cp.model(**cp.shard(tiny.batch())))
        embedded = {"inputs_embeds": torch.randn(2, tiny.LENGTH, 32, generator=torch.Generator().manual_seed(0)), "labels": LABELS}
        other = {**embedded, "inputs_embeds": embedded["inputs_embeds"].roll(rank, 1)}
        told("inputs differ", lambda: cp.model(**cp.shard(other)))
        told("", lambda: cp.model(**cp.shard(embedded)))
        told("num_items_in_batch differ", lambda: cp.model(**cp.shard({**tiny.batch(), "num_items_in_batch": 50 + rank})))
        told("num_items_in_batch differ", lambda: cp.model(**{**cp.shard(tiny.batch()), "num_items_in_batch": 50 + rank}))
        counts = (torch.tensor(50), 50) if rank else (50, torch.tensor(50))
        told("", lambda: [cp.model(**cp.shard({**tiny.batch(), "num_items_in_batch": count})) for count in counts])
    with ours() as (cp, _):
        cp.model.model.rotary_emb.inv_freq.mul_(1 + rank)
        told("the buffer model.rotary_emb.inv_freq differ", lambda: cp.model(**cp.shard(tiny.batch())))
    with ours() as (cp, _):  # rank 0 evaluates, and goes on; the others train
        batch = {**tiny.batch(), "input_ids": tiny.batch()["input_ids"].roll(rank, 1)}
        cp.model.train(rank > 0)
        told("not under `if rank == 0`", lambda: cp.model(**cp.shard(batch)))
        told("", lambda: cp.model.eval()(**cp.shard(tiny.batch())))
        with torch.set_grad_enabled(rank > 0):
            told("not under `if rank == 0`", lambda: cp.model(**cp.shard(batch)))
    with ours(seed=rank) as (cp, _):
        told("the parameter model.embed_tokens.weight differ", lambda: cp.model(**cp.shard(tiny.batch())))


def check_entries(rank: int) -> None:
    with ours() as (cp, _):
        own = {name: cp.ring.shard(cp.ring.pad(x)) for name, x in tiny.batch().items()}
        local = own["input_ids"].shape[1]
        told("one rank's part already", lambda: cp.shard(own))
        told("labels of a sharded batch", lambda: backward(cp, labels=own["labels"], shift_labels=None))
        unlabelled = cp.shard({"input_ids": tiny.batch()["input_ids"]})
        told("ignore_index must be -100, by which", lambda: cp.model(**cp.shard(tiny.batch()), ignore_index=-1))
        told("", lambda: same(cp.model(**cp.shard(tiny.batch()), ignore_index=-100).loss, cp(**tiny.batch()).loss))
        told("labels were given beside a batch", lambda: cp.model(**unlabelled, labels=own["labels"]))
        told("labels were given beside a batch", lambda: cp.loss(cp.model(**unlabelled), {**unlabelled, "labels": own["labels"]}))
        shifted = cp.ring.shard(cp.ring.pad(nn.functional.pad(LABELS[:, 1:], (0, 1), value=-100), value=-100))
        items = (LABELS[:, 1:] != -100).sum()
        told("", lambda: same(cp.model(**unlabelled, shift_labels=shifted, num_items_in_batch=items).loss, cp(**tiny.batch()).loss))
        told("shift_labels of a sharded batch", lambda: backward(cp, shift_labels=own["labels"]))
        told("position_ids of a sharded batch", lambda: backward(cp, position_ids=torch.arange(local).expand(2, -1)))
        told("position_ids was taken out", lambda: backward(cp, position_ids=None))
        sharded = cp.shard(tiny.batch())
        sharded["input_ids"].add_(0)
        told("input_ids of a sharded batch", lambda: cp.model(**sharded))
        told("", lambda: cp.model(**{k: x.clone() if isinstance(x, Tensor) else x for k, x in cp.shard(tiny.batch()).items()}))


def check_gradients() -> None:
    def forgotten() -> None:
        for _ in range(2):
            backward(cp)
            optimizer.step()

    def after_each() -> None:
        for _ in range(2):
            backward(cp)
            cp.reduce_gradients()

    def twice() -> None:
        backward(cp)
        cp.reduce_gradients()
        cp.reduce_gradients()

    cases = (("and sum the gradients over the ring", forgotten), ("has added to sums over the ring", after_each))
    for words, work in (*cases, ("are sums over the ring already", twice)):
        with ours() as (cp, optimizer):
            told(words, work)


def check_ddp() -> None:
    """It takes the mean over the ring by itself: nobody forgot anything, and a sum would count twice."""
    with ours() as (cp, optimizer):
        model = DistributedDataParallel(cp.model)

        def step() -> None:
            model(**cp.shard(tiny.batch())).loss.mul(cp.ring.size).backward()
            optimizer.step()

        told("", step)
        told("count it again", cp.reduce_gradients)
        with model.no_sync():
            told("", lambda: (model(**cp.shard(tiny.batch())).loss.backward(), cp.reduce_gradients()))


def main() -> None:
    with gloo_world("mistakes") as (rank, _):
        check_what_ranks_share(rank)
        check_entries(rank)
        check_gradients()
        check_ddp()


if __name__ == "__main__":
    main()
