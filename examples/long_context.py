"""Train a transformers model on one long sequence that is split over all processes, with the levers that take less memory.

    pip install ".[accelerate]"
    accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8 examples/long_context.py --model FOLDER --context 1048576 \\
        --loss-chunk 1024 --mlp-tile 4096 --checkpoint offload --offload-inputs

Without --model it trains a small Qwen3 from random weights, here on two CPU processes:

    torchrun --standalone --nproc-per-node 2 examples/long_context.py

Each lever works by itself, and none changes the result but in the order of sums. `python -m ring_attn plan` says which ones a
length needs; docs/long-context.md says what each of them does.
"""

import argparse
import os
import tempfile
import time

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from language_model import standard_library_text
from ring_attn.integrations.accelerate import RingParallelism
from ring_attn.memory import Levers, Setting, peak
from ring_attn.memory.shapes import shapes_of

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a causal language model of the hub, or a folder (default: a small Qwen3 of bytes)")
parser.add_argument("--context", type=int, default=4096, help="tokens of the sequence, over all processes (default: %(default)s)")
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--checkpoint", choices=("attention", "offload", "none"), default="attention", help="what becomes of attention")
parser.add_argument("--loss-chunk", type=int, default=1024, help="tokens whose logits exist at a time (default: %(default)s)")
parser.add_argument("--mlp-tile", type=int, default=1024, help="tokens that an MLP computes at a time (default: %(default)s)")
parser.add_argument("--head-groups", type=int, default=1, help="in how many groups of K/V heads attention is computed")
parser.add_argument("--offload-inputs", action="store_true", help="the inputs of layers wait in host memory")
options = parser.parse_args()
levers = Levers(
    checkpoint=None if options.checkpoint == "none" else options.checkpoint,
    loss_chunk=options.loss_chunk,
    mlp_tile=options.mlp_tile,
    head_groups=options.head_groups,
    offload_inputs=options.offload_inputs,
)

torch.manual_seed(0)  # every process holds the same parameters
text = standard_library_text(least=options.context)
if options.model:
    model = AutoModelForCausalLM.from_pretrained(options.model)
    tokens = AutoTokenizer.from_pretrained(options.model)(bytes(text.tolist()).decode("utf-8", "ignore"))["input_ids"]
else:
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=options.context)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=256, **sizes, **heads))
    tokens = text.tolist()
# The name of older versions comes second.
enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
enable({"use_reentrant": False})
data = [{"input_ids": tokens[: options.context], "labels": tokens[: options.context]}] * options.steps
processes, gpu = int(os.environ.get("WORLD_SIZE", "1")), torch.cuda.is_available()


def predicted(local):
    """GiB, with the weights in shards."""
    _, shapes = shapes_of(model.config)
    return peak(shapes, Setting(processes, levers=levers), local).tensors / 2**30


class Numbers(TrainerCallback):
    """Three of them, once a step."""

    def on_step_begin(self, arguments, state, control, **_):
        self.began = time.perf_counter()

    def on_step_end(self, arguments, state, control, **_):
        if not state.is_world_process_zero:
            return
        seconds, local = time.perf_counter() - self.began, -(-options.context // processes)
        memory = (
            f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of tensors, predicted {predicted(local):.1f}" if gpu else "CPU"
        )
        print(f"{local} tokens on each process; {seconds:.2f} s; {memory}", flush=True)


with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        parallelism_config=RingParallelism(
            model,
            checkpoint=levers.checkpoint,
            loss_chunk=levers.loss_chunk,
            mlp_tile=levers.mlp_tile,
            head_groups=levers.head_groups,
            offload_inputs=levers.offload_inputs,
        ),
        use_cpu=not gpu,
        bf16=gpu,
        per_device_train_batch_size=1,
        max_steps=options.steps,
        learning_rate=1e-5 if options.model else 3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    Trainer(model, arguments, train_dataset=data, callbacks=[Numbers()]).train()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
