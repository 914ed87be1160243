"""A predicate written with torch, ``(batch, head, query, key) -> bool`` on integers, as a ``mask_mod`` that JAX traces.

The predicate is traced once on scalars into a few of torch's operators, which are interpreted in ``jax.numpy``. What does not
depend on the four integers is computed in torch at once and becomes an array that the ``mask_mod`` closes over: its values may
change from call to call, as those of a batch do, and the program stays the same.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import ArrayLike
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.fx.experimental.proxy_tensor import make_fx

Predicate = Callable[..., Tensor]


class Lengths(NamedTuple):
    """How many batch entries, queries and keys there are. A captured tensor that is indexed by one of them must have as many."""

    batch: int
    queries: int
    keys: int


class _Value(NamedTuple):
    """The value with this number: batch, head, query, key, then the arrays, then the results of the steps."""

    number: int


class _Step(NamedTuple):
    operator: str
    arguments: tuple[object, ...]
    settings: tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class TracedPredicate:
    """A ``mask_mod``. Equal ones do the same on arrays of the same shapes and dtypes, and so share their programs."""

    name: str
    steps: tuple[_Step, ...]
    specs: tuple[tuple[tuple[int, ...], str], ...]
    arrays: tuple[np.ndarray, ...] = field(compare=False, repr=False)

    def __call__(self, *where: ArrayLike) -> jax.Array:
        values: list[ArrayLike] = [*where, *map(jnp.asarray, self.arrays)]
        for step in self.steps:
            values.append(_OPERATORS[step.operator](*(_filled(x, values) for x in step.arguments), **dict(step.settings)))
        return jnp.asarray(values[-1]) != 0


def traced(predicate: Predicate, lengths: Lengths) -> TracedPredicate:
    """The predicate as a ``mask_mod``. Integers become 32 bits wide and floats float32, as JAX has them by default.

    Raises NotImplementedError for an operator that is not known here, for Python that branches on the integers, and for a captured
    tensor that is indexed by position and has fewer positions than the whole sequence: it would be the shard of one rank.
    """
    name = getattr(predicate, "__qualname__", type(predicate).__name__)
    module = _graph(predicate, name)
    constants = _constants(module)
    nodes = list(module.graph.nodes)
    inputs, live = nodes[:4], [node for node in nodes[4:-1] if node not in constants]
    result = nodes[-1].args[0]
    used = [x for node in live for x in node.all_input_nodes if x in constants] + [x for x in [result] if x in constants]
    sources = list(dict.fromkeys(used))
    _check_indices(name, live, constants, dict(zip(inputs, (lengths.batch, 0, lengths.queries, lengths.keys), strict=True)))
    numbers = {node: _Value(number) for number, node in enumerate([*inputs, *sources, *live])}
    arrays = tuple(_array(constants[node]) for node in sources)
    steps = [_step(name, node, numbers) for node in live] + [_Step("alias", (numbers[result],), ())]
    return TracedPredicate(name, tuple(steps), tuple((x.shape, str(x.dtype)) for x in arrays), arrays)


def _graph(predicate: Predicate, name: str) -> fx.GraphModule:
    scalars = [torch.zeros((), dtype=torch.int64) for _ in range(4)]
    try:
        with torch.no_grad(), TransformGetItemToIndex():
            module = make_fx(lambda b, h, q, k: predicate(b, h, q, k))(*scalars)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise NotImplementedError(
            f"the mask function {name} cannot be traced on integers (batch, head, query, key): it must be made of torch's "
            f"operators on them and on tensors that they index, without Python that branches on their values ({error})"
        ) from error
    if not isinstance(list(module.graph.nodes)[-1].args[0], fx.Node):
        raise NotImplementedError(f"the mask function {name} must return one boolean tensor")
    return module


def _constants(module: fx.GraphModule) -> dict[fx.Node, Tensor]:
    """The values of all nodes that do not depend on the four integers."""
    known: dict[fx.Node, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(module, str(node.target))
        elif node.op == "call_function" and all(x in known for x in node.all_input_nodes):
            arguments, settings = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*arguments, **settings)
    return known


def _check_indices(name: str, live: Iterable[fx.Node], constants: dict[fx.Node, Tensor], needs: dict[fx.Node, int]) -> None:
    """``needs``: the length that a dimension must have which is indexed by the node."""
    for node in live:
        needs[node] = max((needs.get(x, 0) for x in node.all_input_nodes), default=0)
        if _name(node) != "index":
            continue
        source = node.args[0]
        assert isinstance(source, fx.Node)
        shape = (constants[source] if source in constants else source.meta["val"]).shape
        for dim, index in enumerate(node.args[1]):  # type: ignore[arg-type]
            needed = needs.get(index, 0)
            if index is None or shape[dim] < needed:
                raise NotImplementedError(
                    f"the mask function {name} indexes dim {dim} of a tensor {list(shape)} by position, but the whole sequence has "
                    f"{needed} positions: it must close over the tensor of the whole sequence, not over the shard of one rank"
                )


def _name(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").split(".")[0]


def _step(name: str, node: fx.Node, numbers: dict[fx.Node, _Value]) -> _Step:
    if _name(node) not in _OPERATORS:
        raise NotImplementedError(
            f"the mask function {name} uses {node.target}, which is not translated to JAX; known are "
            f"{', '.join(sorted(_OPERATORS))}"
        )
    arguments, settings = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
    keywords = {key: _plain(value) for key, value in settings.items() if key not in _OF_TORCH_ALONE}
    return _Step(_name(node), tuple(map(_plain, arguments)), tuple(sorted(keywords.items())))


def _plain(value: object) -> object:
    """Hashable: tuples for lists, names for dtypes."""
    if isinstance(value, (tuple, list)) and not isinstance(value, _Value):
        return tuple(map(_plain, value))
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _filled(value: object, values: Sequence[object]) -> object:
    if isinstance(value, _Value):
        return values[value.number]
    return tuple(_filled(x, values) for x in value) if isinstance(value, tuple) else value


def _array(value: Tensor) -> np.ndarray:
    tensor = value.detach().cpu()
    if tensor.dtype == torch.bool:
        return tensor.numpy()
    return tensor.float().numpy() if tensor.is_floating_point() else tensor.to(torch.int32).numpy()


_OF_TORCH_ALONE = ("layout", "device", "pin_memory", "memory_format", "non_blocking")
_KINDS = {"bool": jnp.bool_, "float16": jnp.float16, "bfloat16": jnp.bfloat16, "float32": jnp.float32, "float64": jnp.float32}


def _cast(value: ArrayLike, dtype: str | None = None) -> jax.Array:
    return jnp.asarray(value) if dtype is None else jnp.asarray(value).astype(_KINDS.get(dtype, jnp.int32))


def _divide(a: ArrayLike, b: ArrayLike, rounding_mode: str | None = None) -> jax.Array:
    if rounding_mode == "trunc":
        return jnp.sign(a) * jnp.sign(b) * (jnp.abs(a) // jnp.abs(b))
    return jnp.floor_divide(a, b) if rounding_mode == "floor" else jnp.true_divide(a, b)


def _full(shape: tuple[int, ...], value: ArrayLike, dtype: str | None = None) -> jax.Array:
    return _cast(jnp.full(shape, value), dtype)


def _clamp(value: ArrayLike, low: ArrayLike | None = None, high: ArrayLike | None = None, **bounds: ArrayLike) -> jax.Array:
    return jnp.clip(value, bounds.get("min", low), bounds.get("max", high))


# Operators of torch, by name without the overload, in the meaning that they have on scalars and on arrays that broadcast.
_OPERATORS: dict[str, Callable[..., ArrayLike]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "mul")},
    **{f"bitwise_{name}": getattr(jnp, f"bitwise_{name}") for name in ("and", "or", "xor", "not")},
    **{f"logical_{name}": getattr(jnp, f"logical_{name}") for name in ("and", "or", "xor", "not")},
    **{name: getattr(jnp, name) for name in ("abs", "minimum", "maximum", "where", "floor_divide", "remainder", "sign")},
    **dict.fromkeys(("alias", "clone", "detach", "lift_fresh_copy", "_to_copy", "scalar_tensor"), _cast),
    "add": lambda a, b, alpha=1: a + b * alpha,
    "sub": lambda a, b, alpha=1: a - b * alpha,
    "rsub": lambda a, b, alpha=1: b - a * alpha,
    "div": _divide,
    "clamp": _clamp,
    "index": lambda source, indices: source[indices],
    "full": _full,
    "full_like": lambda like, value, dtype=None: _cast(jnp.full_like(like, value), dtype),
    "ones_like": lambda like, dtype=None: _cast(jnp.ones_like(like), dtype),
    "zeros_like": lambda like, dtype=None: _cast(jnp.zeros_like(like), dtype),
    "new_ones": lambda like, shape, dtype=None: _cast(jnp.ones(shape, jnp.asarray(like).dtype), dtype),
    "new_zeros": lambda like, shape, dtype=None: _cast(jnp.zeros(shape, jnp.asarray(like).dtype), dtype),
    "new_full": lambda like, shape, value, dtype=None: _full(shape, value, dtype),
}
