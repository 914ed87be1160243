"""Layers with a state along the sequence: each works inside ``shard_map``, on a mesh, and on one device, as attention does."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from jax_core.api.differentiable import axis_size
from jax_core.api.mesh import MeshPlan, axis_names, batch_and_head_axes, call_mapped, check_divides, ring_axes
from jax_core.keywords import explains
from jax_core.masks.layout import Layout, check_whole_length
from jax_core.options import AxisName
from jax_core.recurrence.convolution import Convolution
from jax_core.recurrence.layer import Cotangents, Given, Layer
from jax_core.recurrence.operators import CHUNK, Recurrence
from jax_core.recurrence.pieces import Pieces, pieces_of
from jax_core.varying import vary, varying_axes

Arrays = tuple[Array | None, ...]
_Residuals = tuple[Given, Array]
OTHERS = {
    "use_qk_l2norm_in_kernel": "which is called qk_l2norm here",
    "return_final_states": "output_final_state",
    "initial_states": "initial_state",
}


class Along(TypedDict, total=False):
    """What every layer with a state takes beside its own operands.

    ``initial_state``: what enters the sequence (None: 0), the same on all devices; it enters the first document. ``segment_ids``
    int ``[batch | 1, seq]``, sharded as the sequence is: a token whose id is not that of the token before begins a document, with a
    state of 0; negative ids are padding, which leaves the state as it is, whose outputs are 0, and whose operands may hold
    anything. ``cu_seqlens`` int ``[documents + 1]`` says the same of the whole sequence: where its documents begin and the last one
    ends. ``output_final_state``: also return the state that leaves the sequence (after the last document), the same on all devices.
    ``axis_name``, ``layout``, ``mesh``: as for :func:`jax_core.ring_attention`, but for "striped", which only "ulysses" takes.
    """

    initial_state: ArrayLike | None
    output_final_state: bool
    segment_ids: ArrayLike | None
    cu_seqlens: ArrayLike | None
    axis_name: AxisName
    layout: Layout
    mesh: Mesh | None


Result = Array | tuple[Array, Array]


def causal_conv1d(
    x: ArrayLike, weight: ArrayLike, bias: ArrayLike | None = None, *, activation: str | None = None, **along: Unpack[Along]
) -> Result:
    """A causal convolution of each channel: ``y_t = activation(bias + sum_j weight[:, width - 1 - j] x_{t - j})``.

    ``x [batch, seq, channels]``, ``weight [channels, width]`` with ``width`` >= 2, ``bias [channels]``; ``activation``: None or
    "silu" ("swish" is the same). The state is the last ``width - 1`` inputs of the last document, ``[batch, width - 1, channels]``,
    0 where it has fewer; padding is as if it were not there, also between inputs. Differentiable in all of them. Computed in
    float32 (float64 for float64); the result is like ``x``. The rest: :class:`Along`.

    Raises ValueError for operands that do not fit together, NotImplementedError for "striped".
    """
    return layer_along(Convolution, (x, weight, bias), dict(activation=_activation(activation)), **along)


def gated_delta_rule(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike | None,
    beta: ArrayLike,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    chunk_size: int = CHUNK,
    strategy: str = "auto",
    **along: Unpack[Along],
) -> Result:
    """``S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - (exp(g_t) S_{t-1})^T k_t))^T``, ``y_t = scale S_t^T q_t``.

    ``q, k [batch, seq, key heads, key_dim]``, ``v [batch, seq, heads, value_dim]``, where the heads are a multiple of the key
    heads; ``g`` (the logarithm of the decay; -inf: 0, None: no decay) and ``beta [batch, seq, heads]``. ``scale``: None means ``1 /
    sqrt(key_dim)``. ``qk_l2norm``: divide q and k by their norms first, as fla's ``use_qk_l2norm_in_kernel``. ``chunk_size``:
    tokens that are computed at once. ``strategy``: "prefix" sends the map of each piece of a shard to all devices; "ulysses" is an
    all-to-all of heads, which must be a multiple of the ring's size; "auto" is the one that sends fewer bytes (docs/hybrids.md).
    The state is ``[batch, heads, key_dim, value_dim]``, float32 (float64 for float64). Differentiable in all operands and in both
    states. Computed in float32 (float64 for float64); the result is like ``v``. The rest: :class:`Along`.

    Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464. Raises ValueError for operands that do not fit together and for heads that
    "ulysses" cannot share, NotImplementedError for "prefix" in layout "striped".
    """
    settings = dict(operator="gated_delta_rule", scale=scale, l2norm=qk_l2norm, chunk=chunk_size, strategy=strategy)
    return layer_along(Recurrence, (q, k, v, g, beta), settings, **along)


def kda(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike,
    beta: ArrayLike,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    chunk_size: int = CHUNK,
    strategy: str = "auto",
    **along: Unpack[Along],
) -> Result:
    """Kimi Delta Attention (arXiv:2510.26692): :func:`gated_delta_rule` with a decay for each key dimension, ``g [batch, seq,
    heads, key_dim]``."""
    settings = dict(operator="kda", scale=scale, l2norm=qk_l2norm, chunk=chunk_size, strategy=strategy)
    return layer_along(Recurrence, (q, k, v, g, beta), settings, **along)


def linear_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    g: ArrayLike | None = None,
    *,
    scale: float | None = None,
    chunk_size: int = CHUNK,
    strategy: str = "auto",
    **along: Unpack[Along],
) -> Result:
    """``S_t = exp(g_t) S_{t-1} + k_t v_t^T``, ``y_t = scale S_t^T q_t``; operands, results and errors as :func:`gated_delta_rule`.

    ``g``, the logarithm of the decay: None, ``[heads]`` (retention, lightning attention), ``[batch, seq, heads]`` (simple GLA),
    ``[heads, key_dim]`` or ``[batch, seq, heads, key_dim]`` (gated linear attention, arXiv:2312.06635)."""
    settings = dict(operator="linear_attention", scale=scale, chunk=chunk_size, strategy=strategy)
    return layer_along(Recurrence, (q, k, v, g), settings, **along)


def ssd(
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    *,
    chunk_size: int = CHUNK,
    strategy: str = "auto",
    **along: Unpack[Along],
) -> Result:
    """Mamba-2's state space model (arXiv:2405.21060): ``S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T``, ``y_t = S_t C_t + D x_t``.

    ``x [batch, seq, heads, head_dim]``, ``dt [batch, seq, heads]`` (after its bias and softplus), ``A [heads]`` (negative), ``B, C
    [batch, seq, groups, state_dim]``, ``D [heads]`` or ``[heads, head_dim]``. The state is ``[batch, heads, head_dim, state_dim]``.
    Dtypes, derivatives and errors as :func:`gated_delta_rule`; the result is like ``x``."""
    return layer_along(Recurrence, (x, dt, A, B, C, D), dict(operator="ssd", chunk=chunk_size, strategy=strategy), **along)


def _activation(name: str | None) -> str | None:
    if name not in (None, "silu", "swish"):
        raise ValueError(f'activation must be None, "silu" or "swish", got {name!r}')
    return name and "silu"


@explains(OTHERS)
def layer_along(
    kind: type[Layer],
    operands: tuple[ArrayLike | None, ...],
    settings: dict,
    *,
    initial_state: ArrayLike | None = None,
    output_final_state: bool = False,
    segment_ids: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    axis_name: AxisName = None,
    layout: Layout = "contiguous",
    mesh: Mesh | None = None,
) -> Result:
    layer = kind(final_state=bool(output_final_state), **settings)
    arrays = tuple(None if x is None else jnp.asarray(x) for x in (*operands, initial_state, segment_ids, cu_seqlens))
    run = partial(_local, layer, layout, axis_name) if mesh is None else _on_mesh(layer, layout, axis_name, mesh, arrays)
    y, last = run(*arrays)
    return (y, last) if output_final_state else y


def _local(layer: Layer, layout: Layout, axis_name: AxisName, *arrays: Array | None) -> tuple[Array, Array]:
    """``(y, last)`` of local shards: the operands, the state, the ids and ``cu_seqlens``, which are the whole sequence's."""
    *operands, state, ids, cu_seqlens = arrays
    if ids is not None and cu_seqlens is not None:
        raise ValueError("segment_ids and cu_seqlens both say where documents are; give one of the two")
    sizes = layer.sizes(operands, state, ids)
    if not (sizes["b"] and sizes["t"]):  # the state passes through
        return _nothing(layer, operands, state, sizes)
    axes = varying_axes(arrays)
    names = axis_names(axis_name)
    if names:
        size = prod(axis_size(name) for name in names)
        axes |= varying_axes(lax.axis_index(axis_name))
    else:
        size = 1
    layer, pieces = layer.on_ring(operands, sizes, layout, size), pieces_of(axis_name, size, layout, sizes["t"])
    if cu_seqlens is not None:
        ids = _ids(pieces, cu_seqlens)
    ids = None if ids is None else jnp.broadcast_to(ids, (sizes["b"], sizes["t"])).astype(jnp.int32)
    return _compiled(layer, pieces, vary(Given(tuple(operands), state, ids), axes))


