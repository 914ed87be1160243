"""The attention of diffusers' transformers on a ring, forward and backward, for any length.

diffusers shards a transformer by the model's plan (``_cp_plan``), whose hooks split the inputs and gather the output, and sends
attention through a table of backends. This module adds a backend to the table and uses the model's plan as it is.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import ContextParallelConfig, ModelMixin, ParallelConfig
from diffusers.hooks import HookRegistry, ModelHook, apply_context_parallel
from diffusers.hooks.context_parallel import _get_submodule_by_name
from diffusers.models._modeling_parallel import ContextParallelOutput
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.attention_processor import Attention, MochiAttention
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn.functional import AttentionOptions, ring_attention
from ring_attn.ring import Ring, as_ring
from ring_attn.sharding.autograd import Context
from ring_attn.sharding.reduction import gather_from_ring
from torch_bridge.mesh.rings import MeshDim, MeshLike, ProcessRing, resolve


def _backend_name() -> AttentionBackendName:
    """A name that the table takes, without adding a member to diffusers' enumeration."""
    name = str.__new__(AttentionBackendName, "ring_attn")
    name._name_, name._value_ = "RING_ATTN", "ring_attn"
    return name


RING_ATTN = _backend_name()


# Of a module: how its inputs are split, or how its outputs are gathered.
CpPlan = dict[str, dict[str | int, object] | ContextParallelOutput | Sequence[ContextParallelOutput | None]]


class _Processor(Protocol):
    _attention_backend: AttentionBackendName | None
    _parallel_config: ParallelConfig | None


def enable_ring_attention(
    model: ModelMixin,
    *,
    ring: Ring | None = None,
    mesh: MeshLike = None,
    mesh_dim: MeshDim = None,
    cp_plan: CpPlan | None = None,
) -> None:
    """Makes a diffusers transformer compute on a ring, as ``model.enable_parallelism(config=ContextParallelConfig(...))`` does with
    diffusers' own ring, on any device and mesh, for any lengths, and right in the backward too.

    Every rank then calls the model with the same whole inputs and gets the whole output. Within, by the model's plan, the sequence
    is split over the ring in contiguous parts, which may differ in length by one position a tensor: attention pads them to one
    length and hides the padding. Text that the plan splits (Flux) is attended to jointly, over the ring; text that every rank
    holds whole (Wan's cross attention) is attended to by each rank's own queries. If every rank computes the same loss from the
    output, the gradients of parameters and inputs are each rank's part, to be summed over the ring (``ring_attn.sync_gradients``).

    ``ring``, or ``mesh`` and ``mesh_dim``: as for :func:`ring_attn.ring_attention`, with the contiguous layout. ``cp_plan``: in
    place of the model's own. A ring of one leaves the model as it is.

    Raises ValueError for another layout, and for a model without a plan or attention; RuntimeError if it is parallel already;
    NotImplementedError if an attention's processor does not pass its calls on to the table of backends.
    """
    place = as_ring(ring, mesh, mesh_dim)
    if place.layout != "contiguous":
        raise ValueError(
            f"diffusers' plans split contiguously, got layout={place.layout!r}; nothing is causal, so the work is even"
        )
    plan = model._cp_plan if cp_plan is None else cp_plan
    if plan is None:
        raise ValueError(f"{type(model).__name__} has no plan for context parallelism (_cp_plan); pass cp_plan")
    if model._parallel_config is not None:
        raise RuntimeError(f"parallelism is already applied to this {type(model).__name__}")
    processors = _processors(model)
    if place.size == 1:
        return
    assert place.group is not None
    config = _config(place.group, model.device.type)
    for processor in processors:
        processor._attention_backend, processor._parallel_config = RING_ATTN, config
    model._parallel_config = config
    _apply(model, config.context_parallel_config, plan, place.group)


