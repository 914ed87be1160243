"""torchtitan's decoders with their sequence on a ring: a converter of model configs, and a checkpointing policy to go with it.

    model_spec = model_registry("8B", converters=[RingAttentionConverter.Config()])

Everything else is torchtitan's own, and stays: ``--parallelism.context_parallel_degree`` says how large the ring is, its trainer
shards the batch over it (``context_parallel_load_balancer`` "headtail" is our zigzag, None is contiguous), divides the loss by the
tokens of all ranks, and sums gradients through FSDP2. Where torchtitan would gather all keys and values on every rank, the
converter's attention sends them around the ring. ``--training.disable_cuda_graphs`` is required.

Written for torchtitan 0.3 and its ``spmd_types`` backend.
"""

from dataclasses import dataclass
from typing import Protocol

import spmd_types as spmd
import torch
from spmd_types.runtime import get_local_type, get_partition_spec
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.override import derive
from torchtitan.distributed import activation_checkpoint
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenAttention
from torchtitan.models.common.decoder_sharding import dense_activation_placement
from torchtitan.protocols.model import BaseModel, ModelConfigConverter
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from ring_attn.documents.cumulative import require
from ring_attn.ring import Ring
from ring_attn.sharding import sequence
from torch_bridge.start.runtime import start

_BACKENDS = ("spmd_types", "full_dtensor")
_LAYOUTS = {"headtail": "zigzag", None: "contiguous"}


class RingAttention(Module):
    """What torchtitan calls an inner attention: causal, within the documents of packed sequences, of ``[batch, seq, heads, dim]``.

    ``window``: how many earlier tokens a token sees; None: all. ``layout`` follows torchtitan's load balancer.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window: int | None = None
        layout: str = "contiguous"

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window, self.layout = config.window, config.layout
        self.ring = Ring("local")

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        if parallel_dims.cp_enabled:
            # All ranks are here at one time. In a pipeline the first calls of its stages are not: a stage waits for the one before.
            start()
            self.ring = Ring(parallel_dims.get_mesh("cp"), layout=self.layout)
        super().parallelize(parallel_dims)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """``attention_masks``: the documents of :meth:`documents`. ``enable_gqa`` is always on."""
        with spmd.no_typecheck():
            out = self.ring.attention(
                q_BLNH,
                k_BLNH,
                v_BLNH,
                causal=True,
                sliding_window=None if self.window is None else (self.window, 0),
                scale=scale,
                q_segment_ids=attention_masks,
                kv_segment_ids=attention_masks,
            )
        if spmd.is_type_checking():
            spmd.assert_type(out, get_local_type(q_BLNH), get_partition_spec(q_BLNH))
        return out

    def documents(self, positions: Tensor | None) -> Tensor | None:
        """Which document each token ``[batch, seq of this shard]`` belongs to, by the place where it begins in the sequence.

        Positions restart at 0 in every document of torchtitan's packed sequences, so the difference between a token's place and its
        position tells documents apart, on every rank alike.
        """
        if positions is None:
            return None
        positions = positions.to_local() if isinstance(positions, DTensor) else positions
        with spmd.no_typecheck():
            place = sequence.positions(positions.shape[1] * self.ring.size, device=positions.device, **self.ring.arguments())
            begin = place - positions
            require((begin >= 0).all(), "positions must restart at 0 in every document, and none be further than its place")
            return begin


class RingGQAttention(GQAttention):
    """torchtitan's grouped-query attention, which tells its inner attention the documents rather than a mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    inner_attention: RingAttention

    def forward(self, x_BLD: Tensor, attention_masks: object, positions: Tensor | None = None) -> Tensor:
        if attention_masks is not None:
            raise NotImplementedError("ring attention takes documents from positions; it got an attention mask")
        documents = self.inner_attention.documents(positions)
        return super().forward(x_BLD, documents, positions)


