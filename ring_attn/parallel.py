"""Tensor parallelism of :class:`ring_attn.RingAttention`: its heads split over a dimension of the mesh, beside the ring."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from ring_attn.module.attention import RingAttention
from ring_attn.module.projections import separate

# Where a parameter is split. All others are replicated: in_proj_bias holds the rows of three projections, which are split apart.
_SPLIT = {
    "q_proj_weight": 0,
    "k_proj_weight": 0,
    "v_proj_weight": 0,
    "out_proj.weight": 1,
    "sinks": 0,
    "alibi_slopes": 0,
}


class HeadParallel(ParallelStyle):
    """A style for ``parallelize_module``: every process of the mesh computes its share of a :class:`RingAttention`'s heads.

        parallelize_module(model, mesh["tp"], {"layers.*.attention": HeadParallel()})

    The projections of queries, keys and values are split by heads, each for itself, and the output's by its columns; sinks and
    learned slopes with their heads. Results and gradients are those of the module in one process, dropout included if the
    processes have the same seed. The ring goes on over the module's own ``mesh`` and ``mesh_dim``, which must be given and must
    not be the dimension of the heads.

    Parameters become DTensors. A packed ``in_proj_weight`` becomes ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``,
    in the state dict too; either form loads into a module of the other, and whole tensors load into the split module.

    ``input_layouts``: how query, key and value come, if they are not DTensors: ``Replicate()``, or ``Shard(dim)`` after a
    sequence-parallel layer, which is gathered. ``output_layouts``: how the output goes out. ``use_local_output``: as a plain tensor
    rather than a DTensor. Masks and ids are the same on all processes of the mesh.

    Raises ValueError for a module that is no RingAttention and for numbers of heads that the mesh does not divide,
    NotImplementedError for a ``mask_builder``.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _check(module, device_mesh)
        assert isinstance(module, RingAttention)
        separate(module)
        for name, parameter in list(module.named_parameters()):
            placement = Shard(_SPLIT[name]) if name in _SPLIT else Replicate()
            owner, _, attribute = name.rpartition(".")
            split = distribute_tensor(parameter.detach(), device_mesh, [placement])
            module.get_submodule(owner).register_parameter(attribute, nn.Parameter(split, parameter.requires_grad))
        module.register_load_state_dict_pre_hook(_split_whole_tensors)
        module.register_forward_pre_hook(lambda _, args, kwargs: self._inputs(device_mesh, args, kwargs), with_kwargs=True)
        module.register_forward_hook(lambda _, args, result: (self._output(result[0]), result[1]))
        return module

    def _inputs(
        self, mesh: DeviceMesh, args: tuple[Tensor, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        named = {name: x for name, x in kwargs.items() if name in ("query", "key", "value")}
        # One tensor that comes as query, key and value stays one.
        whole = {id(x): self._replicated(mesh, x) for x in (*args[:3], *named.values())}
        return (*(whole[id(x)] for x in args[:3]), *args[3:]), {**kwargs, **{name: whole[id(x)] for name, x in named.items()}}

    def _replicated(self, mesh: DeviceMesh, x: Tensor) -> DTensor:
        tensor = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
        return tensor.redistribute(placements=[Replicate()])

    def _output(self, out: DTensor) -> Tensor:
        laid = out.redistribute(placements=[self.output_layouts])
        return laid.to_local() if self.use_local_output else laid


def _split_whole_tensors(module: nn.Module, state_dict: dict[str, object], prefix: str, *_: object) -> None:
    for name, parameter in module.named_parameters():
        tensor = state_dict.get(prefix + name)
        if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and isinstance(parameter, DTensor):
            # Every process has the whole tensor, so none need send it.
            state_dict[prefix + name] = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _check(module: nn.Module, mesh: DeviceMesh) -> None:
    if not isinstance(module, RingAttention):
        raise ValueError(f"HeadParallel splits the heads of a ring_attn.RingAttention, got {type(module).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"HeadParallel takes a mesh of one dimension, got {mesh.ndim}; give mesh['tp']")
    for name in ("num_heads", "num_kv_heads"):
        if getattr(module, name) % mesh.size():
            raise ValueError(f"{name}, {getattr(module, name)} here, must divide over the {mesh.size()} processes of the mesh")
    if module.mask_builder is not None:
        raise NotImplementedError("mask_builder is called for all heads, which would be split; use mask_mod")
