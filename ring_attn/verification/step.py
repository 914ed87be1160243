"""A training step on the ring against the same step in one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import NamedTuple

import torch
from torch import Tensor

from jax_core.masks.plan import Plan
from ring_attn.ring import Ring
from ring_attn.sharding.reduction import agree
from ring_attn.verification.ranks import CALL, everywhere, known_cause, largest_of_all, of_rank_0, off_by
from ring_attn.verification.runs import Run, alone, repeated_randomness, run_step
from ring_attn.verification.verdict import TOLERANCE, Verdict, largest, tolerance
from torch_bridge.mesh.rings import ProcessRing
from torch_bridge.mesh.trial import Trial
from torch_bridge.start.runtime import start

_OTHER_PARAMETERS = (
    "the ranks begin with other parameters: initialise or load the same on all ranks of a ring (one seed before the model is made, "
    "or a broadcast)"
)

Step = Callable[..., object]
Values = dict[tuple[str, str], Tensor]  # by what it is ("step 1", "after") and the parameter's name

_MUST_AGREE = "verify compares parameters: on every rank of the ring the step must train the same model for as many steps"
_SMALLEST = 1e-3  # of the largest gradient of all: what a parameter's own is measured by at least
_SIGNIFICANT = 0.05  # of the same measure: below it an optimizer that goes by the gradient's sign follows rounding
_OF_UPDATES = 50  # times a gradient's tolerance: what the error of a significant one may become in an update
_UNSEEN = 1e-2  # times that tolerance, relative to the parameter: where its update is not known
_GRADIENT, _UPDATE = "the gradient of ", "what became of "


class _Pair(NamedTuple):
    """Both runs of this rank, and of both what this rank compares: the reference is that of the ring's rank 0."""

    ring: Run
    process: Run
    ring_values: Values
    process_values: Values
    reference: Values

    @property
    def device(self) -> torch.device:
        return next(iter(self.reference.values())).device


@dataclass(frozen=True)
class Comparison:
    """``errors``: by what is compared; ``wrong``: those above what is allowed. ``reasons``: what is wrong, in words.
    ``comparable``: whether both runs did what they were to do. ``allowed``: the tolerance of gradients. ``aside``: what is to be
    said of it."""

    pair: "_Pair"
    errors: dict[str, float]
    wrong: set[str]
    reasons: list[str]
    comparable: bool
    allowed: float
    aside: str


def verify_step(step: Step, ring: Ring) -> Verdict:
    """See :func:`ring_attn.verify`."""
    result = compare(step, ring)
    steps = result.pair.ring.steps
    what = f"{steps} steps of the optimizer" if steps else "gradients and parameters (no optimizer of torch made a step)"
    if steps == 1:
        what = "1 step of the optimizer (two would see what it leaves behind)"
    name = getattr(step, "__name__", type(step).__name__)
    tried = f"{name}, {what}, {len(result.pair.ring.after)} parameters, {ring.size} ranks, layout {ring.layout}{result.aside}"
    return Verdict(tried, result.errors, None, result.reasons)


def compare(step: Step, ring: Ring) -> Comparison:
    """The step on the ring, and in one process. Collective of the job, as the first ring call is."""
    processes = ring.processes
    start(processes)  # as ranks of one job: what comes first in one process must not start JAX by itself
    with repeated_randomness() as again:
        sharded = _run(step, ring, None)
        again()
        expected = _run(step, ring, alone(ring))
        pair = _paired(sharded, expected, processes)
        errors = _errors(pair, processes)
        allowed = largest_of_all([tolerance(_dtypes(sharded) | _dtypes(expected))], processes, pair.device)[0]
        reasons, comparable = _reasons(pair, errors, processes, allowed)
        if reasons and comparable:
            again()
            unrepeatable = _unrepeatable(pair, _paired(sharded, _run(step, ring, alone(ring)), processes), processes, allowed)
            reasons, comparable = (unrepeatable, False) if unrepeatable else (reasons, True)
    wrong = {name for name, (error, _) in errors.items() if not error <= _allowed(name, pair, allowed)}
    half = ", in half precision: only mistakes above 5 % are seen" if allowed > TOLERANCE else ""
    aside = (", without dropout" if sharded.dropout else "") + half
    return Comparison(pair, {name: max(both) for name, both in errors.items()}, wrong, reasons, comparable, allowed, aside)


