"""What a context-parallel model says of itself."""

import torch

from ring_attn.integrations.transformers.layers.kernels import Operators, operator_for
from ring_attn.integrations.transformers.layers.operators import FUNCTIONS
from ring_attn.integrations.transformers.model.plan import Plan
from ring_attn.memory.formula import Checkpoint
from ring_attn.ring import Ring
from torch_bridge.call.programs import last_on


def described(plan: Plan, ring: Ring, checkpoint: Checkpoint, operators: Operators | None, attached: bool) -> str:
    """In lines, to be printed. It communicates nothing."""
    layers = ", ".join(f"{count} of the {part}" if len(plan.layers) > 1 else str(count) for part, count in plan.layers.items())
    dim = "" if ring.mesh_dim is None else f', mesh dimension "{ring.mesh_dim}"'
    layout = ring.layout if isinstance(ring.layout, str) else "a plan of ring_attn.balance"
    return "\n".join(
        [
            f"ContextParallel of {type(plan.model).__name__}{'' if attached else ' (removed)'}",
            f"ring        rank {ring.rank} of {ring.size}{dim}",
            f"layout      {layout}",
            f"layers      {layers}",
            f"strategy    {ring.strategy}; ring_attn.Explaining tells which kernel each call takes",
            f"kernel      {_kernel(ring)}",
            f"checkpoint  {checkpoint}",
            *([f"states      {_operators(plan, operators)}"] if plan.states else []),
        ]
    )


def _operators(plan: Plan, operators: Operators | None) -> str:
    """Of 16 bits, for which alone it is asked what is installed."""
    names = sorted({FUNCTIONS[name] for layer in plan.states.values() for name in layer if name in FUNCTIONS})
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda" if torch.cuda.is_available() else "cpu")
    taken = {name: operator_for(name, operators, like) for name in names}
    said = [f"{name} by {getattr(operator, '__name__', operator)}" for name, operator in taken.items() if operator is not None]
    return ", ".join([*said, "all else by plain JAX"]) + (" (16 bits)" if said and operators is None else "")


def _kernel(ring: Ring) -> str:
    program = last_on(ring.processes)
    taken, dtype = getattr(program, "taken", None), getattr(program, "dtype", None)  # None of an empty batch, too
    return "chosen at the first call" if taken is None else f"{taken}, in the last program on this ring ({dtype})"
