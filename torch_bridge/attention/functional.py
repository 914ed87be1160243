"""Attention of torch tensors: from options and operands to a call."""

from typing import Any

import torch

from jax_core.masks.plan import Plan, named
from jax_core.options import Options
from torch_bridge.attention.operands import Where, gather
from torch_bridge.attention.operation import Attention
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.call import autograd
from torch_bridge.call.call_cache import Repeat
from torch_bridge.call.programs import Names, describe

Settings = tuple[tuple[str, Any], ...]  # the fields of Options


def differentiable_attention(
    where: Where,
    tensors: dict[str, torch.Tensor | None],
    dropout_seed: int | torch.Tensor | None,
    names: Names = (),
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of this rank's shards, computed by the backend of the query's device.

    ``where``: mesh and mesh dimension, as the backend's ``resolve`` takes them. ``tensors``: keyed by the field names of
    :class:`jax_core.strategies.contract.Operands`; query, key and value are ``[batch, seq, heads, dim]``, ids of any integer dtype.
    ``dropout_seed``: 64 bits, or a tensor of one integer, which is not read here. ``options``: the fields of :class:`Options`.
    ``names``: the argument names to use in errors.
    """
    # JAX traces a mask function anew in every call, so torch.compile must not trace that call.
    run = _call if options["mask_mod"] is None else _untraced_call
    return run(where, tensors, dropout_seed, names, options)


def _call(
    where: Where,
    tensors: dict[str, torch.Tensor | None],
    dropout_seed: int | torch.Tensor | None,
    names: Names,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    query = tensors["query"]
    assert query is not None
    options, arrays = gather(backend_of(query.device), where, tensors, dropout_seed, options)
    out, lse = autograd.apply(_described(where, _constants(options), query.device, names), arrays)
    return out, lse


_untraced_call = torch.compiler.disable(_call)


def repetition(where: Where, tensors: dict[str, torch.Tensor | None], names: Names, options: dict[str, Any]) -> Repeat:
    """A call that has been made, as a function of other tensors of the same forms. For calls whose operands are these tensors."""
    query = tensors["query"]
    assert query is not None
    return autograd.repetition(_described(where, _constants(options), query.device, names), tensors)


def _constants(options: dict[str, Any]) -> Settings:
    """A plan is given by its name: torch.compile passes text to what it does not trace, and no dataclass."""
    layout = options["layout"]
    return tuple((options | {"layout": layout.name if isinstance(layout, Plan) else layout}).items())


@torch.compiler.assume_constant_result
def _described(where: Where, settings: Settings, device: torch.device, names: Names) -> str:
    """The call's key; under ``torch.compile`` made once, while tracing."""
    given = dict(settings)
    options = Options(**{**given, "layout": named(given["layout"])})
    return describe(backend_of(device).resolve(*where), Attention(options), names)
