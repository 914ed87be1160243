"""Attention of torch tensors: from options and operands to a call."""

from typing import Any

import torch

from jax_core.masks.plan import Plan, named
from jax_core.operands import Operands
from jax_core.options import Options
from torch_bridge.attention.operands import gather
from torch_bridge.attention.operation import Attention
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.call import autograd
from torch_bridge.call.call_cache import CachedCall
from torch_bridge.call.programs import Names, describe
from torch_bridge.mesh.rings import MeshArg
from torch_bridge.tracing import constant, untraced

Settings = tuple[tuple[str, Any], ...]  # the fields of Options


def differentiable_attention(
    where: MeshArg, operands: Operands[torch.Tensor], dropout_seed: int | torch.Tensor | None, options: Options, names: Names
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of this rank's shards, computed by the backend of the query's device.

    ``where``: mesh and mesh dimension, as the backend's ``resolve`` takes them. ``operands``: query, key and value are ``[batch,
    seq, heads, dim]``, ids of any integer dtype, without the dropout's seed. ``dropout_seed``: 64 bits, or a tensor of one integer,
    which is not read here. ``names``: the caller's names of operands and options, for errors.
    """
    # JAX traces a mask function anew in every call, so torch.compile must not trace that call.
    run = _call if options.mask_mod is None else _untraced_call
    return run(where, operands, dropout_seed, options, names)


def _call(
    where: MeshArg, operands: Operands[torch.Tensor], dropout_seed: int | torch.Tensor | None, options: Options, names: Names
) -> tuple[torch.Tensor, torch.Tensor]:
    device = operands.query.device
    options, arrays = gather(backend_of(device), where, operands, dropout_seed, options)
    out, lse = autograd.apply(_described(where, options, device, names), arrays)
    return out, lse


_untraced_call = untraced(_call)


def cached_call(where: MeshArg, operands: Operands[torch.Tensor], options: Options, names: Names) -> CachedCall:
    """A call that has been made, as a function of other operands of the same specs. For calls with these operands alone."""
    return autograd.cached_call(_described(where, options, operands.query.device, names), operands.given)


def _described(where: MeshArg, options: Options, device: torch.device, names: Names) -> str:
    """The call's key."""
    if not torch.compiler.is_compiling():
        return describe(backend_of(device).resolve(*where), Attention(options), names)
    # Dynamo hands text and tuples to what it does not trace, and no dataclasses: a plan is given by its name.
    values = {name: getattr(options, name) for name in Options.__dataclass_fields__}
    values["layout"] = values["layout"].name if isinstance(values["layout"], Plan) else values["layout"]
    return _described_in_graph(where, tuple(values.items()), device, names)


@constant
def _described_in_graph(where: MeshArg, settings: Settings, device: torch.device, names: Names) -> str:
    """Called once, while tracing."""
    values = dict(settings)
    options = Options(**{**values, "layout": named(values["layout"])})
    return describe(backend_of(device).resolve(*where), Attention(options), names)
