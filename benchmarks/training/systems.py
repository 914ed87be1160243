"""One transformers model made long by each system: what a step of training is with it. Equal terms: the same weights, tokens,
optimizer, sharding of the weights and activation checkpointing.

torch's context parallelism takes as many K/V heads as query heads, and a causal mask alone.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from ring_attn.integrations.transformers import context_parallel

VOCABULARY = 32000


@dataclass(frozen=True)
class Setting:
    """``sharded``: by FSDP2, weights in float32 and computing in bfloat16; else each rank has all of them, in bfloat16.
    ``compiled``: by torch, a layer at a time."""

    sharded: bool = False
    checkpointing: bool = True
    compiled: bool = False
    layers: int = 12
    small: bool = False

    def model(self, mesh: DeviceMesh) -> Qwen3ForCausalLM:
        hidden, intermediate, heads, kv_heads, dim = (64, 128, 4, 2, 16) if self.small else (2048, 6144, 32, 8, 128)
        config = Qwen3Config(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=2 if self.small else self.layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=dim,
            vocab_size=VOCABULARY,
            max_position_embeddings=2**20,
            attn_implementation="sdpa",
            use_cache=False,
        )
        torch.manual_seed(0)
        with torch.device(mesh.device_type):
            model = Qwen3ForCausalLM(config).to(torch.float32 if self.sharded else torch.bfloat16)
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in model.model.layers if self.compiled else ():
            layer.compile()
        return model.train()


@dataclass(frozen=True)
class Batch:
    """A whole batch, the same on all ranks: ``tokens [1, seq]``, ``positions`` that restart where documents do."""

    tokens: torch.Tensor
    positions: torch.Tensor

    @property
    def labels(self) -> torch.Tensor:
        """Shifted. The last token has none, and none is predicted from another document."""
        shifted = F.pad(self.tokens[:, 1:], (0, 1), value=-100)
        return shifted.masked_fill(F.pad(self.positions[:, 1:], (0, 1)) == 0, -100)


Step = Callable[[Batch], torch.Tensor]  # forward, backward and the optimizer's step; the loss over all tokens


def _shard(model: Any, mesh: DeviceMesh) -> None:
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def _optimizer(model: torch.nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=mesh.device_type == "cuda")


def ours(checkpoint: Any, setting: Setting, mesh: DeviceMesh, overlap: bool = False) -> Step:
    """``checkpoint``: what becomes of attention in activation checkpoints. ``overlap``: gradients are summed in the backward."""
    if overlap and setting.sharded:
        raise NotImplementedError("FSDP2 reduces gradients by itself, while the backward runs")
    if checkpoint != "attention" and not setting.checkpointing:
        raise NotImplementedError("without activation checkpointing nothing is computed again")
    model = setting.model(mesh)
    if setting.sharded:
        _shard(model, mesh)
    cp = context_parallel(model, mesh, checkpoint=checkpoint, overlap=overlap)
    optimizer = _optimizer(model, mesh)

    def step(batch: Batch) -> torch.Tensor:
        loss = model(**cp.shard({"input_ids": batch.tokens, "position_ids": batch.positions, "shift_labels": batch.labels})).loss
        if setting.sharded:
            (loss * mesh.size()).backward()  # FSDP takes the mean over the ranks
        else:
            loss.backward()
            cp.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _causal_alone() -> None:
    """What torch's context parallelism needs of transformers: K/V repeated, no mask (jumping positions look like documents)."""
    from transformers.integrations import sdpa_attention
    from transformers.models.qwen3 import modeling_qwen3

    sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    modeling_qwen3.create_causal_mask = lambda **_: None


def _in_torch(
    model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, enter: Any, backward: Callable[[torch.Tensor], None]
) -> Step:
    """``enter``: torch's context manager, or accelerate's. ``backward``: of this rank's share of the loss."""

    def step(batch: Batch) -> torch.Tensor:
        if bool((batch.positions[:, 1:] == 0).any()):
            raise NotImplementedError("torch's context parallelism has no packed documents")
        buffers = [batch.tokens.clone(), batch.labels, batch.positions.clone()]
        with enter(buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
            logits = model(input_ids=buffers[0], position_ids=buffers[2], use_cache=False).logits
            total = F.cross_entropy(logits.flatten(0, 1).float(), buffers[1].flatten(), reduction="sum")
            del logits
            loss = total / (batch.tokens.shape[1] - 1)
            backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        return loss

    return step


def context_parallel_of_torch(method: str, setting: Setting, mesh: DeviceMesh) -> Step:
    from torch.distributed.tensor.experimental import context_parallel as enter
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    _causal_alone()
    set_rotate_method(method)
    model = setting.model(mesh)
    if setting.sharded:
        _shard(model, mesh)

    def backward(loss: torch.Tensor) -> None:
        (loss * mesh.size() if setting.sharded else loss).backward()
        for parameter in () if setting.sharded else model.parameters():
            dist.all_reduce(parameter.grad)

    def into(**buffers: Any) -> Any:
        return enter(mesh, **buffers)

    return _in_torch(model, _optimizer(model, mesh), mesh, into, backward)


def sdpa(setting: Setting, mesh: DeviceMesh) -> Step:
    """The whole sequence on one GPU, by the backend of SDPA that torch's context parallelism has."""
    if mesh.size() > 1:
        raise NotImplementedError("one GPU alone")
    _causal_alone()
    model = setting.model(mesh)
    if setting.sharded:
        _shard(model, mesh)

    def backward(loss: torch.Tensor) -> None:
        loss.backward()

    return _in_torch(model, _optimizer(model, mesh), mesh, lambda **_: contextlib.nullcontext(), backward)


def accelerate(setting: Setting, mesh: DeviceMesh) -> Step:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ParallelismConfig, TorchContextParallelConfig

    if not setting.sharded:
        raise NotImplementedError("accelerate has context parallelism with FSDP2 alone")
    _causal_alone()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    config = ParallelismConfig(cp_size=mesh.size(), cp_handler=TorchContextParallelConfig(cp_comm_strategy="allgather"))
    accelerator = Accelerator(parallelism_config=config, fsdp_plugin=plugin)
    model = setting.model(mesh)
    model, optimizer = accelerator.prepare(model, _optimizer(model, mesh))

    def backward(loss: torch.Tensor) -> None:
        accelerator.backward(loss * mesh.size())

    return _in_torch(model, optimizer, mesh, accelerator.maybe_context_parallel, backward)


@contextlib.contextmanager
def cudnn(on_gpu: bool) -> Iterator[None]:
    """The faster of the backends that torch's context parallelism has; ours does not go through SDPA."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if on_gpu else contextlib.nullcontext():
        yield


SYSTEMS: dict[str, Callable[[Setting, DeviceMesh], Step]] = {
    "ring-attn": partial(ours, "attention"),
    "ring-attn, overlapped sums": partial(ours, "attention", overlap=True),
    "ring-attn, offload": partial(ours, "offload"),
    "ring-attn, attention again": partial(ours, None),
    "context_parallel, allgather": lambda *where: context_parallel_of_torch("allgather", *where),
    "context_parallel, alltoall": lambda *where: context_parallel_of_torch("alltoall", *where),
    "accelerate, cp_size": accelerate,
    "SDPA on one GPU": sdpa,
}
