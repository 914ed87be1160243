"""Reads a compiled program: its instructions as listed, what waits for what, and what runs in parallel with a rotation."""

import re
from collections.abc import Iterator
from typing import NamedTuple


class Op(NamedTuple):
    """An instruction: its kind, its name, the types of its results, and its text."""

    kind: str
    name: str
    types: str
    text: str

    @property
    def is_rotation(self) -> bool:
        return self.kind in ("collective-permute", "collective-permute-start")

    def called(self, word: str) -> str:
        """The computation that ``word`` (calls, body, condition) names."""
        return re.search(rf"\b{word}=%(\S+?)[,\s]", self.text)[1]

    @property
    def operands(self) -> list[str]:
        """The names of the instructions whose results it uses."""
        start, depth = self.text.index(f" {self.kind}(") + len(self.kind) + 1, 0
        for end in range(start, len(self.text)):
            depth += {"(": 1, ")": -1}.get(self.text[end], 0)
            if depth == 0:
                break
        return re.findall(r"%([^\s,()]+)", self.text[start:end])


Program = dict[str, list[Op]]


def operands_without_elements(lowered: str) -> list[str]:
    """The types of such operands of the ``shard_map``s in a program as JAX lowers it: what has crashed XLA."""
    heads = [line for line in lowered.splitlines() if "sdy.manual_computation(" in line]
    assert heads, "no shard_map, or lowered in another way"
    return [kind for line in heads for kind in re.findall(r"%\w+: (tensor<(?:\d+x)*0x[^>]*>)", line)]


def computations(program: str) -> Program:
    """The program's computations with their instructions as listed: each after those whose results it uses."""
    found: Program = {}
    for line in program.splitlines():
        head = re.match(r"(ENTRY )?%(\S+) \(.*\{$", line)
        if head:
            found[name := "ENTRY" if head[1] else head[2]] = []
        op = re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z-]*)\(", line)
        if op:
            found[name].append(Op(op[3], op[1], op[2], line))
    return found


def runs(program: Program, name: str = "ENTRY", times: int = 1) -> Iterator[tuple[str, int, list[Op]]]:
    """The entry and the bodies of its loops that contain rotations: name, number of runs, instructions."""
    yield name, times, program[name]
    for op in program[name]:
        if rotates(program, op):
            yield from runs(program, op.called("body"), times * trips(program, op))


def rotates(program: Program, loop: Op) -> bool:
    """Whether an instruction is a loop that contains a rotation, directly or in a nested loop."""
    return loop.kind == "while" and any(op.is_rotation or rotates(program, op) for op in program[loop.called("body")])


def trips(program: Program, loop: Op) -> int:
    """How often a loop's body runs: as XLA annotates it, or the limit in its condition (a scan counts from 0)."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.text)
    if known:
        return int(known[1])
    (end,) = (re.search(r"constant\((\d+)\)", op.text)[1] for op in program[loop.called("condition")] if op.kind == "constant")
    return int(end)


def beside(ops: list[Op], start: int) -> list[Op]:
    """What runs between a rotation's start and its end; nothing where the device waits for it."""
    op = ops[start]
    if op.kind == "collective-permute" or '"is_sync":true' in op.text:
        return []
    (done,) = (i for i, other in enumerate(ops) if f"collective-permute-done(%{op.name})" in other.text)
    return ops[start + 1 : done]


def waits_for(ops: list[Op]) -> dict[str, set[str]]:
    """For each instruction of a computation, everything that must finish before it can start."""
    found: dict[str, set[str]] = {}
    for op in ops:
        found[op.name] = set(op.operands).union(*(found.get(name, set()) for name in op.operands))
    return found


def gathers(program: Program) -> list[str]:
    """Collectives other than rotations."""
    words = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter")
    return [op.text.strip()[:150] for ops in program.values() for op in ops if op.kind.startswith(words)]


def kernels(program: Program, ops: list[Op]) -> list[Op]:
    """On a CPU: XLA's kernel is a loop over blocks; a loop that rotates is the ring's own."""
    return [op for op in ops if op.kind == "while" and not rotates(program, op)]


def without_a_kernel(program: Program) -> list[str]:
    """The rotations that no kernel can run beside: each waits for the rotation, or the rotation for it."""
    alone = []
    for name, _, ops in runs(program):
        waits, beside = waits_for(ops), kernels(program, ops)
        for rotation in (op for op in ops if op.is_rotation):
            if all(rotation.name in waits[kernel.name] or kernel.name in waits[rotation.name] for kernel in beside):
                alone.append(f"{name}: {rotation.name}")
    return alone
