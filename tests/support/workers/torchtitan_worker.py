"""torchtitan's own trainer on CPU: its debug Llama 3, in one process with its own masks, or over several with a ring.

torchtitan knows accelerators only: cpu_for_torchtitan.py stands in for one. The rest, from config to optimizer, is its own.

    torchtitan_worker.py FILE NAME...

trains the named runs and saves their losses and gradient norms.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cpu_for_torchtitan  # noqa: F401  before torchtitan
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from ring_attn.integrations import torchtitan as ours
from torch_bridge.failures import peers

STEPS, ROWS, LENGTH, VOCABULARY = 10, 4, 32, 2048


class DenseAttention(FlexAttention):
    """torchtitan's mask, made dense: FlexAttention has no backward on CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, scale: float | None = None, **_: Any
    ):  # type: ignore[override]
        mask = create_mask(attention_masks.mask_mod, q_BLNH.shape[0], 1, *attention_masks.seq_lengths, device="cpu")
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(1, 2)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Packed(BaseDataLoader):
    """Sequences of three documents, cut elsewhere in every row, with labels that do not count; the same for any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.part, self.parts, self.size = dp_rank, dp_world_size, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for step in range(STEPS):
            tokens, positions, labels = (whole[self.part :: self.parts] for whole in batch(step))
            for rows in zip(*(whole.split(self.size) for whole in (tokens, positions, labels)), strict=True):
                yield {"input": rows[0], "positions": rows[1]}, rows[2]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(64, (ROWS, LENGTH + 1), generator=generator)
    cuts = torch.randint(1, LENGTH, (ROWS, 2), generator=generator).sort(1).values
    index = torch.arange(LENGTH).expand(ROWS, -1)
    starts = torch.cat([torch.zeros(ROWS, 1, dtype=torch.int64), cuts], 1)
    begun = torch.where(starts[:, None, :] <= index[..., None], starts[:, None, :], 0).max(-1).values
    labels = tokens[:, 1:].masked_fill(torch.rand(ROWS, LENGTH, generator=generator) < 0.2, -100)
    return tokens[:, :-1], index - begun, labels


def config(ring: bool, folder: str, **parallelism: Any) -> Trainer.Config:
    """torchtitan's debug config with less to compute: shorter sequences, in float32."""
    made = llama3_debugmodel()
    made.model_spec = model_registry("debugmodel", converters=[ours.RingAttentionConverter.Config()] if ring else None)
    if not ring:
        for layer in made.model_spec.model.layers:
            layer.attention.inner_attention = DenseAttention.Config()
    made.activation_checkpoint = ours.SelectiveAC.Config() if ring else None
    made.tokenizer, made.dataloader, made.dump_folder = NoTokenizer.Config(), Packed.Config(), folder
    made.loss = CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    made.training.seq_len, made.training.steps, made.training.global_batch_size = LENGTH, STEPS, ROWS
    made.training.mixed_precision_param, made.training.disable_cuda_graphs = "float32", True
    made.debug.seed = 0
    made.checkpoint = CheckpointManager.Config(enable=False)
    made.parallelism = ParallelismConfig(**parallelism)
    made.training.local_batch_size = ROWS * made.parallelism.context_parallel_degree // torch.distributed.get_world_size()
    return made


@torch.no_grad()
def same_weights(part: nn.Module) -> None:
    """Weights that do not depend on how they are sharded; torch's are drawn otherwise on each CPU mesh."""
    for name, parameter in part.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        values = torch.randn(parameter.shape, generator=generator) * 0.05 + (1.0 if "norm" in name else 0.0)
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(values)


def train(made: Trainer.Config, steps: int) -> list[tuple[float, float]]:
    """The global loss and gradient norm of every step."""
    trainer = made.build()
    trainer.should_continue_training = lambda: trainer.step < steps
    for part in trainer.model_parts:
        same_weights(part)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    seen: list[tuple[float, float]] = []
    log = trainer.metrics_processor.log

    def noted(step: int, loss: float, most: float, norm: float, **more: Any) -> None:
        seen.append((loss, norm))
        log(step, loss, most, norm, **more)

    trainer.metrics_processor.log = noted
    trainer.train()
    trainer.close()
    return seen


def ring_forwards() -> int:
    return sum(calls.steps["forward"] for calls in peers.state.calls.values())


CP = "context_parallel_degree"
RUNS: dict[str, dict[str, Any]] = {
    "one process": dict(ring=False),
    "dp 2 x cp 2": dict(ring=True, **{CP: 2}),
    "cp 4": dict(ring=True, **{CP: 4}, context_parallel_load_balancer=None, spmd_backend="full_dtensor", steps=2),
}


def main() -> None:
    torch.distributed.init_process_group("gloo")
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan's own start
    file, *names = sys.argv[1:]
    found = {}
    for name in names:
        run = {"steps": STEPS, **RUNS[name]}
        steps, before = run.pop("steps"), ring_forwards()
        made = config(folder=file + ".outputs", **run)
        found[name] = train(made, steps)
        kept = len(made.model_spec.model.layers) * steps if run["ring"] else 0  # none is run again in the backward
        assert ring_forwards() - before == kept, (name, ring_forwards() - before)
    if torch.distributed.get_rank() == 0:
        torch.save(found, file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
