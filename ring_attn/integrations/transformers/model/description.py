"""What a context-parallel model says of itself."""

from ring_attn.integrations.transformers.layers.kernels import Operators
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
            *([f"states      {_operators(operators)}"] if plan.states else []),
        ]
    )


def _operators(operators: Operators | None) -> str:
    if operators is None:
        return "fla's and mamba_ssm's operators where they are installed, for 16 bits on GPUs; else plain JAX"
    given = [f"{name} by {getattr(operator, '__name__', operator)}" for name, operator in operators.items()]
    return ", ".join([*given, "the others by plain JAX"] if given else ["plain JAX"])


def _kernel(ring: Ring) -> str:
    program = last_on(ring.processes)
    taken, dtype = getattr(program, "taken", None), getattr(program, "dtype", None)  # None of an empty batch, too
    return "chosen at the first call" if taken is None else f"{taken}, in the last program on this ring ({dtype})"
