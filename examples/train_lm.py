"""Trains a language model on a sequence that is split over four processes, and the same model in one process for comparison.

    python examples/train_lm.py            # or: make demo

The ring uses ``ring_attn.RingAttention``, the single process torch's scaled_dot_product_attention over the whole sequence. Both
use the same initial weights, text and optimizer, so the two loss curves must coincide. What a ring requires of a model is in
:func:`train_on_ring`; the rest is an ordinary training loop.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import ring_attn
from language_model import LanguageModel, SdpaAttention, loss_sum, standard_library_text, window

try:
    from tqdm import tqdm

    from compare_runs import compare, launch, load
except ImportError as error:
    sys.exit(f"{error.name} is not installed: pip install matplotlib tqdm, or let `make demo` make an environment")

WIDTH, HEADS, LAYERS = 64, 4, 2


class Batch(NamedTuple):
    """The part of a window of text that one process sees: all of it, or its shard."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor


def make_model(options: argparse.Namespace, attention: Callable[[], nn.Module] | None = None) -> LanguageModel:
    """A model with the same initial weights in every process, whatever its attention."""
    torch.manual_seed(0)
    positions = options.context + 2 * options.processes  # a length that does not divide is padded for the ring
    plain = LanguageModel(WIDTH, LAYERS, positions, partial(SdpaAttention, WIDTH, HEADS, bias=False, batch_first=True))
    if attention is None:
        return plain
    model = LanguageModel(WIDTH, LAYERS, positions, attention)
    model.load_state_dict(plain.state_dict())
    return model


def train(
    options: argparse.Namespace,
    model: nn.Module,
    make_batch: Callable[[Tensor], Batch],
    add_up: Callable[[Tensor], None],
    title: str,
    quiet: bool = False,
) -> dict:
    """The training loop. ``add_up`` sums a tensor over the processes in place. Returns the losses and some steps' gradients."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)
    text = standard_library_text(least=options.context)
    losses, gradients, started = [], {}, time.perf_counter()
    progress = tqdm(range(options.steps), desc=title, disable=quiet, unit="step")
    for step in progress:
        batch = make_batch(window(text, step, options.context))
        labels = options.context - 1  # in the whole window, on all processes: the last byte has no successor
        loss = loss_sum(model(batch.input_ids, batch.position_ids), batch.labels) / labels
        optimizer.zero_grad()
        loss.backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        for gradient in found.values():
            add_up(gradient)
        total = loss.detach().clone()
        add_up(total)
        losses.append(total.item())
        if step in compared_steps(options.steps):
            gradients[step] = {name: gradient.clone() for name, gradient in found.items()}
        optimizer.step()
        progress.set_postfix(loss=f"{losses[-1]:.3f}")
    return {"losses": losses, "gradients": gradients, "seconds": time.perf_counter() - started}


def compared_steps(steps: int) -> set[int]:
    return {0, steps // 2, steps - 1}


def train_on_ring(options: argparse.Namespace) -> None:
    """What each process of the ring runs. Everything that a ring requires of a model is here."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    ring = {"mesh": mesh, "layout": options.layout}
    model = make_model(options, lambda: ring_attn.RingAttention(WIDTH, HEADS, bias=False, batch_first=True, causal=True, **ring))

    def make_batch(input_ids: Tensor) -> Batch:
        shard = ring_attn.shard_batch(input_ids, **ring)
        return Batch(shard.input_ids, shard.labels, shard.position_ids)

    result = train(options, model, make_batch, dist.all_reduce, f"ring of {mesh.size()}", quiet=dist.get_rank() != 0)
    if dist.get_rank() == 0:
        torch.save(result, options.output / "ring.pt")
    dist.destroy_process_group()


def train_on_one_process(options: argparse.Namespace) -> None:
    def make_batch(input_ids: Tensor) -> Batch:
        labels = F.pad(input_ids[:, 1:], (0, 1), value=-100)
        return Batch(input_ids, labels, torch.arange(input_ids.shape[1]).unsqueeze(0))

    result = train(options, make_model(options), make_batch, lambda tensor: None, "one process")
    torch.save(result, options.output / "single.pt")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=8192, help="bytes in the sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="size of the ring (default: %(default)s)")
    parser.add_argument("--layout", default="zigzag", choices=["contiguous", "zigzag", "striped"])
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder of the picture (default: %(default)s)")
    parser.add_argument("--role", choices=["ring", "single"], help=argparse.SUPPRESS)  # set for child processes
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.role == "ring":
        train_on_ring(options)
    elif options.role == "single":
        train_on_one_process(options)
    else:
        standard_library_text(least=options.context)  # fails early if the context is too long
        options.output.mkdir(parents=True, exist_ok=True)
        launch("ring", options.processes)
        launch("single", 1)
        name = f"ring of {options.processes}, {options.layout}, {options.context} bytes of context"
        compare(load(options.output / "ring.pt"), load(options.output / "single.pt"), options.output / "loss.png", name)


if __name__ == "__main__":
    main()
