"""How much memory a step of training takes, before it runs: :func:`plan`."""

from ring_attn.memory.formula import Levers, Peak, Setting, peak
from ring_attn.memory.planning import Plan, plan
from ring_attn.memory.shapes import Shapes

__all__ = ["Levers", "Peak", "Plan", "Setting", "Shapes", "peak", "plan"]
