"""Trains a small language model with torch-xla; one process splits its sequence over all devices of the machine.

On a TPU VM with Python 3.11, from the root of the repository:

    make xla TORCH_XLA="torch-xla[tpu]==2.9.0"
    PJRT_DEVICE=TPU .venv-xla/bin/python examples/torch_xla_tpu.py

On four CPU devices:

    make xla
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 .venv-xla/bin/python examples/torch_xla_tpu.py

The loss and the gradients of the first step are compared with those of the same model on the CPU with torch's own attention over
the whole sequence. On CPU devices they must agree; a TPU may multiply float32 with fewer bits, so there the difference is only
printed.
"""

import argparse
import sys
from functools import partial

import torch

try:
    import torch_xla
except ImportError:
    sys.exit(
        "torch-xla is not installed here; it has an environment of its own: make xla, then .venv-xla/bin/python " + sys.argv[0]
    )
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xla_runtime
from torch import Tensor, nn
from torch.nn import functional as F

from language_model import LanguageModel, SdpaAttention, loss_sum, standard_library_text, window
from ring_attn import RingAttention, shard_batch

WIDTH, HEADS, LAYERS, LAYOUT = 64, 4, 2, "zigzag"
TOLERANCE = 1e-4  # float32, the same sums in two orders; relative to the loss, and to a parameter's largest gradient


def make_models(context: int) -> tuple[LanguageModel, LanguageModel]:
    """Two models with the same initial weights: one with ring attention, one with torch's."""
    torch.manual_seed(0)
    arguments = WIDTH, HEADS
    plain = LanguageModel(WIDTH, LAYERS, context, partial(SdpaAttention, *arguments, bias=False, batch_first=True))
    attention = partial(RingAttention, *arguments, bias=False, batch_first=True, causal=True, layout=LAYOUT)
    ring = LanguageModel(WIDTH, LAYERS, context, attention)
    ring.load_state_dict(plain.state_dict())
    return ring, plain


def mean_loss(model: nn.Module, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Tensor:
    return loss_sum(model(input_ids, position_ids), labels) / (labels.numel() - 1)  # the last byte has no successor


def plain_loss(model: nn.Module, whole: Tensor) -> Tensor:
    positions = torch.arange(whole.shape[1]).unsqueeze(0)
    return mean_loss(model, whole, positions, F.pad(whole[:, 1:], (0, 1), value=-100))


def compare(ring: nn.Module, plain: nn.Module, loss: Tensor, whole: Tensor) -> None:
    """Prints how far the first step differs from that of the same model without sharding."""
    torch_xla.sync()  # one program for everything read below
    expected = plain_loss(plain, whole)
    expected.backward()
    apart = {"loss": abs(loss.item() - expected.item())}
    for (name, ours), theirs in zip(ring.named_parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        apart[name] = ((ours.grad.cpu() - theirs.grad).abs().max() / theirs.grad.abs().max()).item()
    worst = max(apart, key=lambda name: apart[name])
    print(
        f"first step beside the whole sequence on the CPU: loss {apart['loss']:.1e} apart; furthest is {worst}, {apart[worst]:.1e}"
    )
    if xla_runtime.device_type() == "CPU" and not apart[worst] <= TOLERANCE:
        sys.exit(f"That is too far: on CPU devices all must agree within {TOLERANCE}.")


def train(context: int, steps: int) -> None:
    xla_runtime.use_spmd()
    spmd.set_global_mesh(spmd.get_1d_mesh("sequence"))  # the ring, for RingAttention and shard_batch
    device = torch_xla.device()
    print(f"{context} bytes of context over {xla_runtime.global_runtime_device_count()} {xla_runtime.device_type()} devices")
    model, plain = make_models(context)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    text = standard_library_text(least=context)
    for step in range(steps):
        whole = window(text, step, context)
        batch = shard_batch(whole.to(device), layout=LAYOUT)
        loss = mean_loss(model, batch.input_ids, batch.position_ids, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            compare(model, plain, loss, whole)
        optimizer.step()
        torch_xla.sync()
        print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048, help="bytes in the sequence (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps (default: %(default)s)")
    train(**vars(parser.parse_args()))
