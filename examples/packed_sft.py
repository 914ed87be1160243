"""Supervised fine-tuning with TRL on packed documents: each row holds several, split over all processes, and none sees another.

    pip install ".[trl]"
    torchrun --standalone --nproc-per-node 2 examples/packed_sft.py

The model is a small Llama of bytes from random weights, the documents are prompts and completions made here. Only the line with
RingParallelism differs from the program for one GPU.
"""

import argparse
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from ring_attn.integrations.accelerate import RingParallelism

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--context", type=int, default=512, help="tokens in a packed row, over all processes (default: %(default)s)")
parser.add_argument("--steps", type=int, default=10)
options = parser.parse_args()

letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", "<pad>"]
bytewise = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
bytewise.pre_tokenizer, bytewise.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>", pad_token="<pad>")

torch.manual_seed(0)  # every process holds the same parameters
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(letters), max_position_embeddings=options.context, **sizes))
data = Dataset.from_list([{"prompt": f"{a} + {b} = ", "completion": f"{a + b}."} for a in range(100) for b in range(20, 30)])

with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder,
        packing=True,
        max_length=options.context,
        parallelism_config=RingParallelism(model, layout="zigzag"),
        use_cpu=not torch.cuda.is_available(),
        bf16=torch.cuda.is_available(),
        per_device_train_batch_size=1,
        max_steps=options.steps,
        learning_rate=3e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer).train()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