class RingAttentionConverter(ModelConfigConverter):
    """Gives every attention of a model a ring: Llama 3 and Qwen 3, dense or with experts.

    Raises NotImplementedError for attention that is not torchtitan's ``GQAttention``, and, when the trainer reads the config,
    ValueError for settings that do not go with a ring.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ModelConfigConverter.Config):
        pass

    def __init__(self, config: Config) -> None:
        self.config = config

    def convert(self, model_config: BaseModel.Config) -> BaseModel.Config:
        for layer in model_config.layers:
            layer.attention = _with_ring(layer.attention)
        return derive(model_config, _settling(type(model_config)))


class SelectiveAC(activation_checkpoint.SelectiveAC):
    """torchtitan's selective activation checkpointing, which also keeps the attention's result: no ring runs twice in a step."""

    @dataclass(kw_only=True, slots=True)
    class Config(activation_checkpoint.SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[object]:
        import torch_bridge.call.operators  # noqa: F401  registers the operator

        return super().get_save_ops() | {torch.ops.ring_attn.forward.default}


def _with_ring(attention: Module.Config) -> RingGQAttention.Config:
    if type(attention) is not GQAttention.Config:
        raise NotImplementedError(
            f"only torchtitan's GQAttention has a ring so far (Llama 3, Qwen 3), got {type(attention).__qualname__} of "
            f"{type(attention).__module__}; call ring_attn.ring_attention in a model of your own"
        )
    inner = RingAttention.Config(window=_window(attention.inner_attention))
    return derive(attention, RingGQAttention.Config, inner_attention=inner)


def _window(inner: Module.Config) -> int | None:
    """How many earlier tokens the given attention sees, None for all."""
    if isinstance(inner, FlexAttention.Config):
        return None
    if isinstance(inner, VarlenAttention.Config) and inner.window_size[1] == 0:
        left = inner.window_size[0]
        return None if left < 0 else left
    raise NotImplementedError(f"only causal attention within documents has a ring; got {inner}; use attn_backend='flex'")


class _Config(Protocol):
    """A trainer's."""

    parallelism: ParallelismConfig


def _settling(config_class: type[BaseModel.Config]) -> type[BaseModel.Config]:
    """A class of model config that looks, when the trainer hands over its settings, at those that a ring depends on."""

    class Settling(config_class):
        def update_from_config(self, *, config: _Config, **kwargs: object) -> None:
            config_class.update_from_config(self, config=config, **kwargs)
            layout = _checked_layout(config.parallelism, getattr(config, "training", None))
            for layer in self.layers:
                layer.attention.inner_attention.layout = layout
                layer.attention.inner_attention.sharding_config = _on_shards()

    Settling.__name__, Settling.__qualname__ = config_class.__name__, config_class.__qualname__
    return Settling


def _checked_layout(parallelism: ParallelismConfig, training: TrainingConfig | None) -> str:
    if parallelism.context_parallel_degree == 1:
        return "contiguous"
    if parallelism.spmd_backend not in _BACKENDS:
        raise ValueError(f"parallelism.spmd_backend must be one of {_BACKENDS} with a ring, got {parallelism.spmd_backend!r}")
    if training is not None and not training.disable_cuda_graphs:
        raise ValueError("a ring cannot be captured in a CUDA graph; set training.disable_cuda_graphs")
    balancer = parallelism.context_parallel_load_balancer
    if balancer not in _LAYOUTS:
        raise ValueError(f"parallelism.context_parallel_load_balancer must be 'headtail' or None on a ring, got {balancer!r}")
    return _LAYOUTS[balancer]


def _on_shards() -> ShardingConfig:
    """Queries, keys and values stay as they are: the sequence over cp, heads over tp."""
    placement = dense_activation_placement(tp=spmd.S(2))
    inputs = {"q_BLNH": placement, "k_BLNH": placement, "v_BLNH": placement}
    return ShardingConfig(
        in_src_shardings=inputs,
        in_dst_shardings=inputs,
        out_src_shardings=placement,
        local_map=LocalMapConfig(in_grad_placements=(placement, placement, placement)),
    )
