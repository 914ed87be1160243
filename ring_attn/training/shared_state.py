"""What all ranks of a ring must hold alike, compared by checksums: a sampler that gives each rank a batch of its own, or weights
from another seed on each, raises no error, and every number is then wrong."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn.ring import Ring
from ring_attn.sharding.marks import checksum
from ring_attn.sharding.reduction import agree, gather_from_ring, local_part
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.failures.events import recorded
from torch_bridge.mesh.rings import ProcessRing

_FIRST, _THEN_EVERY = 3, 100  # forwards before which parameters are compared
_EVALUATES = "model.eval() or torch.no_grad()"
_OTHER_WEIGHTS = (
    "Load or initialise the same weights on all ranks of a ring (one seed, or a broadcast), and sum the gradients over the ring "
    "once before each step of the optimizer: cp.reduce_gradients()"
)
_OTHER_BATCHES = (
    "The ranks of a ring hold different batches, and each must hold the same: let the Accelerator with the RingParallelism prepare "
    "the data loader, or sample by data-parallel ranks (DistributedSampler with the number and rank of rings), not by processes"
)
_ALONE = (
    "A forward of a sharded model is a collective call: evaluate on every rank of the ring with the same batches, not under "
    "`if rank == 0`; the others' calls were paired with it"
)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Answer(NamedTuple):
    """What a device was asked: whether each of ``checks`` is true, with what to do then. To be read once ``arrived``, None where
    that is now."""

    checks: Mapping[str, str]
    true: Tensor
    arrived: torch.cuda.Event | None


class SharedState:
    """What one model's ranks hold, compared with each forward. A GPU's answer is read at the next occasion, without a wait."""

    def __init__(self, ring: Ring) -> None:
        self._ring, self._forwards = ring, 0
        self._answers: list[_Answer] = []

    def compare(self, batch: Mapping[str, Tensor], like: Tensor, model: nn.Module, items: int | Tensor | None = None) -> None:
        """Once a forward, by all ranks: the whole ``batch`` each time, integers or :func:`fingerprints` of floats, and ``items``,
        the number of labels that a loss is divided by; at the first forwards, and now and then, the buffers, and the parameters
        that are not meant to differ. ``like``: one of the forward's inputs; a batch may be moved after it is sharded.

        Raises ValueError, then or when it is called next, on all ranks of the ring, by name of what differs.
        """
        self.settle()
        self._forwards += 1
        ring = backend_of(like.device).resolve(self._ring.mesh, self._ring.mesh_dim)
        if not isinstance(ring, ProcessRing) or ring.size == 1:
            return
        device = _sending_device(ring, like, model)
        labels = {name: x for name, x in batch.items() if "labels" in name}
        inputs = {name: x for name, x in batch.items() if name not in labels}
        sums = {f"the batch's {kind}": _together(x, device) for kind, x in (("inputs", inputs), ("labels", labels))}
        sums["num_items_in_batch"] = _number(items, device)
        mode = {_EVALUATES: torch.tensor(2 * model.training + torch.is_grad_enabled(), device=device)}
        advice = dict.fromkeys(mode, _ALONE) | dict.fromkeys(sums, _OTHER_BATCHES)
        self._compare(ring, mode | sums, "a forward of a sharded model", advice)
        if self._forwards <= _FIRST or self._forwards % _THEN_EVERY == 0:
            sums = {f"the {name}": bits(x).to(device) for name, x in _replicated(model, ring)}
            call = f"a forward of a sharded model with {len(sums)} parameters and buffers"
            agree(ring, device, call, "all ranks of a ring must have the same model")
            self._compare(ring, sums, call, dict.fromkeys(sums, _OTHER_WEIGHTS))

    def _compare(self, ring: ProcessRing, sums: dict[str, Tensor], call: str, advice: dict[str, str]) -> None:
        if not sums:
            return
        everywhere = gather_from_ring(torch.stack(list(sums.values())), ring, "what all ranks hold alike", call)
        checks = {f"{name} differ between the ranks of the {ring}": advice[name] for name in sums}
        self.ask(checks, (everywhere != everywhere[0]).any(0))

    def ask(self, checks: Mapping[str, str], true: Tensor) -> None:
        """Has :meth:`settle` raise for each of the ``checks`` that is true, at once on a CPU. ``checks``: with what to do then;
        ``true``: bool ``[checks]``."""
        self._answers.append(_Answer(checks, true.to("cpu", non_blocking=True), recorded(true.device)))
        if true.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Reads the answers that are due."""
        answers, self._answers = self._answers, []
        for answer in answers:
            if answer.arrived is not None:
                answer.arrived.synchronize()
            wrong = [check for check, true in zip(answer.checks, answer.true.tolist(), strict=True) if true]
            if wrong:
                advice = answer.checks[wrong[0]]
                others = sum(answer.checks[check] == advice for check in wrong) - 1
                more = f" (and {others} more of this kind)" if others else ""
                raise ValueError(f"{wrong[0]}{more}. {advice}")


def _sending_device(ring: ProcessRing, like: Tensor, model: nn.Module) -> torch.device:
    """Where the ring's collectives take tensors from. Inputs may still be on the host where a wrapper of the model moves them."""
    if dist.get_backend(ring.groups[0]) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return next(model.parameters(), like).device if like.device.type == "cpu" else like.device


def fingerprints(floats: Tensor) -> Tensor:
    """int64 ``[batch, seq]``, of floats ``[batch, seq, ...]``: the sum of each token's bits, so that they need not be kept."""
    floats = floats.detach()
    floats = torch.view_as_real(floats) if floats.is_complex() else floats
    bits = floats.contiguous().view(_BITS[floats.dtype.itemsize])
    return bits.sum(list(range(2, bits.ndim)), dtype=torch.int64) if bits.ndim > 2 else bits.long()


def _number(items: int | Tensor | None, device: torch.device) -> Tensor:
    """int64 ``[]``: the bits of a count, -1 for none."""
    if items is None:
        return torch.tensor(-1, device=device)
    return torch.as_tensor(items).detach().reshape(-1)[:1].double().view(torch.int64)[0].to(device)


def _together(entries: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """int64 ``[]``, of all entries at their places."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return sum((checksum(entries[name]).to(device) * place for place, name in enumerate(sorted(entries), 1)), zero)


def bits(parameter: Tensor) -> Tensor:
    """int64 ``[]``: the sum of the bit patterns of what is here of a parameter."""
    local = local_part(parameter.detach())
    local = torch.view_as_real(local) if local.is_complex() else local
    return local.view(_BITS[local.dtype.itemsize]).sum(dtype=torch.int64) + hash(tuple(local.shape)) % (1 << 31)


def _replicated(model: nn.Module, ring: ProcessRing) -> Iterable[tuple[str, Tensor]]:
    """The parameters and buffers of which every rank of the ring holds the same: FSDP's and tensor parallelism's shards over these
    ranks differ by design."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            local = local_part(tensor)
            if local.device.type != "meta" and local.dtype.itemsize in _BITS and not _split_over(tensor, ring):
                yield f"{kind} {name}", tensor


def _split_over(parameter: Tensor, ring: ProcessRing) -> bool:
    """Whether a DTensor is split along a dimension of its mesh on which ranks of the ring are apart."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return False
    places = [where[0].tolist() for rank in ring.ranks if len(where := (mesh.mesh == rank).nonzero())]
    apart = [len(set(dim)) > 1 for dim in zip(*places, strict=True)]
    placements = getattr(parameter, "placements", ())
    return any(differ and not placement.is_replicate() for differ, placement in zip(apart, placements, strict=True))
