"""``replace_attention``: makes every ``nn.MultiheadAttention`` of a model a ``RingAttention``, in place."""

from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch import nn

from jax_core.masks.layout import Layout
from ring_attn.module.attention import RingAttention
from ring_attn.ring import Ring, as_ring
from torch_bridge.mesh.rings import MeshDim, MeshLike


class Replaced(NamedTuple):
    """``swapped``: the names of the modules that are now ``RingAttention``. ``left``: the names of the other attention modules, and
    why each was left; they still attend to this process's shard alone."""

    swapped: tuple[str, ...]
    left: dict[str, str]


def replace_attention(
    model: nn.Module,
    *,
    ring: Ring | None = None,
    mesh: MeshLike = None,
    mesh_dim: MeshDim = None,
    layout: Layout = "contiguous",
    leave: Collection[str] = (),
) -> Replaced:
    """Makes every ``nn.MultiheadAttention`` in ``model``, also those in ``nn.TransformerEncoder`` and ``nn.TransformerDecoder``, a
    :class:`ring_attn.RingAttention` on this ring, and reports what was swapped and what was not.

    The modules are changed in place: parameters, and so optimizers and tied weights, hooks, training mode, dtype, device, state
    dict and the objects themselves stay. Call it before ``fully_shard``, DDP and ``torch.compile`` wrap the model.

    The model then takes shards ``ring_attn.shard(x, mesh)`` and gives shards:

    - ``src_mask``, ``tgt_mask`` and ``memory_mask`` are this process's rows of the whole mask, ``shard(mask, dim=-2)``, with the
      columns of all keys; one made for the local length is refused. A causal model needs none: ``is_causal=True`` is enough.
    - Key padding masks are this process's own, as in ``RingAttention.forward``.
    - ``memory`` is sharded too. Held whole by every process it gives the same result without a mask, at the price of sending it and
      a warning that all ranks hold the same values.
    - ``nn.TransformerEncoder``'s nested tensors, and the fused inference path of its layers, are turned off.

    A caller of the attention module itself who leaves ``need_weights`` out gets None for the weights, and asking for them raises:
    name such modules in ``leave``.

    Left, with the reason: subclasses of ``nn.MultiheadAttention`` (parametrized, quantized, or sharded by FSDP), which may compute
    something else, modules whose weights are no plain parameters (pruned, weight-normed) or whose ``forward`` is their own,
    scripted ones, those of ``leave``, and those that are a ``RingAttention`` already.

    ``ring``, or ``mesh``, ``mesh_dim``, ``layout``: as for :func:`ring_attn.ring_attention`. Raises ValueError for a name in
    ``leave`` that is no attention module.
    """
    place = as_ring(ring, mesh, mesh_dim, layout)
    modules = dict(_attention_modules(model))
    unknown = sorted(set(leave) - set(modules))
    if unknown:
        raise ValueError(f"leave must hold names of attention modules, {sorted(modules)}, got {unknown}")
    left = {name: reason for name, module in modules.items() if (reason := "named in leave" if name in leave else _reason(module))}
    swapped = tuple(name for name in modules if name not in left)
    for name in swapped:
        _swap(modules[name], place)
    if swapped:
        _turn_off_nested_tensors(model)
    return Replaced(swapped, left)


def _attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        scripted = getattr(module, "original_name", None) == "MultiheadAttention"
        if scripted or isinstance(module, nn.MultiheadAttention):
            yield name, module


def _reason(module: nn.Module) -> str | None:
    """Why a module is not swapped, or None."""
    if isinstance(module, RingAttention):
        return "it is a RingAttention already"
    if type(module) is not nn.MultiheadAttention:
        return f"it is a {type(module).__name__}, not nn.MultiheadAttention itself, and may compute something else"
    if "forward" in vars(module):
        return "it has a forward of its own"
    weights = ("in_proj_weight",) if module._qkv_same_embed_dim else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    missing = [name for name in weights if module._parameters.get(name) is None]
    return f"its {missing[0]} is no plain parameter (pruned, or weight-normed)" if missing else None


def _swap(module: nn.Module, ring: Ring) -> None:
    """Changes the class, as ``fully_shard`` does, and adds what a RingAttention of these sizes has beside the parameters."""
    assert isinstance(module, nn.MultiheadAttention)
    sizes = {name: getattr(module, name) for name in ("kdim", "vdim", "dropout", "batch_first", "add_zero_attn")}
    fresh = RingAttention(module.embed_dim, module.num_heads, **sizes, ring=ring, device="meta")
    module.__class__ = RingAttention
    for name, value in vars(fresh).items():
        vars(module).setdefault(name, value)
    module._qkv_same_embed_dim = False  # as in RingAttention's constructor
    module._parameters.setdefault("sinks", None)
    module.register_buffer("alibi_slopes", None, persistent=False)


def _turn_off_nested_tensors(model: nn.Module) -> None:
    """An encoder decides on nested tensors when it is made, by what its attention was then."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(isinstance(inner, RingAttention) for inner in module.modules()):
            module.use_nested_tensor = module.enable_nested_tensor = False
