"""One transformers model made long by each system: what a step of training is with it. Equal terms: the same weights, tokens,
optimizer, sharding of the weights and activation checkpointing.

torch's context parallelism takes as many K/V heads as query heads, and a causal mask alone.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from benchmarks.training import models
from ring_attn import chunked_cross_entropy, memory
from ring_attn.integrations.transformers import context_parallel
from ring_attn.memory import Levers, Shapes, peak
from ring_attn.memory.formula import GIB


@dataclass(frozen=True)
class Setting:
    """``sharded``: by FSDP2, weights in float32 and computing in bfloat16; else each rank has all of them, in bfloat16.
    ``compiled``: by torch, a layer at a time. ``of``: one of ``models.SHAPES``."""

    sharded: bool = False
    checkpointing: bool = True
    compiled: bool = False
    layers: int = 12
    small: bool = False
    of: str = models.USUAL

    @property
    def shapes(self) -> Shapes:
        whole = models.SHAPES[self.of]
        return models.small(whole) if self.small else replace(whole, layers=self.layers)

    def model(self, mesh: DeviceMesh) -> PreTrainedModel:
        torch.manual_seed(0)
        with torch.device(mesh.device_type):
            model = models.random_model(self.of, self.shapes).to(torch.float32 if self.sharded else torch.bfloat16)
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


def ours(levers: Levers, setting: Setting, mesh: DeviceMesh, overlap: bool = False) -> Step:
    """``overlap``: gradients are summed in the backward."""
    if overlap and setting.sharded:
        raise NotImplementedError("FSDP2 reduces gradients by itself, while the backward runs")
    if levers.checkpoint != "attention" and not setting.checkpointing:
        raise NotImplementedError("without activation checkpointing nothing is computed again")
    model = setting.model(mesh)
    if setting.sharded:
        _shard(model, mesh)
    levers = replace(levers, head_groups=gcd(levers.groups, setting.shapes.kv_heads))  # small models have two heads
    cp = context_parallel(model, mesh, **asdict(levers), overlap=overlap)
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


def _causal_alone(setting: Setting) -> None:
    """What torch's context parallelism needs of transformers: K/V repeated, no mask (jumping positions look like documents)."""
    if setting.of not in (models.USUAL, "Qwen3-8B"):
        raise NotImplementedError("torch's context parallelism has neither windows nor sinks")
    from transformers.integrations import sdpa_attention
    from transformers.models.qwen3 import modeling_qwen3

    sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    modeling_qwen3.create_causal_mask = lambda **_: None


def _summing(model: Any, loss_chunk: int | None) -> None:
    """From here on the model is a function of tokens, labels and positions to the sum of their losses: within its forward, where
    FSDP2 has the head's weights. ``loss_chunk``: this library's loss, so many tokens at a time."""

    def forward(tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = model.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        if loss_chunk is not None:
            return chunked_cross_entropy(model.lm_head, hidden, labels, chunk_size=loss_chunk, mesh="local", num_items=1)
        return F.cross_entropy(model.lm_head(hidden).flatten(0, 1).float(), labels.flatten(), reduction="sum")

    model.forward = forward


def _in_transformers(setting: Setting, mesh: DeviceMesh) -> Any:
    """As it is, with this library's loss, as "ring-attn, loss chunk" has it, which is to be compared with this."""
    model = setting.model(mesh)
    _summing(model, 1024)
    return model


def _for_torch(setting: Setting, mesh: DeviceMesh, loss_chunk: int | None = None) -> Any:
    _causal_alone(setting)
    model = setting.model(mesh)
    _summing(model, loss_chunk)
    if setting.sharded:
        _shard(model, mesh)
    return model


def _in_torch(
    model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, enter: Any, backward: Callable[[torch.Tensor], None]
) -> Step:
    """``enter``: torch's context manager, or accelerate's. ``backward``: of this rank's share of the loss."""

    def step(batch: Batch) -> torch.Tensor:
        if bool((batch.positions[:, 1:] == 0).any()):
            raise NotImplementedError("torch's context parallelism has no packed documents")
        buffers = [batch.tokens.clone(), batch.labels, batch.positions.clone()]
        with enter(buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)):
            loss = model(buffers[0], buffers[1], buffers[2]) / (batch.tokens.shape[1] - 1)
            backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        return loss

    return step


def context_parallel_of_torch(method: str, setting: Setting, mesh: DeviceMesh, loss_chunk: int | None = None) -> Step:
    from torch.distributed.tensor.experimental import context_parallel as enter
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(method)
    model = _for_torch(setting, mesh, loss_chunk)

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
    model = _in_transformers(setting, mesh) if setting.of == models.HYBRID else _for_torch(setting, mesh)

    def backward(loss: torch.Tensor) -> None:
        loss.backward()

    return _in_torch(model, _optimizer(model, mesh), mesh, lambda **_: contextlib.nullcontext(), backward)


def accelerate(setting: Setting, mesh: DeviceMesh) -> Step:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ParallelismConfig, TorchContextParallelConfig

    if not setting.sharded:
        raise NotImplementedError("accelerate has context parallelism with FSDP2 alone")
    _causal_alone(setting)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    config = ParallelismConfig(cp_size=mesh.size(), cp_handler=TorchContextParallelConfig(cp_comm_strategy="allgather"))
    accelerator = Accelerator(parallelism_config=config, fsdp_plugin=plugin)
    model = setting.model(mesh)
    _summing(model, None)
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


_FIRST = Levers(loss_chunk=1024)
# One more in each, and the last computes all of a layer again.
LEVERS = {
    "loss chunk": _FIRST,
    "MLP tile": (tile := replace(_FIRST, mlp_tile=4096)),
    "head groups": (groups := replace(tile, head_groups=4)),
    "and offload": (offload := replace(groups, checkpoint="offload")),
    "and inputs": replace(offload, offload_inputs=True),
    "loss chunk, attention again": replace(_FIRST, checkpoint=None),
}
OURS = {
    "ring-attn": Levers(),
    "ring-attn, offload": Levers("offload"),
    "ring-attn, attention again": Levers(None),
    **{f"ring-attn, {name}": levers for name, levers in LEVERS.items()},
}


def predicted(system: str, setting: Setting, gpus: int, tokens: int) -> dict[str, float]:
    """GiB, by ``ring_attn.memory``, with ``tokens`` on each GPU."""
    if system not in OURS or setting.of == models.HYBRID:  # whose layers the plan does not know
        return {}
    found = peak(setting.shapes, memory.Setting(gpus, setting.sharded, setting.checkpointing, OURS[system]), tokens)
    return {"tensors by the plan, GiB": found.tensors / GIB, "device by the plan, GiB": found.device / GIB}


CONTEXT_PARALLEL = "context_parallel, allgather"
SYSTEMS: dict[str, Callable[[Setting, DeviceMesh], Step]] = {
    **{name: partial(ours, levers) for name, levers in OURS.items()},
    "ring-attn, overlapped sums": partial(ours, Levers(), overlap=True),
    CONTEXT_PARALLEL + ", loss chunk": partial(context_parallel_of_torch, "allgather", loss_chunk=1024),
    CONTEXT_PARALLEL: partial(context_parallel_of_torch, "allgather"),
    "context_parallel, alltoall": partial(context_parallel_of_torch, "alltoall"),
    "accelerate, cp_size": accelerate,
    "SDPA on one GPU": sdpa,
}
