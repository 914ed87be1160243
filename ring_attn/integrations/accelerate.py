"""accelerate, transformers' ``Trainer`` and what is built on it (TRL): a ``ParallelismConfig`` that puts a model on a ring.

    args = TrainingArguments(..., parallelism_config=RingParallelism(model))       # or SFTConfig, with packing=True
    Trainer(model, args, train_dataset=...).train()

    accelerator = Accelerator(parallelism_config=RingParallelism(model))           # a loop of one's own

Every rank of a ring gets the same batch from the data loader, and the model takes the whole of it: a hook shards it on the way in.
"""

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps

import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from jax_core.masks.layout import Layout
from ring_attn.integrations.transformers import context_parallel
from ring_attn.integrations.transformers.layers.kernels import Operators, check_operators
from ring_attn.integrations.transformers.model.checkpointing import check_checkpoint
from ring_attn.integrations.transformers.model.head_groups import check_groups_or_auto
from ring_attn.integrations.whole_batches import WholeBatches, reject_sharded
from ring_attn.memory import Levers
from ring_attn.memory.formula import Checkpoint, Groups
from ring_attn.packed.ring import placing
from ring_attn.ring import BUCKETS, Ring
from ring_attn.training.chunked_loss import check_chunk_size
from ring_attn.training.tiles import check_tile_size