def _run(step: Step, ring: Ring, trial: Trial | None) -> Run:
    """On the ring; or, in a trial, with each process by itself: a plan is for the ranks that it was made for, and so may a strategy
    be."""
    given = ring
    if trial is not None:
        given = replace(ring, layout="contiguous" if isinstance(ring.layout, Plan) else ring.layout, strategy="auto")
    try:
        return run_step(_with_ring(step, given), Trial() if trial is None else trial)
    except Exception as error:
        where = "on the ring" if trial is None else "in one process: ring.size is 1, and so is torch's world where it is the ring"
        error.add_note(f"This was verify's run of the step {where}.")
        raise


def _with_ring(step: Step, ring: Ring) -> Callable[[], object]:
    """Of a step that takes none, the ring is its own affair."""
    parameters = signature(step).parameters
    if "ring" in parameters:
        return partial(step, ring=ring)
    needed = any(x.default is x.empty and x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD) for x in parameters.values())
    return partial(step, ring) if needed else step


# ------------------------------------------------------------------------------------------------- values


def _paired(sharded: Run, expected: Run, ring: ProcessRing) -> _Pair:
    shapes = {name: tuple(x.shape) for run in (sharded, expected) for name, x in run.after.items()}
    steps = max(len(x) for run in (sharded, expected) for x in (*run.gradients.values(), ()))
    device = next(iter(expected.after.values())).device if expected.after else torch.device("cpu")
    agree(ring, device, f"{CALL}: {steps} steps of {len(shapes)} parameters {sorted(shapes.items())}", _MUST_AGREE)
    sides = [_values(run, steps, shapes) for run in (sharded, expected)]
    reference = {key: of_rank_0(x, ring) for key, x in sides[1].items()}
    return _Pair(sharded, expected, sides[0], sides[1], reference)


def _values(run: Run, steps: int, shapes: Mapping[str, tuple[int, ...]]) -> Values:
    """Of all parameters in one order; the gradient of one that has none is zero, and what no optimizer had was zero before."""
    values: Values = {}
    for name, shape in sorted(shapes.items()):
        like = run.after.get(name, torch.zeros(shape))
        gradients = run.gradients.get(name, [])
        for step in range(steps):
            values[f"step {step + 1}", name] = gradients[step] if step < len(gradients) else torch.zeros_like(like)
        values["before", name], values["after", name] = run.before.get(name, torch.zeros_like(like)), like
    return values


def _steps(values: Values) -> list[str]:
    return sorted({what for what, _ in values if what.startswith("step")}, key=lambda what: int(what.split()[1]))


def _scale(reference: Values, what: str, name: str) -> float:
    """What the error of a gradient is relative to."""
    of_all = max((largest(x) for (other, _), x in reference.items() if other == what), default=0.0)
    return max(largest(reference[what, name]), _SMALLEST * of_all, 1e-30)


# ------------------------------------------------------------------------------------------------- errors


def _errors(pair: _Pair, ring: ProcessRing) -> dict[str, tuple[float, float]]:
    """By what it is of: the largest error of any rank on the ring, and in one process, against rank 0 in one process."""
    table: dict[str, tuple[float, float]] = {}
    for name in dict.fromkeys(name for _, name in pair.reference):
        for what in _steps(pair.reference):
            scale = _scale(pair.reference, what, name)
            expected = pair.reference[what, name]
            errors = [largest(side[what, name] - expected) / scale for side in (pair.ring_values, pair.process_values)]
            table[f"{_GRADIENT}{name}{_at(what, pair)}"] = errors[0], errors[1]
        errors = [_of_update(side, pair, name) for side in (pair.ring_values, pair.process_values)]
        table[_label(name)] = errors[0], errors[1]
    numbers = iter(largest_of_all([number for both in table.values() for number in both], ring, pair.device))
    return {name: (next(numbers), next(numbers)) for name in table}


