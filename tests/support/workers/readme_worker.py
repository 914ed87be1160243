"""Runs README's first lines, and the loss in chunks of docs/transformers.md, on a tiny Llama, and compares loss and gradients with
the model's own. Two ranks."""

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from ring_attn.integrations.transformers import context_parallel

ROOT = Path(__file__).parents[3]


def printed(file: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", file.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


LINES = {
    "README.md": next(text for text in printed(ROOT / "README.md") if "import" not in text),
    # A rank has 11 tokens here: several chunks.
    "transformers.md": next(text for text in printed(ROOT / "docs/transformers.md") if "split(" in text).replace("1024", "4"),
}


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size")
    config = LlamaConfig(**dict(zip(names, (32, 64, 2, 4, 2, 64), strict=True)), attn_implementation="eager")
    return LlamaForCausalLM(config)


def main() -> None:
    dist.init_process_group("gloo")
    ids = torch.randint(64, (2, 21), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    whole, mesh = tiny(), init_device_mesh("cpu", (dist.get_world_size(),))
    expected = whole(**batch).loss
    expected.backward()
    for file, lines in LINES.items():
        given = {"context_parallel": context_parallel, "model": tiny(), "mesh": mesh, "batch": batch}
        if "context_parallel(" not in lines:
            given["cp"] = context_parallel(given["model"], mesh)
        exec(lines, given)
        torch.testing.assert_close(given["loss"], expected, rtol=1e-5, atol=1e-6)
        for (name, own), (_, other) in zip(given["model"].named_parameters(), whole.named_parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
        print(f"{file}: as one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