class RingParallelism(ParallelismConfig):
    """A ``ParallelismConfig`` whose context parallelism is a ring, for ``model``, a transformers model.

    ``cp_size`` processes share a sequence; None takes all that the sizes of data parallelism leave. ``layout``: "zigzag",
    "striped" or "contiguous". ``buckets``: how many lengths an octave batches are padded to (:class:`ring_attn.Ring`).
    ``checkpoint``, ``loss_chunk``, ``mlp_tile``, ``head_groups``, ``offload_inputs``: what takes less memory, as for
    ``context_parallel``. ``place_documents``: packed rows lie on the ring as there, so that all ranks have nearly equal work; None:
    where the model and the row allow it. ``operators``: what computes a rank's tokens in layers with a state, as there. Other
    arguments are those of ``ParallelismConfig``. With ``cp_size=1`` it is an ordinary one.

    Else, as soon as an ``Accelerator`` is made with it, all ranks of a ring call ``model`` with the same whole batch, labels
    included; :class:`WholeBatches` says what it takes and returns. DDP, FSDP2, accumulation and clipping need nothing more: the
    mean of the ranks' gradients is the whole batch's gradient.

    ``cp_enabled`` stays False: it makes accelerate and the Trainer set up torch's own context parallelism, for causal SDPA only.

    Raises ValueError for sizes that do not make up the number of processes, and for ``dispatch_batches=True`` when a data loader is
    prepared, which deals out parts of a batch; NotImplementedError for what was not tried: tensor
    parallelism, FSDP1, DeepSpeed, Megatron and XLA under accelerate.
    """

    def __init__(
        self,
        model: nn.Module,
        cp_size: int | None = None,
        *,
        layout: Layout = "zigzag",
        buckets: int = BUCKETS,
        checkpoint: Checkpoint = "attention",
        loss_chunk: int | None = None,
        mlp_tile: int | None = None,
        head_groups: Groups = 1,
        offload_inputs: bool = False,
        place_documents: bool | None = None,
        operators: Operators | None = None,
        **options: object,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be the model that will be trained, got {type(model).__name__}; load it first")
        if "cp_handler" in options or "cp_backend" in options:
            raise ValueError("cp_handler and cp_backend configure torch's context parallelism; RingParallelism is another one")
        super().__init__(cp_size=cp_size, **options)
        if cp_size is None and "PARALLELISM_CONFIG_CP_SIZE" not in os.environ:
            self._set_size("cp", max(1, int(os.environ.get("WORLD_SIZE", "1")) // self.total_size))
        if self.tp_size > 1:
            raise NotImplementedError("tensor parallelism beside a ring was not tried with accelerate; leave tp_size at 1")
        if self.cp_size < 1:
            raise ValueError(f"cp_size must be at least 1, got {self.cp_size}")
        self.cp_backend = "ring_attn"
        ring = Ring(layout=layout, buckets=buckets)
        if place_documents:
            placing(ring, True, None)
        check_checkpoint(checkpoint)
        check_operators(operators)
        check_groups_or_auto(head_groups)
        if loss_chunk is not None:
            check_chunk_size(loss_chunk, "loss_chunk")
        if mlp_tile is not None:
            check_tile_size(mlp_tile, "mlp_tile")
        self.layout, self.buckets, self.place_documents = ring.layout, ring.buckets, place_documents
        self.operators = operators
        self.levers = Levers(checkpoint, loss_chunk, mlp_tile, head_groups, offload_inputs)
        levers = dict(loss_chunk=loss_chunk, mlp_tile=mlp_tile, place_documents=place_documents or None, operators=operators)
        for name, value in levers.items():
            if value is not None and self.cp_size == 1:
                raise ValueError(
                    f"{name} needs a ring, and with cp_size=1 the model stays as it is; leave it out, or call "
                    f'context_parallel(model, "local", {name}=...) in a loop of your own'
                )
        self._model: nn.Module | None = model
        self._whole_batches: WholeBatches | None = None

    def remove(self) -> None:
        """Makes the model what it was before: it takes batches without labels again, and another ``RingParallelism``."""
        if self._whole_batches is not None:
            self._whole_batches.remove()
            self._whole_batches = None

    @property
    def cp_enabled(self) -> bool:
        """False: accelerate is not to set up torch's context parallelism."""
        return False

    @property
    def non_dp_dim_names(self) -> list[str]:
        return [*super().non_dp_dim_names, *self._cp_dim_names]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        return [*super().dp_shard_cp_dim_names, *self._cp_dim_names]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        return [*super().dp_cp_dim_names, *self._cp_dim_names]

    @property
    def _cp_dim_names(self) -> list[str]:
        return ["cp"] if self.cp_size > 1 else []

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        self._check_processes(dist.get_world_size() if dist.is_initialized() else 1)
        mesh = super().build_device_mesh(device_type) if self.active_mesh_dims else None
        if mesh is not None and self.cp_size > 1:
            assert self._model is not None  # only a copy from a pickle lacks it
            parallel = context_parallel(
                self._model,
                mesh["cp"],
                layout=self.layout,
                buckets=self.buckets,
                place_documents=self.place_documents,
                operators=self.operators,
                **asdict(self.levers),
            )
            self._whole_batches = WholeBatches(parallel)
        return mesh

    def to_json(self) -> dict[str, object]:
        return {
            **{f"{name}_size": size for name, size in self._sizes.items()},
            "cp_backend": "ring_attn",
            "layout": str(self.layout),
            "buckets": self.buckets,
            "place_documents": self.place_documents,
            "operators": None if self.operators is None else list(self.operators),
            **asdict(self.levers),
        }

    def __getstate__(self) -> dict[str, object]:
        # The Trainer pickles its arguments beside each checkpoint: neither weights, nor processes, nor functions belong there.
        return {**self.__dict__, "_model": None, "_whole_batches": None, "device_mesh": None, "operators": None}

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        # In the place of accelerate's own checks, which know of torch's context parallelism only: with FSDP2, on GPUs.
        if accelerator.num_processes != self.total_size:
            raise ValueError(
                f"accelerate sees {accelerator.num_processes} of the {self.total_size} processes, so it would reduce no gradients; "
                "on CPUs give TrainingArguments use_cpu=True, or the Accelerator cpu=True"
            )
        if self.cp_size > 1:
            accelerator.pad_across_processes = reject_sharded(accelerator.pad_across_processes)
            accelerator.prepare_data_loader = _whole_on_each_rank(accelerator)
            accelerator.gather_for_metrics = _from_rings(accelerator, self.cp_size)
        kind = accelerator.distributed_type
        untried = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
        if kind in untried or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
            raise NotImplementedError(f"RingParallelism is for DDP and FSDP2; {kind} in this configuration was not tried")

    def _check_processes(self, processes: int) -> None:
        if self.total_size != processes:
            sizes = ", ".join(f"{name}_size={size}" for name, size in self._sizes.items())
            raise ValueError(
                f"the sizes must make up the number of processes that were started, {processes}, got {sizes}: start that many with "
                "torchrun or accelerate launch, or leave cp_size out"
            )


def _whole_on_each_rank(accelerator: Accelerator) -> Callable[..., object]:
    """``prepare_data_loader`` that gives all ranks of a ring the same batches, of streamed data, too: accelerate's default for
    these is to read them in one process and to deal parts of each batch to all others, whatever the mesh."""
    prepare = accelerator.prepare_data_loader

    @wraps(prepare)
    def prepared(*arguments: object, **options: object) -> object:
        config = accelerator.dataloader_config
        if config.dispatch_batches:
            raise ValueError(
                "dispatch_batches=True deals parts of each batch to the processes, and all ranks of a ring need the whole: leave "
                "it out, or set it to False (DataLoaderConfiguration, or accelerator_config of the TrainingArguments)"
            )
        config.dispatch_batches = False
        return prepare(*arguments, **options)

    return prepared


def _from_rings(accelerator: Accelerator, size: int) -> Callable[..., object]:
    """``gather_for_metrics`` where each sample comes from all ``size`` ranks of a ring. By itself it keeps as many entries of the
    last batch as that has samples, so that an evaluation's mean would weigh the batch too little."""
    gather = accelerator.gather_for_metrics

    @wraps(gather)
    def gathered(*arguments: object, **options: object) -> object:
        loader = accelerator.gradient_state.active_dataloader
        samples = getattr(loader, "remainder", -1)
        if samples <= 0:
            return gather(*arguments, **options)
        loader.remainder = samples * size
        try:
            return gather(*arguments, **options)
        finally:
            loader.remainder = samples

    return gathered
