"""How many tokens train on a number of GPUs: the memory of a step by a formula, compared with what was measured.

    python -m benchmarks.training.fits            # each measured row beside the formula
    python -m benchmarks.training.fits --write    # the table in docs/performance.md

A model of transformers' Llama or Qwen3 form with AdamW, a batch of one row, activation checkpointing. Bytes a GPU:

- states: a replicated parameter takes 2 for its weight, 2 for its gradient, 4 for AdamW (bfloat16); under FSDP2 4, 4 and 8 divided
  by the GPUs (float32), and two gathered layers, the embedding and the head in bfloat16;
- held until the backward, a token: the input of each layer, and where attention is kept its output and LSE;
- the largest of three moments: the loss (no gradients yet; 4 bytes a logit, of a chunk where it is taken in chunks), the backward
  of the last layer, and that of the first (all gradients);
- what torch's allocator reserves beyond its tensors, JAX's pool, and 2.5 GiB of contexts and NCCL's buffers.

The constants are those of the measured rows; for other widths they are assumed to grow with them, which nothing has tried.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness.report import ROOT
from tools import marks

GIB = 2**30
PAGE = ROOT / "docs/performance.md"
RUNS = {
    "2026-11-25-train-2xH100-replicated": ("ring-attn", "ring-attn, attention again"),
    "2026-11-23-train-2xH200-fsdp": ("ring-attn",),
    "2026-11-23-train-2xH200-deep": ("ring-attn",),
}
TOKENS = {"4k": 2**12, "16k": 2**14, "64k": 2**16, "128k": 2**17, "256k": 2**18}  # of all ranks
CONTEXTS = 2.5 * GIB
RESERVED = 1.25  # by torch's allocator, of tensors that come and go
AROUND = 0.4 * GIB  # what no row of any length was without
ROOM = 0.9 * 79.0  # GiB of an H100 of 80 GB that a process can have; the formula was up to 13 % low


@dataclass(frozen=True)
class Model:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    tied: bool = False

    @property
    def of_a_layer(self) -> int:
        """Parameters."""
        attention = self.hidden * self.dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def of_the_ends(self) -> int:
        return self.hidden * self.vocabulary * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.of_a_layer + self.of_the_ends


MEASURED = Model(12, 2048, 6144, 32, 8, 128, 32000)
MODELS = {
    "Llama 3.2 1B": Model(16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    "Qwen3 8B": Model(36, 4096, 12288, 32, 8, 128, 151936),
    "Qwen3 32B": Model(64, 5120, 25600, 64, 8, 128, 151936),
}


@dataclass(frozen=True)
class Setting:
    """``kept``: attention's outputs are kept on the GPU; ``chunk``: tokens of the loss at a time, or all."""

    gpus: int
    sharded: bool
    kept: bool = True
    chunk: int | None = None


def tensors(model: Model, setting: Setting, tokens: int) -> tuple[float, float]:
    """Bytes of torch's tensors at the peak, with ``tokens`` on each GPU: of those that stay, and of those that come and go."""
    if setting.sharded:
        weights, gradients, moments = (each * model.parameters / setting.gpus for each in (4, 4, 8))
        gathered = 2 * (2 * model.of_a_layer + model.of_the_ends)
    else:
        weights, gradients, moments = (each * model.parameters for each in (2, 2, 4))
        gathered = 0
    states = weights + moments + gathered + AROUND
    kept = 2 * model.heads * model.dim + 4 * model.heads if setting.kept else 0
    held = tokens * model.layers * (2 * model.hidden + kept)
    of_a_layer = tokens * (16 * model.intermediate + 8 * model.hidden)
    logits = min(setting.chunk or tokens, tokens) * 4 * model.vocabulary
    loss = held + logits + tokens * 16 * model.hidden
    return states, max(loss, held + of_a_layer, gradients + of_a_layer)


def device(model: Model, setting: Setting, tokens: int) -> float:
    """Bytes taken of each GPU."""
    stay, go = tensors(model, setting, tokens)
    jax = tokens * 16 * model.heads * model.dim
    return stay + RESERVED * go + jax + CONTEXTS


def fitting(model: Model, setting: Setting) -> int:
    """The most tokens of a row, over all GPUs, in thousands (1,024); 0 if not one fits."""
    most = 0
    for step in (2**power for power in range(14, -1, -1)):
        if device(model, setting, (most + step) * 1024) <= ROOM * GIB:
            most += step
    return most * setting.gpus


def measured() -> Iterator[tuple[str, Model, Setting, int, float, float]]:
    """Each row that was measured: its name, what it was, the tokens of a GPU, GiB of tensors and of the device."""
    for name, systems in RUNS.items():
        found = json.loads((ROOT / "benchmarks/results" / name / "results.json").read_text(encoding="utf-8"))
        layers = 36 if "--layers 36" in found["command"] else 12
        model = Model(layers, *(getattr(MEASURED, field) for field in list(Model.__annotations__)[1:]))
        for row in found["rows"]:
            tokens, _, setting = row["case"].partition(", ")
            if tokens in TOKENS and row["system"] in systems and "device, GiB" in row:
                kept = "H100" in name and row["system"] == "ring-attn"  # before 2026-11-25 nothing was kept
                what = Setting(2, setting == "FSDP2", kept)
                figures = (row["torch's peak, GiB"], row["device, GiB"])
                yield f"{name}: {row['case']}, {row['system']}", model, what, TOKENS[tokens] // 2, *figures


def table() -> str:
    columns = (1, 2, 8, 32)
    lines = ["| |" + "".join(f" {gpus} GPU{'s' * (gpus > 1)} |" for gpus in columns), "|---|" + "---|" * len(columns)]
    for name, model in MODELS.items():
        for kept in (True, False):
            fits = (fitting(model, Setting(gpus, True, kept, chunk=1024)) for gpus in columns)
            lines.append(f"| {name}{'' if kept else ', attention computed again'} |" + "".join(f" {n or '-'} |" for n in fits))
    return "\n".join(lines)


def written(page: str) -> str:
    return marks.written(page, {"what fits": table()}, "benchmarks/training/fits.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name, model, setting, tokens, peak, taken in measured():
        ours, whole = sum(tensors(model, setting, tokens)) / GIB, device(model, setting, tokens) / GIB
        print(f"{name:78} tensors {ours:5.2f}, measured {peak:5.2f}, {ours / peak:.2f}", end="; ")
        print(f"device {whole:5.2f}, measured {taken:5.2f}, {whole / taken:.2f}")


if __name__ == "__main__":
    main()
