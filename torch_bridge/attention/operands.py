"""Arranges the tensors of a call as operands in one fixed order, the same for every backend: completes the ids of both sides,
turns the dropout seed into words, traces mask functions, and lifts out the arrays that they close over."""

from dataclasses import replace

import jax
import numpy as np
import torch

from jax_core.masks.functions import from_mask_mod
from jax_core.operands import Operands
from jax_core.options import Options
from jax_core.request.spec import broadcast_ids
from torch_bridge.backends.dlpack import narrow_ids, to_torch
from torch_bridge.backends.interface import Backend
from torch_bridge.mesh.protocol import Tensors
from torch_bridge.mesh.rings import MeshArg

_IDS = [name for name in Operands._fields if name.endswith("_ids")]


def gather(
    backend: Backend,
    where: MeshArg,
    operands: Operands[torch.Tensor],
    dropout_seed: int | torch.Tensor | None,
    options: Options,
) -> tuple[Options, Tensors]:
    """Returns the options without ``mask_mod``, and the operands in the order of a request's specs."""
    backend.check(operands.query)
    ids = {name: _narrow(x, name) for name in _IDS if (x := getattr(operands, name)) is not None}
    seed = _seed_words(dropout_seed, operands.query.device)
    arrays = broadcast_ids(operands.replaced(**ids, dropout_seed=seed)).given
    return (options, arrays) if options.mask_mod is None else _lift_mask_mod(backend, where, options, arrays)


def _narrow(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """In 32 bits, but in torch-xla's graphs, which take them as they are."""
    return tensor if tensor.device.type == "xla" else narrow_ids(tensor, name)


def _seed_words(seed: int | torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """The 64-bit seed as two int32 words on ``device``, low word first; JAX reads them as unsigned."""
    if isinstance(seed, torch.Tensor):  # drawn in a graph, where it has no value yet
        whole = seed.to(torch.int64).reshape(())
        low = (whole & 2**32 - 1 ^ 2**31) - 2**31  # as a signed word; torch 2.11 has no view of another dtype under vmap
        return torch.stack([low, whole >> 32]).to(torch.int32).to(device, non_blocking=True)
    if seed is None:
        return None
    first, second = (seed + 2**31) % 2**32 - 2**31, (seed // 2**32 + 2**31) % 2**32 - 2**31
    # Written on the device: a copy from the host would wait for everything queued there. In a graph a number would be a constant,
    # for which it is compiled; the words are data.
    written = device if device.type in ("cpu", "cuda") else torch.device("cpu")
    words = torch.full((2,), first, dtype=torch.int32, device=written)
    words[1:] = second  # no view of one int64: compiled by torch 2.11 that gives the low word twice
    return words.to(device)


def _lift_mask_mod(backend: Backend, where: MeshArg, options: Options, arrays: Tensors) -> tuple[Options, Tensors]:
    """Traces the mask function in its current state and appends the arrays that it closes over to the operands."""
    query = arrays[0]
    assert query is not None and options.mask_mod is not None
    with backend.tracing(backend.resolve(*where), query):
        predicate, constants = from_mask_mod(options.mask_mod)
        further = [_constant(array, query.device) for array in constants]
    return replace(options, mask_mod=None, predicates=(predicate,)), (*arrays, *further)


def _constant(array: jax.Array | np.ndarray, device: torch.device) -> torch.Tensor:
    """An array that a mask function closes over, with at least one dimension; one that is already on ``device`` stays there."""
    if isinstance(array, jax.Array) and array.platform() != "cpu" and device.type == "cuda" and len(array.devices()) == 1:
        tensor = to_torch(array).to(device)
    else:
        tensor = torch.from_numpy(np.array(array)).to(device, non_blocking=True)
    return tensor if tensor.dim() else tensor.reshape(1)
