"""A strategy's forward and backward as one differentiable JAX function of local shards."""

from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from jax_core.api.second_derivative import as_new_arrays, attention_gradients
from jax_core.operands import Operands
from jax_core.options import AxisName, Options, Placement
from jax_core.request.spec import make_spec
from jax_core.strategies.contract import RingSpec
from jax_core.varying import vary, varying_axes

Tree = TypeVar("Tree")
_Residuals = tuple[Operands, Array, Array]


def local_attention(options: Options, operands: Operands, *where: Any) -> tuple[Array, Array]:
    """``(out, lse)`` of local shards, placed as :func:`local_spec` says."""
    return attend(*local_spec(options, operands, *where))


def local_spec(
    options: Options, operands: Operands, axis_name: AxisName = None, head_shards: int = 1, backend: str | None = None
) -> tuple[RingSpec, Operands]:
    """Of local shards: inside ``shard_map`` over ``axis_name``, or on one device if that is None."""
    axes, operands = varying_axes(operands), _replace_empty(operands)
    backend = backend or _backend_here()
    sizes: tuple[int, ...] = ()
    if axis_name is not None:
        sizes = tuple(axis_size(name) for name in (axis_name if isinstance(axis_name, tuple) else (axis_name,)))
        axes |= varying_axes(lax.axis_index(axis_name))
    place = Placement(axis_name=axis_name, size=prod(sizes), sizes=sizes, head_shards=head_shards, axes=axes, backend=backend)
    spec, completed = make_spec(options, operands, place)
    further = varying_axes(completed.predicate_arrays) - axes
    if further:  # a mask function closes over arrays that vary over further axes
        axes |= further
        spec, completed = make_spec(options, operands, replace(place, axes=axes))
    operands = completed
    # One type for every operand under check_vma; the cast's transpose sums the gradients of operands that devices share.
    arrays = vary(operands._replace(predicate_arrays=()), axes)
    return spec, arrays._replace(predicate_arrays=operands.predicate_arrays)


def axis_size(axis_name: AxisName) -> int:
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(
            f"axis_name={axis_name!r} must be an axis of the shard_map around this call; there is none here. Call inside "
            "shard_map, or give mesh= as well"
        ) from error


def _backend_here() -> str | None:
    """The platform of the devices of the enclosing ``shard_map``: a program may be compiled for devices other than this process's
    own. None if its mesh does not say."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return getattr(device, "platform", None)


def _replace_empty(tree: Tree) -> Tree:
    """Replaces empty inputs by fresh empty arrays, so that no program has an empty operand.

    jaxlib 0.11.2 crashes where the body of a ``shard_map`` reads an operand of no elements (a constant becomes an operand, too).
    XLA puts a constant in the place of what such an operand is split into, then imports the body with an input of which it does not
    know the sharding, and Shardy's canonicalizer (ManualComputationUnusedInputsPattern) looks for it beyond the end of a list.
    """

    def fresh(x: Array) -> Array:
        return vary(jnp.zeros(x.shape, x.dtype), varying_axes(x)) if 0 in x.shape else x

    return jax.tree.map(fresh, tree)


def _results(spec: RingSpec, operands: Operands) -> tuple[Array, Array]:
    return spec.strategy.forward(spec, operands)


def _forward(spec: RingSpec, operands: Operands) -> tuple[tuple[Array, Array], _Residuals]:
    out, lse = _attention_again(spec, operands)
    return (out, lse), (operands, out, lse)


def _forward_again(spec: RingSpec, operands: Operands) -> tuple[tuple[Array, Array], _Residuals]:
    results, residuals = _forward(spec, operands)
    return results, as_new_arrays(residuals)


def _backward(spec: RingSpec, residuals: _Residuals, cotangents: tuple[Array, Array]) -> tuple[Operands]:
    return (attention_gradients(spec, *_replace_empty((*residuals, *cotangents))),)


# The second is what a second derivative differentiates, which must not take residuals for the arguments (``as_new_arrays``).
_attention, _attention_again = (jax.custom_vjp(_results, nondiff_argnums=(0,)) for _ in range(2))
_attention.defvjp(_forward, _backward)
_attention_again.defvjp(_forward_again, _backward)
# Equal specs and shapes share one program, even when every layer of a model calls it.
attend = jax.jit(_attention, static_argnums=0)
