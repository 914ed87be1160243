"""Layers with a state, of torch tensors: from options and operands to a call."""

from typing import Any

import torch

from jax_core.masks.plan import Plan, named
from jax_core.recurrence.convolution import Convolution
from jax_core.recurrence.maps import Maps
from jax_core.recurrence.operators import Recurrence
from torch_bridge.backends.dispatch import backend_of
from torch_bridge.backends.dlpack import narrow_ids
from torch_bridge.call import autograd
from torch_bridge.call.programs import describe
from torch_bridge.mesh.rings import MeshArg
from torch_bridge.recurrence.operation import LayerWithState
from torch_bridge.tracing import constant

Settings = tuple[tuple[str, Any], ...]  # the fields of a layer and the layout


def layer_with_state(
    where: MeshArg, operands: tuple[torch.Tensor | None, ...], ids: torch.Tensor | None, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(y, last)`` of this rank's shards, computed by the backend of the first operand's device.

    ``operands``: the layer's, and the state that enters the sequence. ``ids``: of any integer dtype. ``settings``: the fields of a
    :class:`Recurrence`, which has an ``operator``, of a :class:`Convolution`, which has an ``activation``, or of :class:`Maps`, and
    the ``layout``."""
    first = operands[0]
    assert first is not None
    backend = backend_of(first.device)
    backend.check(first)
    if ids is not None and first.device.type != "xla":  # whose graphs take them as they are
        ids = narrow_ids(ids, "segment_ids")
    layout = settings["layout"]
    # A plan is given by its name: torch.compile passes text to what it does not trace, and no dataclass.
    arguments = tuple((settings | {"layout": layout.name if isinstance(layout, Plan) else layout}).items())
    y, last, _ = autograd.apply(_described(where, arguments, first.device), (*operands, ids))
    return y, last


@constant
def _described(where: MeshArg, settings: Settings, device: torch.device) -> str:
    """The call's key; under ``torch.compile`` made once, while tracing."""
    arguments = dict(settings)
    layout, ring = named(arguments.pop("layout")), backend_of(device).resolve(*where)
    kind = Recurrence if "operator" in arguments else Convolution if "activation" in arguments else Maps
    return describe(ring, LayerWithState(kind(**arguments), layout, ring.size), ())