def _at(step: str, pair: _Pair) -> str:
    return f" at {step}" if pair.ring.steps else ""


def _of_update(side: Values, pair: _Pair, name: str) -> float:
    """The error of a parameter at the end, relative to its update where that is known. An update that goes by the sign of a
    gradient is rounding where that is next to nothing, so only significant gradients' are compared."""
    reference = pair.reference
    error = (side["after", name] - reference["after", name]).abs()
    if name not in pair.process.before:
        return largest(error) / max(largest(reference["after", name]), 1e-30)
    significant = torch.ones_like(error, dtype=torch.bool)
    for what in _steps(reference):
        significant &= reference[what, name].abs() > _SIGNIFICANT * _scale(reference, what, name)
    update = largest(reference["after", name] - reference["before", name])
    ulp = torch.finfo(error.dtype).eps * largest(reference["after", name]) if error.dtype.is_floating_point else 0.0
    return largest(error[significant]) / max(update, 64 * ulp, 1e-30)


def _label(name: str) -> str:
    """Of what is no gradient: a parameter's name has no spaces, that of something else which the step returns is words."""
    return name if " " in name else _UPDATE + name


def _allowed(what: str, pair: _Pair, allowed: float) -> float:
    """``allowed``: for gradients."""
    if what.startswith(_GRADIENT):
        return allowed
    if not what.startswith(_UPDATE):
        return allowed
    return allowed * (_OF_UPDATES if what.removeprefix(_UPDATE) in pair.process.before else _UNSEEN)


# ------------------------------------------------------------------------------------------------- reasons


def _reasons(pair: _Pair, errors: Mapping[str, tuple[float, float]], ring: ProcessRing, allowed: float) -> tuple[list[str], bool]:
    """And whether the two runs are comparable."""
    ignored = _ignored(pair, ring)
    if ignored:
        return [ignored], False
    if any(rounding > _allowed(name, pair, allowed) for name, (_, rounding) in errors.items()):
        return [_about_the_ranks(pair, ring, allowed)], False
    wrong = [name for name, (error, _) in errors.items() if not error <= _allowed(name, pair, allowed)]
    if not wrong:
        return [], True
    reasons = [_about_gradients(pair, wrong, errors, ring, allowed)]
    same = all(torch.equal(a, b) for a, b in zip(pair.ring.drawn, pair.process.drawn, strict=True))
    if not everywhere(same, ring, pair.device):
        reasons.append(
            "the step draws other random numbers on the ring than in one process, as noise of the shape of a shard does: draw them "
            "for the whole sequence and shard them, or leave them out while you verify"
        )
    return reasons, True


def _ignored(pair: _Pair, ring: ProcessRing) -> str | None:
    """That the step goes over another ring than it is given."""
    others = [ranks for ranks in sorted(pair.process.trial.rings) if len(set(ranks) & set(ring.ranks)) > 1]
    used = everywhere(ring.ranks in pair.ring.trial.rings, ring, pair.device)
    if not everywhere(not others, ring, pair.device):
        return (
            f"the step makes a ring of its own of other ranks than the {ring} that verify was given, and goes over it "
            "in one process too: give verify the step's ring"
        )
    if not used:
        sizes = sorted({len(ranks) for ranks in pair.ring.trial.rings})
        went = f"rings of {', '.join(map(str, sizes))} process{'es' if sizes != [1] else ''}" if sizes else "no ring at all"
        return (
            f"nothing in the step went over the {ring}, so nothing is sharded over it: its calls went over {went}. Use the ring "
            "that the step is given (or a mesh whose dimension of the sequence has these ranks: sizes or names may be swapped)"
        )
    return None


