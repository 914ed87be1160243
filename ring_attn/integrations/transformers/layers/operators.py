"""The operators of layers with a state, as transformers calls them. Layers hand all keyword arguments of their model on to them, as
``num_items_in_batch`` of its loss. Those of :data:`_NEEDLESS` mean nothing to an operator; of others, as ``scale``, transformers'
operators know nothing either, but kernels in their place do."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ring_attn.integrations.transformers.layers.kernels import Operators, operator_for
from ring_attn.recurrence import Along, Result, causal_conv1d, gated_delta_rule, kda, linear_attention, ssd

# What models hand on for attention, their outputs and their losses.
_NEEDLESS = frozenset(
    (
        *("position_ids", "position_embeddings", "cache_position", "token_type_ids", "mm_token_type_ids"),
        *("is_causal", "sliding_window", "use_cache", "num_items_in_batch", "logits_to_keep"),
        *("output_hidden_states", "output_attentions", "output_router_logits", "return_dict"),
    )
)


_CHANNELS = 256  # of a selective scan at once, whose temporaries are 74 times its decays


class LayerOnRing(NamedTuple):
    """A layer's forward under way on the ring: what its operators take beside their own operands, what may compute them in the
    place of plain JAX, and which of them it has called."""

    along: Along
    operators: Operators | None
    called: set[str]


def _without(name: str, others: Mapping[str, object], **given: object) -> None:
    """Earlier states and documents in transformers' words, which a sharded batch has none of, and what is not known."""
    for argument, value in {**given, **others}.items():
        if argument not in _NEEDLESS and value is not None and value is not False:
            raise NotImplementedError(
                f"{argument} was given to {name} of a layer on the ring, which would be computed without it: leave it out of the "
                "batch and of the call"
            )


def _convolution(
    layer: LayerOnRing,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: object = None,
    **others: object,
) -> Tensor:
    """``hidden_states [batch, channels, seq]``."""
    _without("causal_conv1d_fn", others, seq_idx=seq_idx)
    y = causal_conv1d(hidden_states.transpose(1, 2), weight, bias, activation=activation, **layer.along)
    assert isinstance(y, Tensor)
    return y.transpose(1, 2)


def _delta_rule(function: Callable[..., Result]) -> Callable[..., Result | tuple[Result, None]]:
    def delta_rule(
        layer: LayerOnRing,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: object = None,
        **others: object,
    ) -> Result | tuple[Result, None]:
        _without(function.__name__, others, initial_state=initial_state, cu_seqlens=cu_seqlens)
        settings = dict(qk_l2norm=use_qk_l2norm_in_kernel, chunk_size=chunk_size, output_final_state=output_final_state)
        operator = operator_for(function.__name__, layer.operators, value)
        result = function(query, key, value, g, beta, **settings, operator=operator, **layer.along)
        return result if output_final_state else (result, None)

    return delta_rule


def _state_space(
    layer: LayerOnRing,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    seq_idx: object = None,
    **others: object,
) -> Result:
    _without("mamba2_chunk_scan", others, initial_states=initial_states, z=z, seq_idx=seq_idx)
    dt = _time_steps(dt, dt_bias, dt_softplus)
    along: Along = {**layer.along, "output_final_state": return_final_states}
    operator = operator_for("ssd", layer.operators, hidden_states)
    return ssd(hidden_states, dt.clamp(*dt_limit), A, B, C, D, chunk_size=chunk_size, operator=operator, **along)


def _time_steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """float32 at least, as in mamba_ssm."""
    dt = dt.to(torch.promote_types(dt.dtype, torch.float32))
    dt = dt if bias is None else dt + bias
    return functional.softplus(dt) if softplus else dt


def _selective_scan(
    layer: LayerOnRing,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **others: object,
) -> Result:
    """Mamba's state space model (arXiv:2312.00752), ``hidden_states, dt, z [batch, channels, seq]``, ``A [channels, state]``, ``B,
    C [batch, state, seq]``: gated linear attention, of which each channel is a head with one value, and each of its key dimensions
    has a decay. So many channels at a time. The last two ways of transformers' to compute it are none here."""
    _without("mamba_selective_scan", others)
    dt = _time_steps(dt.transpose(1, 2), delta_bias, delta_softplus)
    x = hidden_states.transpose(1, 2)
    queries, keys = (y.transpose(1, 2)[:, :, None].to(dt.dtype) for y in (C, B))
    along: Along = {**layer.along, "output_final_state": return_last_state}
    scan = partial(linear_attention, queries, keys, scale=1.0, **along)
    parts = zip(*(y.split(_CHANNELS, -1) for y in (dt * x, dt)), A.split(_CHANNELS), strict=True)
    results = [scan(values[..., None], steps[..., None] * rates) for values, steps, rates in parts]
    y = torch.cat([x[0] if isinstance(x, tuple) else x for x in results], 2)[..., 0]
    y = y if D is None else y + x * D
    y = y.transpose(1, 2) if z is None else y.transpose(1, 2) * functional.silu(z)
    return (y, torch.cat([x[1] for x in results], 1)[..., 0]) if return_last_state else y


OPERATORS: dict[str, Callable[..., object]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule(gated_delta_rule),
    "chunk_kimi_delta_attention": _delta_rule(kda),
    "mamba2_chunk_scan": _state_space,
    "mamba_selective_scan": _selective_scan,
}
# Those of them that an operator of torch's may compute, by their names in ring_attn.
FUNCTIONS = {
    "torch_chunk_gated_delta_rule": "gated_delta_rule",
    "chunk_kimi_delta_attention": "kda",
    "mamba2_chunk_scan": "ssd",
}
# All of a layer at once, which has no way to the ring; layers go on with the operators if it returns None.
FUSED = ("mamba2_split_conv1d_scan_combined",)
