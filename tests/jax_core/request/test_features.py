"""Nothing that is accepted is ignored: what is new in a mask, in the options or among the arrays is refused by every kernel and
every strategy, by name, until they declare it."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_core.kernels.contract import Scores
from jax_core.masks.static import Mask
from jax_core.operands import Operands
from jax_core.options import Options
from jax_core.request import spec
from jax_core.request.dispatch import KERNELS, STRATEGIES
from jax_core.strategies.ring import RingStrategy

X = jax.ShapeDtypeStruct((1, 16, 2, 8), jnp.float32)


@dataclass(frozen=True)
class SpinningMask(Mask):
    spin: int | None = None


@dataclass(frozen=True)
class SpinningOptions(Options):
    spin: bool = False


SpinningOperands: Any = namedtuple("SpinningOperands", (*Operands._fields, "spin"), defaults=(*Operands(X, X, X)[3:], None))


def new_field_of_a_mask(monkeypatch, given: Any, **names: str) -> None:
    monkeypatch.setattr(spec, "make_mask", lambda *_: SpinningMask(True, spin=given))
    spec.make_spec(Options(**names), Operands(X, X, X))


def new_option(monkeypatch, given: Any, **names: str) -> None:
    spec.make_spec(SpinningOptions(spin=bool(given), **names), Operands(X, X, X))


def new_array(monkeypatch, given: Any, **names: str) -> None:
    spec.make_spec(Options(**names), SpinningOperands(X, X, X, spin=given and jax.ShapeDtypeStruct((3,), jnp.float32)))


NEW = (new_field_of_a_mask, new_option, new_array)


@pytest.mark.parametrize("ask", NEW)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_refuses_what_it_does_not_declare(monkeypatch, name: str, ask: Callable):
    with pytest.raises(NotImplementedError, match=f'strategy="{name}": it does not handle (.*, )?spin(,|;)'):
        ask(monkeypatch, 3, strategy=name)


@pytest.mark.parametrize("ask", NEW)
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_refuses_what_it_does_not_declare(monkeypatch, name: str, ask: Callable):
    """In a ring that declares it."""
    monkeypatch.setattr(RingStrategy, "CAPABILITIES", RingStrategy.CAPABILITIES | {"spin"})
    with pytest.raises(NotImplementedError, match=f'platform="{name}": it does not handle (.*, )?spin;'):
        ask(monkeypatch, 3, platform=name)


@pytest.mark.parametrize("ask", NEW)
def test_what_is_not_asked_for_is_not_refused(monkeypatch, ask: Callable):
    ask(monkeypatch, None, platform="xla")


@pytest.mark.parametrize("ask", NEW)
def test_auto_refuses_too(monkeypatch, ask: Callable):
    with pytest.raises(NotImplementedError, match="spin"):
        ask(monkeypatch, 3)


def test_every_field_is_declared_by_someone():
    """A field that is new here and that nobody handles would be refused by all."""
    handled = frozenset().union(*(kernel.CAPABILITIES for kernel in KERNELS.values()))
    asked = {field.name for kind in (Mask, Scores) for field in fields(kind)} - {"mask", "scale"}
    assert asked <= handled