def _about_the_ranks(pair: _Pair, ring: ProcessRing, allowed: float) -> str:
    """What differs between ranks that each run the step by themselves."""
    before = [off_by(pair.process_values["before", name], x) for (what, name), x in pair.reference.items() if what == "before"]
    if not everywhere(max(before, default=0.0) <= allowed, ring, pair.device):
        return _OTHER_PARAMETERS
    return (
        "the ranks hold different batches: in one process each gets a result of its own. All ranks of a ring need the same whole "
        "batch (sample by data-parallel ranks, not by processes), and the same seed where random numbers are drawn"
    )


def _about_gradients(
    pair: _Pair, wrong: list[str], errors: Mapping[str, tuple[float, float]], ring: ProcessRing, allowed: float
) -> str:
    begun = [off_by(x, of_rank_0(x, ring)) for (what, _), x in pair.ring_values.items() if what == "before"]
    if not everywhere(max(begun, default=0.0) <= allowed, ring, pair.device):
        return _OTHER_PARAMETERS
    gradients = [name for name in wrong if name.startswith(_GRADIENT)]
    worst = max(gradients or wrong, key=lambda name: errors[name][0])
    if not gradients:
        return (
            f"the optimizer gets the right gradients and makes something else of them (worst {worst}): do the learning rate, "
            "weight decay, or what the step does to parameters by itself depend on the ring?"
        )
    steps = _steps(pair.reference)
    first = next(what for what in steps if any(name.endswith(_at(what, pair)) for name in gradients))
    flat = [
        torch.cat([x.flatten() for (other, _), x in side.items() if other == first]) for side in (pair.ring_values, pair.reference)
    ]
    known = known_cause(flat[0], flat[1], ring, allowed)
    if first != steps[0]:
        late = (
            f"gradients are right before {first} and wrong there: by what an earlier step left (zero_grad?) or made of parameters "
            "(a learning rate?)"
        )
        return f"{late} {known}" if known else late
    several = f"{sum(name.endswith(_at(first, pair)) for name in gradients)} of {len(gradients_of(pair, first))}"
    return known or (
        f"the gradients that the optimizer gets differ: {several}{_at(first, pair)}, worst {worst}. Is the whole batch the same on "
        "all ranks? Then positions, labels, masks, layout or dim of the shards, what divides the loss, clipping before the sum; "
        "ring_attn.verify(model, batch) compares the model alone"
    )


def gradients_of(pair: _Pair, what: str) -> list[Tensor]:
    return [x for (other, _), x in pair.reference.items() if other == what]


def _unrepeatable(pair: _Pair, again: _Pair, ring: ProcessRing, allowed: float) -> list[str]:
    """The reason that explains all others: in one process the step is not even what it was in one process."""
    steps = _steps(pair.process_values)
    apart = [
        largest(again.process_values[key] - x) / _scale(pair.process_values, *key)
        for key, x in pair.process_values.items()
        if key[0] in steps
    ]
    begun = [off_by(again.process_values[key], x) for key, x in pair.process_values.items() if key[0] == "before"]
    if not everywhere(max(begun, default=0.0) <= allowed, ring, pair.device):
        return [
            "the step does not begin anew: called again it begins with other parameters. It must make the model and the optimizer "
            "itself, from one seed or one checkpoint"
        ]
    if not everywhere(max(apart, default=0.0) <= allowed, ring, pair.device):
        return [
            "the step is not repeatable: twice in one process it gives two results, so none can be compared. Give it the same "
            "batches each time (not the next ones of a loader), and a seed of its own for what it draws"
        ]
    return []


def _dtypes(run: Run) -> set[torch.dtype]:
    return run.trial.dtypes | {x.dtype for gradients in run.gradients.values() for x in gradients}