def use_ring_attention(model: ModelMixin) -> None:
    """Sets this library's ring as the model's attention backend, as ``model.set_attention_backend`` sets those of diffusers. What
    ``model.enable_parallelism(config=ContextParallelConfig(ring_degree=...))`` does after it then runs on this ring.

    diffusers finds its mesh by the accelerator, and gathers parts of different lengths (``ring_anything=True``) with NCCL only: on
    CPUs use :func:`enable_ring_attention`. Raises NotImplementedError as it does.
    """
    for processor in _processors(model):
        processor._attention_backend = RING_ATTN


def _processors(model: nn.Module) -> list[_Processor]:
    """The processors of all attention modules, which hold their backend."""
    kinds = (Attention, MochiAttention, AttentionModuleMixin)
    processors = {name: module.processor for name, module in model.named_modules() if isinstance(module, kinds)}
    for name, processor in processors.items():
        if not hasattr(processor, "_attention_backend") or not hasattr(processor, "_parallel_config"):
            raise NotImplementedError(
                f"{name} has a {type(processor).__name__}, which does not use diffusers' table of backends and would attend to "
                "this rank's part alone; set a processor that does"
            )
    if not processors:
        raise ValueError(f"{type(model).__name__} has no attention module that diffusers knows")
    return list(processors.values())


def _config(group: dist.ProcessGroup, device: str) -> ParallelConfig:
    """What diffusers' own ``setup`` would make of a mesh with a dimension for Ulysses."""
    config = ContextParallelConfig(ring_degree=dist.get_world_size(group), ring_anything=True)
    config._ring_mesh = config._flattened_mesh = config._mesh = DeviceMesh.from_group(group, device)
    config._ring_local_rank = config._rank = dist.get_rank(group)
    return ParallelConfig(context_parallel_config=config)


def _apply(model: nn.Module, config: ContextParallelConfig, plan: CpPlan, group: dist.ProcessGroup) -> None:
    """diffusers' hooks where they split, and our own where they gather: its needs NCCL for parts of different lengths."""
    apply_context_parallel(model, config, {name: entry for name, entry in plan.items() if isinstance(entry, dict)})
    for name, entry in plan.items():
        if isinstance(entry, dict):
            continue
        outputs = [entry] if isinstance(entry, ContextParallelOutput) else list(entry)
        modules = _get_submodule_by_name(model, name)
        for module in modules if isinstance(modules, list) else [modules]:
            hook = _GatherHook(outputs, group)
            HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, f"ring_attn_gather---{name}")


