"""What is said of compiling, and what a program is compiled for."""

import logging
import threading
import time
from contextlib import nullcontext
from threading import Lock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ring_attn import Explaining, ring_attention
from tests.support.launch import as_a_user
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
    # On a busy machine it is announced, too, as what takes long.
    (said,) = [record.message for record in caplog.records if record.levelno == logging.INFO]
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


FORM = jax.ShapeDtypeStruct((2,), jnp.float32)


def counting(fails: bool = False) -> tuple[Executable, list[str]]:
    """A sum, and the threads that have traced it; on any but this one it may fail."""
    threads: list[str] = []

    def traced(a, b):
        threads.append(threading.current_thread().name)
        if fails and threads[-1] != "MainThread":
            raise ValueError("not on this thread")
        return (a + b,)

    return Executable(jax.jit(traced), "forward", "a sum", loud=False), threads


def test_what_was_compiled_ahead_is_not_compiled_again(caplog):
    caplog.set_level(logging.INFO, "ring_attn")
    program, threads = counting()
    program.compile_ahead([FORM, FORM], nullcontext)
    program.compile_ahead([FORM, FORM], nullcontext)
    assert not program.compilations and not caplog.records  # until it is of use
    for _ in range(2):
        np.testing.assert_array_equal(program(jnp.ones(2), jnp.ones(2))[0], 2)
    assert threads == ["ring_attn compiles ahead"] and len(program.compilations) == len(caplog.records) == 1


def test_what_fails_ahead_is_compiled_by_the_call():
    program, threads = counting(fails=True)
    program.compile_ahead([FORM, FORM], nullcontext)
    np.testing.assert_array_equal(program(jnp.ones(2), jnp.ones(2))[0], 2)
    assert threads == ["ring_attn compiles ahead", "MainThread"] and len(program.compilations) == 1


def test_the_precision_counts_ahead_too():
    program, threads = counting()
    with jax.default_matmul_precision("float32"):
        program.compile_ahead([FORM, FORM], nullcontext)
    program(jnp.ones(2), jnp.ones(2))
    with jax.default_matmul_precision("float32"):
        program(jnp.ones(2), jnp.ones(2))
    assert sorted(threads) == ["MainThread", "ring_attn compiles ahead"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_backward_is_compiled_beside_its_forward(monkeypatch, dtype):
    compiled = {}

    def noting(self, arrays, compile_=Executable._compile):
        compiled[self._what] = threading.current_thread().name
        return compile_(self, arrays)

    monkeypatch.setattr(Executable, "_compile", noting)
    q, k, v = torch.randn(3, 1, 19, 3, 8, dtype=dtype)  # as in no other test
    ring_attention(q, k[:, :17], v[:, :17], mesh="local")
    assert compiled == {"forward": "MainThread"}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, mesh="local")
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert compiled == {"forward": "MainThread", "backward": "ring_attn compiles ahead"}
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves)).square().sum()
    torch.testing.assert_close(grads, torch.autograd.grad(expected, leaves))


def test_a_process_ends_while_a_backward_is_compiled():
    source = """if True:
        import torch, ring_attn
        q = torch.randn(1, 64, 2, 8, requires_grad=True)
        ring_attn.ring_attention(q, q, q, causal=True)
        raise SystemExit(5)
    """
    ended = as_a_user("-c", source, RING_ATTN_CACHE="off")
    said = [line for line in ended.stderr.splitlines() if not line.startswith("compiling the")]  # as on a busy machine
    assert (ended.returncode, said) == (5, [])


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


@pytest.mark.parametrize("return_lse", [False, True])
def test_a_backward_is_compiled_ahead_if_its_cotangents_are_known(return_lse, monkeypatch):
    begun = []
    monkeypatch.setattr(Executable, "compile_ahead", lambda *_: begun.append("backward"))
    q = torch.ones(1, 7, 1, 3, requires_grad=True)
    ring_attention(q, q, q, mesh="local", return_lse=return_lse)
    assert begun == ([] if return_lse else ["backward"])


def test_no_backward_is_compiled_where_nothing_is_differentiated(monkeypatch):
    """As in generation, where a parameter (sinks, say) still says that it needs a gradient."""
    monkeypatch.setattr(Executable, "compile_ahead", lambda *_: pytest.fail("a backward is compiled"))
    q, sinks = torch.ones(1, 9, 1, 3), torch.zeros(1, requires_grad=True)
    with torch.no_grad():
        ring_attention(q, q, q, mesh="local", sinks=sinks)
