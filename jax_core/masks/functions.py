"""A user's mask function as arrays and a traceable function of (batch, head, query, key).

Arrays that the user's function closes over are lifted out and become operands: a closure over traced values would not survive
``scan``, ``checkpoint`` and the custom VJP.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun


@dataclass(frozen=True)
class Predicate:
    """``apply(arrays, batch, head, q, k) -> bool`` on integer scalars. Equal tokens mean equal functions.

    ``over``: whether ``q`` and ``k`` are positions (which position ids replace) or indices into the whole sequence.
    ``elementwise(batch, head, q, k)``: the same without arrays, with two-dimensional ``q`` and ``k``, as a kernel computes it on a
    tile; None if a kernel cannot.
    """

    token: Hashable
    over: Literal["position", "index"]
    apply: Callable[..., Array] = field(compare=False)
    elementwise: Callable[..., Array] | None = field(compare=False, default=None)


@dataclass(frozen=True)
class _Traced:
    """A mask function's token. The text alone is not enough: it may print a number without its last digits."""

    function: Callable[..., Array]
    text: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return self.text


def from_mask_mod(mask_mod: Callable, axes: frozenset[str] = frozenset()) -> tuple[Predicate, tuple]:
    """``mask_mod(batch, head, q_pos, k_pos) -> bool``, in the style of FlexAttention, traced once on int32 scalars.

    ``axes``: the mesh axes that the scalars vary over. Returns the predicate and the arrays that it closes over.
    """
    scalars = [_varying(jnp.int32(0), axes)] * 4
    try:
        closed = jax.make_jaxpr(lambda *where: mask_mod(*where))(*scalars)  # a new function: traces are cached by function
    except Exception as error:
        raise ValueError(
            "mask_mod is traced by JAX: it must be built from operators and jax.numpy on its four integer arguments "
            "(batch, head, q_pos, k_pos), with no `if`, `and`, `or` on them and no torch or NumPy array indexed by them"
        ) from error
    results = closed.out_avals
    if len(results) != 1 or results[0].shape != () or results[0].dtype != jnp.bool_:
        raise ValueError(f"mask_mod must return one boolean scalar, got {[str(result) for result in results]}")

    def apply(arrays: Sequence[Array | np.ndarray], *where: Array) -> Array:
        consts = [array.reshape(const.aval.shape) for array, const in zip(arrays, closed.jaxpr.constvars, strict=True)]
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*where)[0]

    token = _Traced(mask_mod, str(closed.jaxpr), tuple(map(str, axes)))
    return Predicate(token, "position", apply, None if closed.consts else _on_tile(mask_mod)), tuple(closed.consts)


def _on_tile(mask_mod: Callable) -> Callable[..., Array] | None:
    """The function traced again without mesh axes, which a kernel does not know; None if a kernel cannot compute it."""
    closed = jax.make_jaxpr(lambda *where: mask_mod(*where))(*[jnp.int32(0)] * 4)
    if not _elementwise(closed.jaxpr):
        return None

    def on_tile(batch: Array, head: Array, q: Array, k: Array) -> Array:
        return jax.vmap(jax.vmap(lambda q, k: jaxpr_as_fun(closed)(batch, head, q, k)[0]))(q, k)

    return on_tile


def depends_on(predicate: Predicate, arrays: Sequence[Array | np.ndarray], axes: frozenset[str]) -> tuple[bool, bool]:
    """Whether the predicate's result can depend on the batch entry, and on the head; True if that is not known. ``axes``: the mesh
    axes that its arguments vary over."""
    scalars = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    jaxpr = jax.make_jaxpr(lambda *where: predicate.apply(arrays, *(_varying(x, axes) for x in where)))(*scalars).jaxpr
    needed = {variable for variable in jaxpr.outvars if not hasattr(variable, "val")}
    for equation in reversed(jaxpr.eqns):
        if needed & set(equation.outvars):
            needed |= {variable for variable in equation.invars if not hasattr(variable, "val")}
    batch, head = jaxpr.invars[:2]
    return batch in needed, head in needed


def _varying(scalar: Array, axes: Iterable[str]) -> Array:
    """Typed as varying over the mesh axes."""
    return lax.pcast(scalar, tuple(sorted(axes, key=str)), to="varying") if axes else scalar


# What the kernel compilers accept: Mosaic has no select of booleans, no loops over tiles, and no other types.
_DTYPES = ("bool", "int32", "uint32", "float32", "bfloat16")
_CALLS = ("pjit", "jit", "closed_call")


def _elementwise(jaxpr: Jaxpr) -> bool:
    """Whether it is pure arithmetic on its arguments that a kernel can do on a whole tile."""
    return all(_of_elements(equation) for equation in jaxpr.eqns)


def _of_elements(equation: JaxprEqn) -> bool:
    results = [variable.aval for variable in equation.outvars]  # types of arrays, which JAX's own types do not say
    if not all(result.shape == () and result.dtype.name in _DTYPES for result in results):  # type: ignore[attr-defined]
        return False
    if equation.primitive.name in _CALLS:
        return _elementwise(equation.params["jaxpr"].jaxpr)
    params = [x for param in equation.params.values() for x in (param if isinstance(param, tuple) else (param,))]
    selects_booleans = equation.primitive.name == "select_n" and results[0].dtype == jnp.bool_  # type: ignore[attr-defined]
    return not selects_booleans and not any(hasattr(x, "jaxpr") for x in params)
