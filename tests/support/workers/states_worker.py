"""Layers with a state on a ring, beside one process; run by test_recurrence.py of ring_attn, and with "cuda" by
test_rings.py of GPUs."""

import os
import sys
from functools import partial
from itertools import product

import torch
import torch.distributed as dist
from state_cases import CASES, LENGTH, ONE_OF_EACH, ids_of
from state_torch import gradients_of, operator_of, sharded, stepwise, tensors
from torch.utils.checkpoint import checkpoint

import ring_attn
from ring_attn import Ring

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
if DEVICE == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.set_default_device(DEVICE)
dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
ring_attn.start()
rank, size = dist.get_rank(), dist.get_world_size()
layouts = ["contiguous", "zigzag", ring_attn.balance(LENGTH, size, causal=True, piece=LENGTH // (3 * size))]


def compare(name, layout, documents, of=slice(None), **strategy):
    """Results, the gradients of shards, and the sums over ranks of those that all ranks hold."""
    case, ring, ids = CASES[name], Ring(layout=layout), ids_of(documents)
    operands, state, given = tensors(case, DEVICE)
    ids = None if ids is None else torch.tensor(ids)
    (y, last), exact = gradients_of(case, operands, state, given, ids, of, mesh="local")
    shards = {name: sharded(x, ring) for name, x in operands.items()}
    # All ranks hold the final state: each makes its part of the loss.
    parts = sharded(given[0], ring), given[1] / size
    (own, own_last), gradients = gradients_of(
        case, shards, state, parts, None if ids is None else ring.shard(ids), of, ring=ring, **strategy
    )
    torch.testing.assert_close(own, sharded(y, ring), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(own_last, last, rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        whole = operands[name].shape[1:2] == (LENGTH,) if name != "state" else False
        if not whole:
            dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, sharded(exact[name], ring) if whole else exact[name], rtol=1e-11, atol=1e-11, msg=name)


def check_half_precision(name, layout, **strategy):
    """Of bfloat16 inputs, the error against float64 is within twice that of one rank."""
    case, ring, ids = CASES[name], Ring(layout=layout), torch.tensor(ids_of("padding"))
    operands, state, given = tensors(case, DEVICE)
    half, state = {key: x.bfloat16() for key, x in operands.items()}, state.bfloat16()
    exact = gradients_of(case, {key: x.double() for key, x in half.items()}, state.double(), given, ids, mesh="local")
    alone = gradients_of(case, half, state, given, ids, mesh="local")
    shards = {key: sharded(x, ring) for key, x in half.items()}
    parts = sharded(given[0], ring), given[1] / size
    (y, last), gradients = gradients_of(case, shards, state, parts, ring.shard(ids), ring=ring, **strategy)
    for key, gradient in gradients.items():
        if key != "state" and operands[key].shape[1:2] == (LENGTH,):
            gradients[key] = ring.unshard(gradient)
        else:
            gradients[key] = gradient.double()
            dist.all_reduce(gradients[key])
    found, one, reference = (
        dict(y=y, last=last) | gradients for (y, last), gradients in (((ring.unshard(y), last), gradients), alone, exact)
    )
    for key, x in reference.items():
        error, own = (torch.linalg.vector_norm(got[key].double() - x).item() for got in (found, one))
        assert error <= 2 * own, f"{name} {key}: {error:.2e}, of one rank {own:.2e}"


def refused(words, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except (ValueError, NotImplementedError) as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


for number, name in enumerate(ONE_OF_EACH):
    compare(name, layouts[number % 3], "padding", **({"strategy": "prefix"} if CASES[name].chunked else {}))
for number, name in enumerate((*ONE_OF_EACH, "delta-norm")):
    strategy = {"strategy": "prefix" if number < len(ONE_OF_EACH) else "ulysses"} if CASES[name].chunked else {}
    check_half_precision(name, layouts[number % 2], **strategy)
for name, layout, documents in (
    ("delta-norm", "zigzag", "padding"),
    ("kda", layouts[2], "cuts"),
    ("ssd-skip", "zigzag", "padding"),
    ("ssd", "contiguous", "none"),
):
    compare(name, layout, documents, operator=operator_of(CASES[name]))
for name, of in product(("kda", "ssd"), (slice(0, 1), slice(1, 2))):  # of one result alone
    compare(name, "zigzag", "cuts", of, operator=operator_of(CASES[name]))


class Learned(torch.nn.Module):
    """An operator with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, *given, initial_state, output_final_state):
        y, left = stepwise(*given, initial_state=initial_state, output_final_state=output_final_state)
        return y * self.gain, left


def own_gradient(function, operands, **where):
    learned = Learned()
    leaves = [x.detach().requires_grad_() for x in operands]
    function(*leaves, operator=learned, **where).square().sum().backward()
    return learned.gain.grad


def backward_twice(name):
    """The gradients of one backward, and what a second one of the same graph adds."""
    case, ring = CASES[name], Ring(layout="zigzag")
    given = tensors(case, DEVICE)[0].values()
    leaves = [sharded(x, ring).detach().clone().requires_grad_() for x in given]
    y = getattr(ring_attn, case.function)(*leaves, ring=ring, operator=operator_of(case))
    found = [torch.autograd.grad(y.square().sum(), leaves, retain_graph=again) for again in (True, False)]
    torch.testing.assert_close(*found, rtol=0, atol=0)
    return found[0]


def check_checkpoints(name, plain, reentrant):
    """Its function is computed twice, and no third time for what is recorded within."""
    given, ring, runs = tensors(CASES[name], DEVICE)[0].values(), Ring(layout="zigzag"), []

    def layer(*operands):
        runs.append(1)
        return getattr(ring_attn, CASES[name].function)(*operands, ring=ring, operator=operator_of(CASES[name]))

    leaves = [sharded(x, ring).detach().clone().requires_grad_() for x in given]
    checkpoint(layer, *leaves, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close([x.grad for x in leaves], list(plain), rtol=0, atol=0)
    assert len(runs) == 2, f"{name}: computed {len(runs)} times"


for name in ("kda", "ssd"):
    plain = backward_twice(name)
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(backward_twice(name), plain, rtol=0, atol=0)
    for reentrant in (False, True):
        check_checkpoints(name, plain, reentrant)

case = CASES["kda"]
operands = list(tensors(case, DEVICE)[0].values())
shards = [ring_attn.shard(x) for x in operands]
gradient = own_gradient(ring_attn.kda, shards)
dist.all_reduce(gradient)
torch.testing.assert_close(gradient, own_gradient(ring_attn.kda, operands, mesh="local"))
q = shards[0].detach().requires_grad_()
(dq,) = torch.autograd.grad(ring_attn.kda(q, *shards[1:], operator=stepwise).square().sum(), q, create_graph=True)
refused("a delta rule by an operator can be differentiated once", dq.sum().backward)
state, weight = (x.clone().requires_grad_() for x in (tensors(case, DEVICE)[1], shards[2]))
y = ring_attn.kda(*(x.detach() for x in shards), initial_state=state, operator=stepwise)
(dstate,) = torch.autograd.grad((y * weight).sum(), state, create_graph=True)  # of what it depends on, weight alone has a gradient
refused("can be differentiated once", torch.autograd.grad, dstate.square().sum(), weight)
for name in ("kda", "ssd"):  # the state alone has a gradient
    found = []
    for ring in (Ring(layout="zigzag"), None):
        function, where = getattr(ring_attn, CASES[name].function), {"mesh": "local"} if ring is None else {"ring": ring}
        given = [x if ring is None else sharded(x, ring) for x in tensors(CASES[name], DEVICE)[0].values()]
        state = tensors(CASES[name], DEVICE)[1].requires_grad_()
        function(*given, initial_state=state, operator=operator_of(CASES[name]), **where).square().sum().backward()
        found.append(state.grad)
    dist.all_reduce(found[0])
    torch.testing.assert_close(*found)
with ring_attn.Explaining() as calls:
    ring_attn.kda(*shards, operator=stepwise)
assert "kda: by state_torch.stepwise" in str(calls), str(calls)
compare("kda", "zigzag", "padding", strategy="ulysses")
compare("ssd-skip", layouts[2], "cuts", strategy="ulysses")

x, weight = torch.randn(1, 8, 2), torch.randn(2, 4)
dist.broadcast(weight, 0)
refused("striped", ring_attn.causal_conv1d, x, weight, layout="striped")
refused("causal_conv1d must be called with shards of the same shapes", ring_attn.causal_conv1d, x[:, : 8 - 2 * rank], weight)
refused("weight must be", ring_attn.causal_conv1d, x, weight if rank else weight[0])  # one rank's error is all ranks'
refused("weight of causal_conv1d must be the same on all ranks", ring_attn.causal_conv1d, x[:, :6], weight + rank)
q, state = torch.randn(1, 8, 2, 4), torch.full((1, 2, 4, 4), float(rank))
refused("those of ring ranks", ring_attn.linear_attention, q, q, q, initial_state=state)
try:
    ring_attn.causal_conv1d(x, weight, layout="contiguous" if rank else "zigzag")
except ValueError as error:
    assert "must be called with" in str(error), error
else:
    raise AssertionError("two layouts were taken")
refused(
    "gives equally many heads to each", ring_attn.linear_attention, *[q.repeat(1, 1, 1 + size, 1)[:, :, 1:]] * 3, strategy="ulysses"
)
refused("must be called with", ring_attn.linear_attention, q, q, q, strategy="prefix" if rank else "auto")
case = CASES["ssd"]
given = list(tensors(case, DEVICE)[0].values())
rule = partial(ring_attn.ssd, operator=operator_of(case))
refused("must be called with", rule, *given, chunk_size=16 + rank)
refused("A of ssd must be the same on all ranks", rule, *given[:2], given[2] * (1 + rank), *given[3:])
ends = torch.tensor([0, 5, 12])
places = ring_attn.positions(16, layout="zigzag") if size == 2 else None
if places is not None:
    ids = torch.where(places < 12, (places >= 5).int(), -1)[None].to(DEVICE)
    a = ring_attn.causal_conv1d(x, weight, layout="zigzag", cu_seqlens=ends)
    b = ring_attn.causal_conv1d(x, weight, layout="zigzag", segment_ids=ids)
    assert torch.equal(a, b)
dist.barrier()
dist.destroy_process_group()
