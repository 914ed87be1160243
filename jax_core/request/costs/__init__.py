"""What a call costs: predicted from its schedule and a machine's measured figures, with no array computed and no backend started.

``plan`` lists what every rank does, stage by stage, from the schedule that the ring runs; ``estimate`` adds the stages up in closed
form; ``simulation`` plays them through, rank by rank. ``machine`` holds the figures, fitted by benchmarks/scaling.py.
docs/scaling.md explains the model and shows how far it is from what was measured.
"""

from jax_core.request.costs.estimate import Times, both, estimate
from jax_core.request.costs.machine import Kernel, Link, Machine, Pass, load
from jax_core.request.costs.plan import Send, Stage, ring_stages
from jax_core.request.costs.simulation import simulate
from jax_core.request.costs.work import Call

__all__ = [
    "Call",
    "Kernel",
    "Link",
    "Machine",
    "Pass",
    "Send",
    "Stage",
    "Times",
    "both",
    "estimate",
    "load",
    "ring_stages",
    "simulate",
]
