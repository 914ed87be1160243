"""Fine-tune a transformers model with its own Trainer on sequences that are split over all processes.

    pip install ".[accelerate]"
    torchrun --standalone --nproc-per-node 4 examples/finetune_transformers.py --model meta-llama/Llama-3.2-1B --context 65536

Without --model it trains a small Llama from random weights, here on two CPU processes:

    torchrun --standalone --nproc-per-node 2 examples/finetune_transformers.py

The text is the source of Python's standard library. Only the line with RingParallelism differs from the program for one GPU; with
several GPUs and FSDP2 (`accelerate launch --use_fsdp --fsdp_version 2`) the weights are split over the same processes.
"""

import argparse
import tempfile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from language_model import standard_library_text
from ring_attn.integrations.accelerate import RingParallelism

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a causal language model of the hub, or a folder (default: a small Llama of bytes)")
parser.add_argument("--context", type=int, default=1000, help="tokens in a sequence, over all processes (default: %(default)s)")
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

torch.manual_seed(0)  # every process holds the same parameters
text = standard_library_text(least=options.context * options.steps)
if options.model:
    model = AutoModelForCausalLM.from_pretrained(options.model)
    tokens = AutoTokenizer.from_pretrained(options.model)(bytes(text.tolist()).decode("utf-8", "ignore"))["input_ids"]
else:
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=options.context, **sizes))
    tokens = text.tolist()
rows = [tokens[start : start + options.context] for start in range(0, len(tokens) - options.context + 1, options.context)]
data = [{"input_ids": row, "labels": row} for row in rows]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        parallelism_config=RingParallelism(model, layout="zigzag"),
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=1,
        max_steps=options.steps,
        learning_rate=1e-5 if options.model else 3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    Trainer(model, arguments, train_dataset=data).train()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
