"""A few training steps with RingAttention on TPUs through TorchTPU: one process per TPU, the sequence split over all of them.

This has not run on a TPU (docs/contributing/torch_tpu.md says what was tested). On a TPU VM, with Python 3.12, in this repository:

    pip install ".[torch-tpu]"
    eval "$(python -m torch.tpu.distributed | sed 's/^/export /')"
    torchrun --nproc-per-node "$WORLD_SIZE" examples/train_on_tpu.py

The same script on CPUs, without a TPU:

    torchrun --standalone --nproc-per-node 2 examples/train_on_tpu.py --device cpu --context 1024
"""

import argparse
import os
import sys
from functools import partial
from importlib.util import find_spec

import torch
import torch.distributed as dist

from language_model import LanguageModel, loss_sum, standard_library_text, window
from ring_attn import RingAttention, shard_batch

WIDTH, HEADS, LAYERS = 64, 4, 2

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--device", default="tpu", choices=["tpu", "cpu"])
parser.add_argument("--context", type=int, default=16384, help="bytes in the sequence, over all processes (default: %(default)s)")
parser.add_argument("--steps", type=int, default=5)
options = parser.parse_args()
if options.device == "tpu" and find_spec("torch_tpu") is None:
    sys.exit('torch-tpu is not installed: pip install ".[torch-tpu]" (Python 3.12), or rehearse without a TPU with --device cpu')
if "RANK" not in os.environ:
    how = "--standalone --nproc-per-node 2" if options.device == "cpu" else '--nproc-per-node "$WORLD_SIZE"'
    sys.exit(f"torchrun starts the processes: torchrun {how} examples/train_on_tpu.py --device {options.device}")

dist.init_process_group("tpu_dist" if options.device == "tpu" else "gloo")
torch.manual_seed(0)  # every process holds the same parameters
# No mesh: the ring is the default process group, which is all the TPUs.
attention = partial(RingAttention, WIDTH, HEADS, bias=False, batch_first=True, causal=True, layout="zigzag")
positions = options.context + 2 * dist.get_world_size()  # a length that does not divide is padded
model = LanguageModel(WIDTH, LAYERS, positions, attention).to(options.device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
text = standard_library_text(least=options.context)

for step in range(options.steps):
    batch = shard_batch(window(text, step, options.context), layout="zigzag")  # on the CPU, where it needs no compilation
    input_ids, labels, position_ids = (x.to(options.device) for x in (batch.input_ids, batch.labels, batch.position_ids))
    loss = loss_sum(model(input_ids, position_ids), labels) / (options.context - 1)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # each process has its own part of the gradient
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    total = total.item()  # on every process: a program that one TPU waits for must run on all of them
    if dist.get_rank() == 0:
        print(f"step {step}: loss {total:.4f}")
dist.destroy_process_group()
