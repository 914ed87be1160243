"""Arrays that a kernel's call changes in place: which of them XLA may take for one.

XLA makes one of equal arrays, and where it puts a call into a fusion with slices of its operands, results that are aliased to that
one share its memory. So of the arrays that a call changes no two may be equal.
"""

import re
from collections.abc import Iterator
from typing import Any

import jax
from hlo import computations

Number = Any  # equal ones are of equal values
_ALIASING = r"output_to_operand_aliasing=\{((?:\{[^}]*\}: (?:\([^)]*\)|\d+)(?:, )?)+)\}"  # {0}: (1, {}), {1}: (2, {})


def equal_in_jaxpr(closed: Any) -> list[str]:
    """The calls of a traced program that change two arrays which are equal by what computed them, as text."""
    outer = [("argument", i) for i in range(len(closed.jaxpr.invars))]
    return list(_walk(closed.jaxpr, closed.consts, outer))


def changing_calls(closed: Any) -> int:
    """How many calls of a traced program change more than one array."""
    return sum(len(_aliased(eqn)) > 1 for eqn in _every(closed.jaxpr))


def equal_in_program(text: str) -> list[str]:
    """The calls of a compiled program with one operand for two changed results."""
    found = []
    for operations in computations(text).values():
        for op in operations:
            aliasing = re.search(_ALIASING, op.text)
            if op.kind != "custom-call" or not aliasing:
                continue
            changed = [op.operands[int(number)] for number in re.findall(r"\}: \(?(\d+)", aliasing[1])]
            if len(set(changed)) < len(changed):
                found.append(op.text.strip()[:200])
    return found


def _walk(jaxpr: Any, consts: Any, given: list[Number]) -> Iterator[str]:
    numbers: dict[Any, Number] = dict(zip(jaxpr.invars, given, strict=True))
    numbers |= {var: ("constant", id(value)) for var, value in zip(jaxpr.constvars, consts, strict=True)}

    def number(atom: Any) -> Number:
        # The text tells 0.0 and -0.0 apart, which are equal.
        return ("literal", str(atom.aval), repr(atom.val)) if isinstance(atom, jax.extend.core.Literal) else numbers[atom]

    for eqn in jaxpr.eqns:
        operands = [number(atom) for atom in eqn.invars]
        changed = [operands[i] for i in _aliased(eqn)]
        if len(set(changed)) < len(changed):
            yield str(eqn)[:200]
        inner = list(_inner(eqn))
        for body, body_consts in inner:
            yield from _walk(body, body_consts, _given_to(body, eqn, operands))
        key = (eqn.primitive.name, tuple(operands), id(eqn) if inner or eqn.effects else _settings(eqn))
        numbers |= {var: (key, i) for i, var in enumerate(eqn.outvars)}


def _settings(eqn: Any) -> str:
    return str(sorted((name, str(value)) for name, value in eqn.params.items()))


def _given_to(body: Any, eqn: Any, operands: list[Number]) -> list[Number]:
    """A call's body has its operands. What a loop carries is its own in each turn, whatever it started from."""
    if eqn.primitive.name in ("scan", "while", "cond") or len(body.invars) != len(operands):
        return [(id(eqn), i) for i in range(len(body.invars))]
    return operands


def _aliased(eqn: Any) -> list[int]:
    """The operands that a call changes."""
    aliases = eqn.params.get("input_output_aliases") or ()
    return [pair[0] for pair in (aliases.items() if isinstance(aliases, dict) else aliases)]


def _inner(eqn: Any) -> Iterator[tuple[Any, Any]]:
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
        if hasattr(value, "jaxpr"):
            yield value.jaxpr, value.consts
        elif hasattr(value, "eqns"):
            yield value, ()


def _every(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for body, _ in _inner(eqn):
            yield from _every(body)
