"""Layers with a state along the sequence, for torch tensors: this rank's shards in, this rank's shard out."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor

from jax_core.keywords import explains
from jax_core.masks.layout import Layout
from ring_attn.arguments.checks import check_dense, plain
from ring_attn.arguments.documents import index_of, tensors_per_sequence_of
from ring_attn.arguments.shards import check_shards_of_layer
from ring_attn.documents.cumulative import check_cumulative, documents_of, or_padding
from ring_attn.functional import is_dtensor
from ring_attn.ring import as_ring
from torch_bridge.call.error_propagation import propagates_errors
from torch_bridge.mesh.rings import MeshArg, MeshDim, MeshLike

if TYPE_CHECKING:
    from ring_attn.recurrence.operators import DeltaRule, StateSpace
    from ring_attn.ring import Ring

Result = Tensor | tuple[Tensor, Tensor]
OTHERS = {
    "use_qk_l2norm_in_kernel": "which is called qk_l2norm here",
    "return_final_states": "which is called output_final_state here",
    "initial_states": "which is called initial_state here",
    "seq_idx": "which is called segment_ids here, where negative ids are padding",
    "head_first": "which cannot be here: tensors are [batch, seq, heads, dim]",
}
CHUNK = 64


class Along(TypedDict, total=False):
    """What every layer with a state takes beside its own operands.

    ``initial_state``: what enters the sequence, and its first document (None: 0); the same on all ranks, and its gradient is this
    rank's part, to be summed over the ring like that of a parameter. ``output_final_state``: also return the state that leaves the
    sequence, after its last document; the same on all ranks, of which each may make its own part of the loss.
    ``segment_ids``: ints ``[batch | 1, seq]``, sharded as the sequence is: a token whose id is not that of the token before it
    begins a document, with a state of 0. Negative ids are padding, which leaves the state as it is, whose outputs are 0, and whose
    operands may hold anything. ``cu_seqlens``: ints ``[documents + 1]``, the same on every rank: where the documents of the whole
    sequence begin and end; tokens after the last are padding. ``ring``: a :class:`ring_attn.Ring`; or ``mesh``, ``mesh_dim`` and
    ``layout`` as for :func:`ring_attn.ring_attention`, of the layouts all but "striped", which only "ulysses" takes.
    """

    initial_state: Tensor | None
    output_final_state: bool
    segment_ids: Tensor | None
    cu_seqlens: Tensor | None
    ring: "Ring | None"
    mesh: MeshLike
    mesh_dim: MeshDim
    layout: Layout


def _where(
    *operands: object, ring: "Ring | None" = None, mesh: MeshLike = None, mesh_dim: MeshDim = None, **others: object
) -> MeshArg:
    """Mesh and mesh dimension of a call."""
    return (mesh, mesh_dim) if ring is None else (getattr(ring, "mesh", None), getattr(ring, "mesh_dim", None))


@propagates_errors(_where)
def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None, **along: Unpack[Along]
) -> Result:
    """A causal convolution of each channel: ``y_t = activation(bias + sum_j weight[:, width - 1 - j] x_{t - j})``.

    ``x [batch, seq, channels]`` of this rank; ``weight [channels, width]`` with ``width`` >= 2 and ``bias [channels]``, the same on
    all ranks; ``activation``: None, "silu" or "swish". The state is the last ``width - 1`` inputs of the last document, ``[batch,
    width - 1, channels]``, 0 where it has fewer; padding is as if it were not there, also between inputs. Computed in float32
    (float64 for float64); the result is like ``x``. Differentiable in all of them; the gradients of weight and bias are this
    rank's part (``sync_gradients``). The rest: :class:`Along`.

    Each rank sends ``(width - 1) x channels`` a piece of its shard; to all ranks where there are documents. Raises ValueError for
    inputs that do not fit together, here or on another rank, or were sharded in another layout, NotImplementedError for "striped"
    and DTensors.
    """
    if activation not in (None, "silu", "swish"):
        raise ValueError(f'activation must be None, "silu" or "swish", got {activation!r}')
    named = {"x": x, "weight": weight, "bias": bias}
    return layer_along(named, dict(activation=activation and "silu"), **along)


@propagates_errors(_where)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    chunk_size: int = CHUNK,
    strategy: str = "auto",
    operator: "DeltaRule | None" = None,
    **along: Unpack[Along],
) -> Result:
    """``S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - (exp(g_t) S_{t-1})^T k_t))^T``, ``y_t = scale S_t^T q_t``.

    ``q, k [batch, seq, key heads, key_dim]``, ``v [batch, seq, heads, value_dim]``, where the heads are a multiple of the key
    heads; ``g`` (the logarithm of the decay; -inf: 0, None: no decay) and ``beta [batch, seq, heads]``. ``scale``: None means ``1 /
    sqrt(key_dim)``. ``qk_l2norm``: divide q and k by their norms first, as fla's ``use_qk_l2norm_in_kernel``. ``chunk_size``:
    tokens that are computed at once. ``strategy``: "prefix" sends the map of each piece of a shard to all ranks; "ulysses" is an
    all-to-all of heads, which must be a multiple of the ring's size; "auto" is the one that sends fewer bytes (docs/hybrids.md).
    ``operator``: what computes a rank's tokens in the place of plain JAX, as ``fla.ops.gated_delta_rule.chunk_gated_delta_rule``
    (:class:`ring_attn.recurrence.operators.DeltaRule`); by "prefix", in chunks and in a precision of its own.
    The state is ``[batch, heads, key_dim, value_dim]``, float32 (float64 for float64). Differentiable in all operands and in both
    states. Computed in float32 (float64 for float64); the result is like ``v``. The rest: :class:`Along`.

    With "prefix" each rank sends ``key_dim x (key_dim + value_dim)`` float32 for each head and piece of its shard to every other,
    in each pass. Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464. Errors as :func:`causal_conv1d`; ValueError for heads that
    "ulysses" cannot share. The ``strategy`` of a :class:`ring_attn.Ring` is attention's alone.
    """
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    settings = dict(operator="gated_delta_rule", scale=scale, l2norm=qk_l2norm, chunk=chunk_size, strategy=strategy)
    return layer_along(named, settings, operator, **along)


@propagates_errors(_where)
def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    chunk_size: int = CHUNK,
    strategy: str = "auto",
    operator: "DeltaRule | None" = None,
    **along: Unpack[Along],
) -> Result:
    """Kimi Delta Attention (arXiv:2510.26692): :func:`gated_delta_rule` with a decay for each key dimension, ``g [batch, seq,
    heads, key_dim]``."""
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    settings = dict(operator="kda", scale=scale, l2norm=qk_l2norm, chunk=chunk_size, strategy=strategy)
    return layer_along(named, settings, operator, **along)


@propagates_errors(_where)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    chunk_size: int = CHUNK,
    strategy: str = "auto",
    **along: Unpack[Along],
) -> Result:
    """``S_t = exp(g_t) S_{t-1} + k_t v_t^T``, ``y_t = scale S_t^T q_t``; operands, results and errors as :func:`gated_delta_rule`.

    ``g``, the logarithm of the decay: None, ``[heads]`` (retention, lightning attention), ``[batch, seq, heads]`` (simple GLA),
    ``[heads, key_dim]`` or ``[batch, seq, heads, key_dim]`` (gated linear attention, arXiv:2312.06635). With "prefix" each
    rank sends ``key_dim x value_dim`` and the decay, 1 or ``key_dim``, for each head and piece."""
    named = {"q": q, "k": k, "v": v, "g": g}
    return layer_along(named, dict(operator="linear_attention", scale=scale, chunk=chunk_size, strategy=strategy), **along)


@propagates_errors(_where)
def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    chunk_size: int = CHUNK,
    strategy: str = "auto",
    operator: "StateSpace | None" = None,
    **along: Unpack[Along],
) -> Result:
    """Mamba-2's state space model (arXiv:2405.21060): ``S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T``, ``y_t = S_t C_t + D x_t``.

    ``x [batch, seq, heads, head_dim]``, ``dt [batch, seq, heads]`` (after its bias and softplus), ``A [heads]`` (negative), ``B, C
    [batch, seq, groups, state_dim]``, ``D [heads]`` or ``[heads, head_dim]``. The state is ``[batch, heads, head_dim, state_dim]``.
    Dtypes, derivatives and errors as :func:`gated_delta_rule`; the result is like ``x``. The gradients of A and D are this rank's
    part. ``strategy`` as there; with "prefix" each rank sends ``head_dim x state_dim + 1`` for each head and piece. ``operator`` as
    there: ``mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined``, which is given ``chunk_size``, say
    (:class:`ring_attn.recurrence.operators.StateSpace`)."""
    named = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D}
    return layer_along(named, dict(operator="ssd", chunk=chunk_size, strategy=strategy), operator, **along)


@explains(OTHERS)
def layer_along(
    operands: Mapping[str, Tensor | None],
    settings: Mapping[str, Any],
    by: "DeltaRule | StateSpace | None" = None,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ring: "Ring | None" = None,
    mesh: MeshLike = None,
    mesh_dim: MeshDim = None,
    layout: Layout = "contiguous",
) -> Result:
    ring = as_ring(ring, mesh, mesh_dim, layout)
    where, layout = (ring.mesh, ring.mesh_dim), ring.layout
    first: Any = next(iter(operands.values()))
    _check({**operands, "initial_state": initial_state, "segment_ids": segment_ids}, first)
    if not torch.compiler.is_compiling():
        tokens = {name: x for name, x in operands.items() if x is not None and x.ndim > 2}
        masked = segment_ids is not None or cu_seqlens is not None
        check_shards_of_layer(where, layout, tokens | {"segment_ids": segment_ids}, masked)
    if cu_seqlens is not None:
        if segment_ids is not None:
            raise ValueError("segment_ids and cu_seqlens both say where documents are; give one of the two")
        segment_ids = _ids(where, layout, cu_seqlens, first)
    options: dict[str, Any] = {name: plain(value) for name, value in settings.items()}
    options["final_state"] = bool(output_final_state)
    # Imported here so that importing ring_attn does not load JAX.
    if by is not None and first.numel():
        from jax_core.recurrence.operators import Recurrence
        from ring_attn.recurrence.operators import by_operator

        y, last = by_operator(by, where, layout, Recurrence(**options), operands, initial_state, segment_ids)
    else:
        from torch_bridge.recurrence.functional import layer_with_state

        y, last = layer_with_state(where, (*operands.values(), initial_state), segment_ids, layout=layout, **options)
    return (y, last) if output_final_state else y


def _check(tensors: Mapping[str, object], first: Tensor) -> None:
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if is_dtensor(x):
            raise NotImplementedError(
                f"{name} is a DTensor, which layers with a state do not take: give this rank's part, .to_local()"
            )
        check_dense(name, x)
        if x.device != first.device:
            raise ValueError(
                f"all tensors must be on one device: {name} is on {x.device}, others on {first.device}; move it with .to()"
            )


def _ids(where: MeshArg, layout: Layout, cu_seqlens: Tensor, first: Tensor) -> Tensor:
    """``[1, seq]``: the documents of this rank's tokens."""
    total = first.shape[1] * tensors_per_sequence_of(where, first.device)
    check_cumulative("cu_seqlens", cu_seqlens, total, first.device)
    return or_padding(documents_of(index_of(where, layout, first), cu_seqlens), cu_seqlens)[None]