def _nothing(layer: Layer, operands: Sequence[Array | None], state: Array | None, sizes: dict[str, int]) -> tuple[Array, Array]:
    like = layer.like_of(operands)
    shape = [sizes[letter] for letter in layer.state_dims]
    return jnp.zeros_like(like), jnp.zeros(shape, layer.state_dtype(like.dtype)) if state is None else state


def _ids(pieces: Pieces, ends: Array) -> Array:
    """``[1, length]``: the document of each token of this rank, -1 for padding after the last."""
    if ends.ndim != 1 or not jnp.issubdtype(ends.dtype, jnp.integer):
        raise ValueError(f"cu_seqlens must be ints [documents + 1], got {ends.dtype} {list(ends.shape)}")
    places = pieces.places[None]
    document = jnp.searchsorted(ends, places, side="right").astype(jnp.int32) - 1
    return jnp.where(places < ends[-1], document, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(layer: Layer, pieces: Pieces, given: Given) -> tuple[Array, Array]:
    y, last, _ = layer.forward(pieces, given)
    return y, last


def _forward(layer: Layer, pieces: Pieces, given: Given) -> tuple[tuple[Array, Array], _Residuals]:
    y, last, saved = layer.forward(pieces, given)
    return (y, last), (given, saved)


def _backward(layer: Layer, pieces: Pieces, residuals: _Residuals, cotangents: tuple[Array, Array]) -> tuple[Given]:
    given, saved = residuals
    gradients, dstate = layer.backward(pieces, given, saved, Cotangents(*cotangents))
    return (Given(tuple(gradients), None if given.state is None else dstate, None),)


_differentiable.defvjp(_forward, _backward)
_compiled = jax.jit(_differentiable, static_argnums=(0, 1))  # equal layers and shapes share one program


def _on_mesh(layer: Layer, layout: Layout, axis_name: AxisName, mesh: Mesh, arrays: Arrays) -> Callable[..., tuple[Array, Array]]:
    """A function of global arrays, in the layout's order. Batch and heads stay split as in the first operand."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}")
    *operands, state, ids, _ = arrays
    sizes, first, along = layer.sizes(operands, state, ids), operands[0], ring_axes(mesh, axis_name)
    assert first is not None
    split = next(sizes[letter] for letter in "nhc" if letter in sizes)
    batch, heads = batch_and_head_axes(first, split, mesh, axis_names(along), None)
    by_letter = {"b": batch, "t": along} | dict.fromkeys("hnc", heads)
    dims = [operand.dims for operand in layer.signature] + [(layer.state_dims,), ("bt",), ("",)]
    names = [operand.name for operand in layer.signature] + ["initial_state", "segment_ids", "cu_seqlens"]
    specs = tuple(None if x is None else _spec(x, of, by_letter) for x, of in zip(arrays, dims, strict=True))
    plan = MeshPlan(mesh, batch, along, heads)
    check_whole_length(layout, plan.size(along), sizes["t"])
    for name, x, spec in zip(names, arrays, specs, strict=True):
        if x is not None and spec is not None:
            check_divides(plan, name, x.shape, spec)
    like = next(operand.dims for operand in layer.signature if operand.name == layer.like)
    results = tuple(PartitionSpec(*map(by_letter.get, letters)) for letters in (like[0], layer.state_dims))
    # A state that is the same on all ranks because each has computed it is not one that check_vma knows for the same.
    mapped = jax.shard_map(partial(_local, layer, layout, along), mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
    return partial(call_mapped, mapped, mesh, specs)


def _spec(x: Array, alternatives: tuple[str, ...], by_letter: dict) -> PartitionSpec:
    """Dimensions of length 1 are not split."""
    letters = next((dims for dims in alternatives if len(dims) == x.ndim), "")
    return PartitionSpec(
        *(None if length == 1 else by_letter.get(letter) for letter, length in zip(letters, x.shape, strict=False))
    )