class _GatherHook(ModelHook):
    def __init__(self, outputs: Sequence[ContextParallelOutput | None], group: dist.ProcessGroup) -> None:
        super().__init__()
        self.outputs, self.group = outputs, group

    def post_forward(self, module: nn.Module, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        given = (output,) if isinstance(output, Tensor) else tuple(output)
        whole = tuple(
            x if plan is None else _Gather.apply(x, plan.gather_dim, self.group)
            for x, plan in zip(given, self.outputs, strict=True)
        )
        return whole[0] if isinstance(output, Tensor) else whole


class _Part(Context, Protocol):
    """Of this rank, along a dim."""

    dim: int
    start: int
    length: int


class _Gather(torch.autograd.Function):
    """The parts of all ranks in order. Its gradient is that of this rank's part: all ranks compute the same from the whole."""

    @staticmethod
    def forward(ctx: _Part, part: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ring, call = resolve(group), f"diffusers' gathering of outputs along dim {dim}"
        lengths = [length for (length,) in _sizes((part.shape[dim],), part.device, ring, call)]
        rank = dist.get_rank(group)
        ctx.dim, ctx.start, ctx.length = dim, sum(lengths[:rank]), lengths[rank]
        parts = gather_from_ring(_padded(part, dim, max(lengths)), ring, "outputs", call)
        return torch.cat([x.narrow(dim, 0, length) for x, length in zip(parts, lengths, strict=True)], dim)

    @staticmethod
    def backward(ctx: _Part, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(ctx.dim, ctx.start, ctx.length), None, None


def _sizes(local: Sequence[int], device: torch.device, ring: ProcessRing, call: str) -> list[list[int]]:
    """What every rank of the ring has."""
    sizes: list[list[int]] = gather_from_ring(torch.tensor(local, device=device), ring, "sizes", call).tolist()
    return sizes


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    after = [0, 0] * (tensor.ndim - 1 - dim % tensor.ndim)
    return F.pad(tensor, [*after, 0, length - tensor.shape[dim]])


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    _parallel_config: ParallelConfig | None = None,
) -> Tensor:
    """The backend: ``[batch, positions, heads, dim]`` of this rank, and the keys of all ranks; without a configuration, keys that
    this rank holds whole."""
    if _parallel_config is None:
        native: Callable[..., Tensor] = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
        return native(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    config = _parallel_config.context_parallel_config
    _check(config, query, key, is_causal, enable_gqa)
    group = config._ring_mesh.get_group()
    local = (query.shape[1], key.shape[1])
    sizes = _sizes(local, query.device, resolve(group), "diffusers' attention") if config.ring_anything else [list(local)]
    rows, columns = (max(lengths) for lengths in zip(*sizes, strict=True))
    uneven = any(lengths != sizes[0] for lengths in sizes)
    options: AttentionOptions = {"mesh": group, "scale": scale, "dropout_p": dropout_p}
    if attn_mask is not None or uneven:
        options |= _segments(attn_mask, query, key, rows, columns)
    q, k, v = _padded(query, 1, rows), _padded(key, 1, columns), _padded(value, 1, columns)
    return ring_attention(q, k, v, **options)[:, : local[0]]


def _check(config: ContextParallelConfig, query: Tensor, key: Tensor, is_causal: bool, enable_gqa: bool) -> None:
    if config.ulysses_degree > 1:
        raise NotImplementedError(
            f"this ring has no Ulysses dimension, got ulysses_degree={config.ulysses_degree}; use ring_degree alone"
        )
    if is_causal:
        raise NotImplementedError("diffusers' plans join the parts of several sequences, so causal has no meaning here")
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise ValueError(f"queries have {query.shape[2]} heads and keys {key.shape[2]}, which needs enable_gqa=True")


def _segments(mask: Tensor | None, query: Tensor, key: Tensor, rows: int, columns: int) -> AttentionOptions:
    """Segment ids in which the padding and hidden keys are -1."""
    visible = query.new_ones(key.shape[:2], dtype=torch.bool) if mask is None else _visible_keys(mask, key)
    queries = query.new_zeros(query.shape[:2], dtype=torch.int32)
    return {
        "q_segment_ids": F.pad(queries, (0, rows - query.shape[1]), value=-1),
        "kv_segment_ids": F.pad(visible.to(torch.int32) - 1, (0, columns - key.shape[1]), value=-1),
    }


def _visible_keys(mask: Tensor, key: Tensor) -> Tensor:
    """A bool mask over this rank's keys, ``[batch, keys]`` or ``[batch or 1, 1, 1, keys]``, as ``[batch, keys]``."""
    shape = tuple(mask.shape)
    flat = mask.flatten(0, -2) if mask.ndim == 4 and shape[1:3] == (1, 1) else mask
    if mask.dtype != torch.bool or flat.ndim != 2 or flat.shape[0] not in (1, key.shape[0]) or flat.shape[1] != key.shape[1]:
        raise NotImplementedError(
            f"on a ring the mask must be bool over this rank's keys, [batch, {key.shape[1]}] or [batch, 1, 1, {key.shape[1]}], got "
            f"{mask.dtype} {list(shape)}: other masks would need the columns of all ranks"
        )
    return flat.expand(key.shape[0], -1)


_AttentionBackendRegistry.register(RING_ATTN, supports_context_parallel=True)(_attend)
