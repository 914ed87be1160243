"""Continues a long text with the demo's model, whose keys and values are spread over several processes, and tells how fast.

    python -m torch.distributed.run --standalone --nproc-per-node 4 examples/generate.py

The model is that of train_lm.py, with random weights unless ``--weights`` names some (a state dict of LanguageModel): then the text
makes no sense. What generation needs beside a model is in :func:`main`: a cache, and the model called with it.
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from language_model import LanguageModel, standard_library_text
from ring_attn import Ring, RingAttention
from ring_attn.generation import KVCache, Sampler, decode, generate

WIDTH, HEADS, LAYERS = 64, 4, 2


def main() -> None:
    options = parse_options()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    ring, length = Ring(layout="zigzag"), options.prompt + options.new
    torch.manual_seed(0)  # the same weights in every process
    attention = partial(RingAttention, WIDTH, HEADS, bias=False, batch_first=True, causal=True, ring=ring)
    model = LanguageModel(WIDTH, LAYERS, length + 64, attention).eval()
    if options.weights:
        model.load_state_dict(torch.load(options.weights))
    prompt = standard_library_text(least=options.prompt)[None, : options.prompt]

    cache, sampler = KVCache(ring, max_length=length), Sampler(temperature=options.temperature, top_p=0.95, seed=0)
    started = time.perf_counter()
    first = generate(model, prompt, cache, max_new_tokens=2, sampler=sampler)  # compiles what the other steps use
    prefilled = time.perf_counter()
    rest = decode(model, first[:, -1], cache, options.new - 2, sampler=sampler)
    seconds = time.perf_counter() - prefilled

    if ring.rank == 0:
        text = bytes(torch.cat([first, rest], 1)[0].tolist()).decode(errors="replace")
        print(f"{options.prompt} bytes of prompt over {ring.size} processes: {prefilled - started:.1f} s, with compiling")
        print(
            f"{options.new} new bytes: {rest.numel() / seconds:.1f} tokens per second, {cache.nbytes / 2**20:.1f} MiB of cache here"
        )
        print(f"...{bytes(prompt[0, -40:].tolist()).decode()!r} goes on {text!r}")
    if dist.is_initialized():
        dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=32768, help="bytes (default: %(default)s)")
    parser.add_argument("--new", type=int, default=64, help="bytes to generate, at least 3 (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the most likely byte (default: %(default)s)")
    parser.add_argument("--weights", type=Path, help="a state dict of the model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
