"""Small faults planted one at a time, and which of them the tests see. Needs cosmic-ray, which makes the faults.

    python tools/mutants.py [MODULE ...] [--each 14] [--seed 0]     # changes the sources of this checkout meanwhile

Of each module so many faults are drawn; those that change annotations or docstrings alone are left out. A line says what became of
each (killed, survived, or timeout, which counts as killed), where, and what. docs/contributing/mutants.md has the score.
"""

import argparse
import ast
import contextlib
import difflib
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax  # noqa: F401  # here, so that the process of each fault has it
import pytest
import torch  # noqa: F401
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[1]
LIMIT = 180  # seconds for a fault
PACKED = ["tests/ring_attn/packed/test_packed.py", "-k", "not rings_of_two_and_four"]  # that one starts processes, for a minute
# Each with the narrowest tests that should see its faults.
TESTS = {
    "jax_core/kernels/merge.py": ["tests/jax_core/kernels/test_merge.py"],
    "jax_core/masks/layout.py": ["tests/jax_core/masks/test_layout.py"],
    "jax_core/masks/static.py": ["tests/jax_core/masks/test_static.py"],
    "jax_core/masks/areas.py": ["tests/jax_core/masks/test_balance.py"],
    "jax_core/masks/plan.py": ["tests/jax_core/masks/test_balance.py", "tests/jax_core/masks/test_layout.py"],
    "jax_core/masks/balance.py": ["tests/jax_core/masks/test_balance.py"],
    "jax_core/masks/builders.py": ["tests/jax_core/masks/test_builders.py"],
    "jax_core/strategies/ring/loop.py": ["tests/jax_core/strategies/ring", "tests/jax_core/strategies/test_traffic.py"],
    "torch_bridge/call/call_cache.py": ["tests/torch_bridge/call/test_call_cache.py"],
    "ring_attn/training/token_losses.py": ["tests/ring_attn/test_loss.py"],
    "ring_attn/training/loss.py": ["tests/ring_attn/test_loss.py"],
    "ring_attn/documents/reading.py": ["tests/ring_attn/test_documents.py"],
    "ring_attn/documents/positions.py": ["tests/ring_attn/test_documents.py"],
    "ring_attn/documents/cumulative.py": ["tests/ring_attn/test_documents.py", "tests/ring_attn/packed/test_packed.py"],
    "ring_attn/packed/placement.py": ["tests/ring_attn/packed/test_packed_placement.py"],
    "ring_attn/packed/batch.py": PACKED,
    "ring_attn/packed/documents.py": ["tests/ring_attn/test_documents.py", *PACKED],
}


def meaning(source: str) -> str:
    """Without what changes nothing that is computed."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            if getattr(node, name, None) is not None:
                setattr(node, name, ast.Constant(None))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node):
            node.body[0] = ast.Pass()
    return ast.dump(tree)


def faults(source: str) -> Iterator[str]:
    """The source with each fault that changes its meaning."""
    original = meaning(source)
    for name in operator_names():
        if "variable" in name.lower():  # these want to be told which
            continue
        for occurrence in range(10_000):
            changed = mutate_code(source, get_operator(name)(), occurrence)
            if changed is None:
                break
            with contextlib.suppress(SyntaxError):
                if meaning(changed) != original:
                    yield changed


def seen(tests: list[str]) -> str:
    """In a child, which loads the changed source; "killed", "survived" or "timeout"."""
    child = os.fork()
    if child == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])))
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.2)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def change(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    return " ".join(line.strip() for line in lines if line[:1] in "+-@" and line[:3] not in ("+++", "---"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", default=list(TESTS))
    parser.add_argument("--each", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.dont_write_bytecode = True  # a fault of the same size and second would be taken for the one before
    for module in options.modules:
        file = ROOT / module
        source = file.read_text(encoding="utf-8")
        every = sorted(set(faults(source)))
        drawn = random.Random(options.seed).sample(every, min(options.each, len(every)))
        if seen(TESTS[module]) != "survived":
            sys.exit(f"{module}: its tests fail without a fault")
        print(f"{module}: {len(drawn)} of {len(every)}", flush=True)
        try:
            for fault in drawn:
                file.write_text(fault, encoding="utf-8")
                print(f"{seen(TESTS[module])} | {module} | {change(source, fault)}", flush=True)
        finally:
            file.write_text(source, encoding="utf-8")


if __name__ == "__main__":
    main()
