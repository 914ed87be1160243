"""One run of a training step: what its optimizers were given and what they made of it."""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ring_attn.ring import Ring
from torch_bridge.call import call_cache
from torch_bridge.mesh.trial import Trial, trying

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@dataclass
class Run:
    """``gradients``: by parameter, what the optimizer was given at each of its steps; ``before`` and ``after``: the parameters
    before its first step, where it had one, and at the end. Whole tensors, also of FSDP's shards. ``steps``: of the optimizer that
    made the most; 0 where gradients are those left in ``.grad``. ``drawn``: the state of the generators at the end. ``trial``: the
    rings and dtypes of its calls. ``dropout``: whether any was left out."""

    gradients: dict[str, list[Tensor]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    steps: int
    drawn: list[Tensor]
    trial: Trial
    dropout: bool


@dataclass
class _Seen:
    """What optimizers were given, by the identity of the parameter, which is kept alive."""

    parameters: dict[int, Tensor] = field(default_factory=dict)
    before: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, list[Tensor]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)

    def step(self, optimizer: Optimizer, *_: object) -> None:
        self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        for parameter in (x for group in optimizer.param_groups for x in group["params"] if x.grad is not None):
            key = id(parameter)
            if key not in self.parameters:
                self.parameters[key], self.before[key] = parameter, whole(parameter)
            self.gradients.setdefault(key, []).append(whole(parameter.grad))


def run_step(step: Callable[[], object], trial: Trial) -> Run:
    """``step()``, which returns the trained model, with every dropout left out."""
    seen = _Seen()
    if "torch._dynamo" in sys.modules:  # graphs hold what a ring was when they were traced
        torch._dynamo.reset()
    handle = register_optimizer_step_pre_hook(seen.step)
    try:
        with trying(trial), _without_dropout() as dropped:
            trained = named_parameters(step())
    finally:
        handle.remove()
        call_cache.clear()
    gradients = {name: seen.gradients[id(x)] for name, x in trained.items() if id(x) in seen.gradients}
    before = {name: seen.before[id(x)] for name, x in trained.items() if id(x) in seen.before}
    if not seen.steps:
        gradients = {name: [whole(x.grad)] for name, x in trained.items() if x.grad is not None}
    after = {name: whole(x) for name, x in trained.items()}
    return Run(gradients, before, after, max(seen.steps.values(), default=0), _states(), trial, bool(dropped))


def named_parameters(trained: object) -> dict[str, Tensor]:
    """The parameters of a module, of several by their names or places, or of nothing but tensors; without the names that wrappers
    give them."""
    parts = trained if isinstance(trained, Mapping) else {"": trained} if isinstance(trained, nn.Module) else None
    if parts is None:
        parts = {str(place): x for place, x in enumerate(trained)} if isinstance(trained, Iterable) else {"": trained}
    named: dict[str, Tensor] = {}
    for name, x in parts.items():
        if isinstance(x, nn.Module):
            named |= {f"{name}.{suffix}" if name else suffix: p for suffix, p in x.named_parameters()}
        elif isinstance(x, Tensor):
            named[str(name)] = x
        else:
            raise ValueError(
                f"verify needs the model that the step has trained, to compare its parameters: the step must return a module, or "
                f"several (a list, a dict), got {type(x).__name__}; end it with `return model`"
            )
    return {_unwrapped(name): x for name, x in named.items()}


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """A copy, whole where it is a DTensor, dense where it is sparse."""
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.to_dense() if tensor.layout != torch.strided else tensor.clone()


def alone(ring: Ring) -> Trial:
    """A run in which each process of the ring is by itself. A collective of nobody but this process."""
    processes = ring.processes
    rank = processes.ranks[processes.rank]
    return Trial(processes.ranks, rank, _group_of_one(rank, dist.group.WORLD))


@cache  # by the default group too: a job may destroy its groups and begin anew
def _group_of_one(rank: int, world: "dist.ProcessGroup") -> "dist.ProcessGroup":
    del world
    group = dist.new_group([rank], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this process is a member
    return group


@contextmanager
def repeated_randomness() -> Iterator[Callable[[], None]]:
    """Gives what makes all generators draw what they would have drawn; they are at the end as they were."""
    python, states = random.getstate(), _states()
    numpy = sys.modules["numpy"].random if "numpy" in sys.modules else None
    of_numpy = numpy.get_state() if numpy else None

    def again() -> None:
        random.setstate(python)
        torch.set_rng_state(states[0])
        for device, state in enumerate(states[1:]):
            torch.cuda.set_rng_state(state, device)
        if numpy:
            numpy.set_state(of_numpy)

    try:
        yield again
    finally:
        again()


def _states() -> list[Tensor]:
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *of_devices]


@contextmanager
def _without_dropout() -> Iterator[list[str]]:
    """Shards of hidden states draw other patterns than the whole; attention's dropout, on the ring, does not, and stays. The list
    names those that were left out."""
    dropped: list[str] = []

    def leaving_out(name: str) -> Callable[..., Tensor]:
        def same(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            if training and p > 0 and not torch.compiler.is_compiling():
                dropped.append(name)
            return input

        return same

    with ExitStack() as stack:
        for name in _DROPOUTS:
            stack.enter_context(patch.object(nn.functional, name, leaving_out(name)))
        yield dropped
