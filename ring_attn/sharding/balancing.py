"""``balance`` for torch: the number of ranks may be a ring, and lengths may be tensors."""

from typing import Any

from torch import Tensor

from jax_core.masks.balance import balance as plan_for
from jax_core.masks.plan import Plan
from ring_attn.ring import Ring
from torch_bridge.job.mesh import MeshDim, MeshLike, resolve


def balance(length: int, ranks: "int | Ring | MeshLike" = None, *, mesh_dim: MeshDim = None, **mask: Any) -> Plan:
    """A layout under which all ranks of a ring have nearly equal work: ``layout=plan``, or ``Ring(layout=plan)``, wherever a layout
    is taken. Print it to see its imbalance.

    ``length``: of the whole sequence. ``ranks``: a number, a :class:`Ring`, or what :func:`ring_attention` takes as ``mesh`` (with
    ``mesh_dim``). ``mask`` and the rest: the keyword arguments of :func:`jax_core.balance`, for instance ``causal=True,
    documents=lengths``, or ``cu_seqlens``, which may be tensors. Every rank calls it with the same, and gets an equal plan.

    Nothing is sent, and no JAX is loaded. Raises ValueError as :func:`jax_core.balance`.
    """
    if isinstance(ranks, Ring):
        size = ranks.size
    else:
        size = ranks if isinstance(ranks, int) else resolve(ranks, mesh_dim).size
    given: dict[str, Any] = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in mask.items()}
    return plan_for(length, size, **given)
