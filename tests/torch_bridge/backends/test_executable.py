"""What is said of compiling, and what a program is compiled for."""

import logging
import time
from threading import Lock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ring_attn import Explaining, ring_attention
from torch_bridge.backends import executable
from torch_bridge.backends.executable import Executable


@pytest.fixture
def unannounced(monkeypatch):
    monkeypatch.setattr(executable, "LONG", 0.05)
    monkeypatch.setattr(executable, "_announced", Lock())


def slow(seconds: float) -> Executable:
    """A sum that takes so long to trace."""

    def traced(a, b):
        time.sleep(seconds)
        return (a if b is None else a + b,)

    return Executable(jax.jit(traced), "forward", "a sum", loud=True)


def test_each_program_is_told_of_with_its_time(caplog):
    caplog.set_level(logging.INFO, "ring_attn")
    program = slow(0.1)
    for _ in range(2):
        np.testing.assert_array_equal(program(jnp.ones(2), jnp.ones(2))[0], 2)
    (said,) = program.compilations
    assert said.what == "forward" and 0.1 <= said.seconds < 10 and said.temporaries is not None
    assert [record.message for record in caplog.records] == [f"compiled {said}: a sum"]


def test_a_program_of_a_call_names_its_kernel(caplog):
    caplog.set_level(logging.INFO, "ring_attn")
    q = torch.randn(1, 23, 3, 8)  # as in no other test
    ring_attention(q, q, q, causal=True, mesh="local")
    (said,) = [record.message for record in caplog.records]
    assert said.startswith("compiled forward in ") and said.endswith(" by the ring strategy with the xla kernel")


def test_what_takes_long_is_announced_once(caplog, unannounced):
    for _ in range(2):
        slow(0.3)(jnp.ones(2), None)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "the forward of a sum" in record.message


def test_the_quick_and_the_other_ranks_announce_nothing(caplog, unannounced, monkeypatch):
    quiet = slow(0.2)
    quiet._loud = False
    quiet(jnp.ones(2), None)
    monkeypatch.setattr(executable, "LONG", 30.0)
    slow(0)(jnp.ones(2), None)
    assert not caplog.records


def test_what_cannot_be_compiled_is_compiled_at_the_next_call():
    fails = [True]

    def traced(a):
        if fails:
            raise ValueError("not yet")
        return (a + 1,)

    program = Executable(jax.jit(traced), "forward", "a sum", loud=False)
    with pytest.raises(ValueError, match="not yet"):
        program(jnp.ones(2))
    fails.clear()
    np.testing.assert_array_equal(program(jnp.ones(2))[0], 2)
    assert len(program.compilations) == 1


def test_the_default_precision_counts():
    program = slow(0)
    for precision in ("float32", "bfloat16", "float32"):
        with jax.default_matmul_precision(precision):
            program(jnp.ones(2), None)
    assert len(program.compilations) == 2


def test_the_calls_of_a_block_say_what_was_compiled():
    q = torch.zeros(1, 3, 2, 8, requires_grad=True)
    with Explaining() as calls:
        out = ring_attention(q, q, q, softcap=1.75)
    assert str(calls).count("\ncompiled  forward in ") == 1 and "backward in" not in str(calls)
    out.sum().backward()
    assert str(calls).count("\ncompiled  backward in ") == 1
    with Explaining(run=False) as inquiry:
        ring_attention(*torch.zeros(3, 1, 3, 2, 8), softcap=1.875)
    assert "compiled" not in str(inquiry)
