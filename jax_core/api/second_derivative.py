"""The gradients of an attention as a JAX function that can be differentiated again: in reverse mode, where the kernel is made of
JAX's own operations; where it is not, a second derivative is refused.

The gradients of the operands are those of a scalar, ``S = sum(out * dout) + sum(lse * dlse)``. Its second derivatives are
symmetric, so their product with a direction, which reverse mode asks for, is the change of the gradients along that direction: a
forward and a backward in forward mode, in memory that grows with the length and not with its square. The change of ``out`` and
``lse`` is what the cotangents get, as the gradients are linear in them.
"""

from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.operands import Operands
from jax_core.request.dispatch import KERNELS
from jax_core.request.features import refusal
from jax_core.strategies.contract import RingSpec
from jax_core.strategies.pairs.padding import clear_cotangents
from jax_core.strategies.pairs.rows import real_rows
from jax_core.strategies.transfers.transfer import tree_after
from jax_core.varying import vary, varying_axes

Tree = TypeVar("Tree")
_Residuals = tuple[Operands, Array, Array, Array | None]
_Arguments = tuple[Operands, Array, Array, Operands, Array | None]
_Changes = tuple[Operands, Array, Array, Array]

_SECOND = frozenset({"second_derivative"})


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention_gradients(spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array) -> Operands:
    """As ``spec.strategy.backward``. ``out`` and ``lse`` are those of the operands: functions of them, which get no cotangents of
    their own."""
    return spec.strategy.backward(spec, operands, out, lse, dout, dlse)


def _forward(spec: RingSpec, operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array) -> tuple[Operands, _Residuals]:
    gradients = attention_gradients(spec, operands, out, lse, dout, dlse)
    return gradients, as_new_arrays((operands, dout, dlse, _done(spec, (gradients, out))))


def as_new_arrays(residuals: Tree) -> Tree:
    """The residuals of a function that is differentiated inside another derivative, as arrays of their own. Of those that are its
    arguments JAX (0.10 and 0.11) keeps the number alone, which is another's where a scan in a scan is differentiated twice: the
    backward then gets wrong arrays, in silence if they have the shapes of the right ones."""
    return lax.optimization_barrier(residuals)


def _backward(spec: RingSpec, residuals: _Residuals, direction: Operands) -> tuple[Operands, Array, None, Array, Array]:
    operands, dout, dlse, done = residuals
    _check_differentiable(spec)
    changes, dout_change, dlse_change, no_change = _changes(spec, operands, dout, dlse, direction, done)
    return changes, no_change, None, dout_change, dlse_change


attention_gradients.defvjp(_forward, _backward)


def _directional_derivative(
    spec: RingSpec, operands: Operands, dout: Array, dlse: Array, direction: Operands, done: Array | None
) -> _Changes:
    """How the gradients, ``out`` and ``lse`` change as the operands move in ``direction``; and zeros like ``out``. ``done``: what
    the transfers must wait for; those after them wait for the zeros."""
    spec = replace(spec, differentiable=True)
    moving, along = _floating(operands, operands), _floating(direction, operands)
    moving = moving if done is None else tree_after(spec, moving, done)

    def results(moving: dict[str, Array]) -> tuple[Array, Array]:
        return spec.strategy.forward(spec, operands.replaced(**moving))

    def gradients(moving: dict[str, Array], out: Array, lse: Array) -> dict[str, Array]:
        grads = spec.strategy.backward(spec, operands.replaced(**moving), out, lse, dout, dlse)
        return _floating(grads, operands)

    (out, lse), (out_change, lse_change) = jax.jvp(results, (moving,), (along,))
    lse_change = jnp.where(jnp.isneginf(lse), 0, lse_change)
    _, changes = jax.jvp(gradients, (moving, out, lse), (along, out_change, lse_change))
    lse_change = lse_change if spec.lse_gradient else jnp.zeros_like(lse)
    dout_change, dlse_change = clear_cotangents(real_rows(spec, operands), out_change, lse_change)
    cotangents = changes, dout_change, vary(dlse_change, varying_axes(lse)), vary(jnp.zeros_like(out), varying_axes(out))
    done = _done(spec, cotangents)
    changes, *others = cotangents if done is None else tree_after(spec, cotangents, done)
    nothing = jax.tree.map(lambda _: None, operands)
    return nothing._replace(**changes), *others


_changes = jax.custom_vjp(_directional_derivative, nondiff_argnums=(0,))


def _floating(values: Operands, operands: Operands) -> dict[str, Array]:
    """Those of the operands that have gradients. (What a mask function closes over has none.)"""
    named = operands._replace(predicate_arrays=())._asdict()
    names = [name for name, x in named.items() if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
    return {name: getattr(values, name) for name in names}


def _done(spec: RingSpec, tree: object) -> Array | None:
    """A number that is there when all of ``tree`` is: on a CPU, collectives of one program must be ordered (``transfers``)."""
    if spec.problem.backend != "cpu" or spec.problem.size == 1:
        return None
    return sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(tree))


def _changes_forward(spec: RingSpec, *arguments: *_Arguments) -> tuple[_Changes, _Arguments]:
    return _changes(spec, *arguments), as_new_arrays(arguments)


def _changes_backward(spec: RingSpec, arguments: _Arguments, cotangents: _Changes) -> tuple[Operands, Array, Array, Operands, None]:
    if spec.problem.size > 1:
        raise NotImplementedError(
            "ring_attention over several devices can be differentiated twice, and a third derivative was asked for; compute it on "
            "one device, without axis_name and mesh"
        )
    operands, dout, dlse, direction, done = arguments
    moving = _floating(operands, operands), dout, dlse, _floating(direction, operands)
    nothing = jax.tree.map(lambda _: None, operands)

    def changes(moving: dict[str, Array], dout: Array, dlse: Array, direction: dict[str, Array]) -> _Changes:
        return _directional_derivative(spec, operands.replaced(**moving), dout, dlse, nothing._replace(**direction), done)

    _, transpose = jax.vjp(changes, *moving)
    doperands, ddout, ddlse, ddirection = transpose(cotangents)
    return nothing._replace(**doperands), ddout, ddlse, nothing._replace(**ddirection), None


_changes.defvjp(_changes_forward, _changes_backward)


def _check_differentiable(spec: RingSpec) -> None:
    kernel = next((name for name, kernel in KERNELS.items() if kernel is spec.kernel), spec.strategy.FIXED_PLATFORM)
    for capabilities in (spec.strategy.CAPABILITIES, *([] if spec.kernel is None else [spec.kernel.CAPABILITIES])):
        if refusal(_SECOND, capabilities) is not None:
            _refuse(kernel)


def _refuse(kernel: str | None) -> NoReturn:
    raise NotImplementedError(
        f'ring_attention on platform="{kernel}" can be differentiated once: a second derivative (a penalty on gradients, a step of '
        'MAML, a Hessian) needs platform="xla", whose backward has one'
    )
