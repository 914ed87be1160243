"""Runs the first lines of docs/transformers.md, and its loss in chunks, on a tiny Llama, and compares loss and gradients with the
model's own. Two ranks."""

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from ring_attn.integrations.transformers import context_parallel

PAGE = (Path(__file__).parents[3] / "docs/transformers.md").read_text(encoding="utf-8")
PRINTED = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = {
    "three lines": PRINTED[0],
    # A rank has 11 tokens here: several chunks.
    "a loss in chunks": next(text for text in PRINTED if "loss_chunk" in text).replace("1024", "4"),
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
    whole, mesh = tiny(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    expected = whole(**batch).loss
    expected.backward()
    for name, lines in LINES.items():
        given = {"context_parallel": context_parallel, "model": tiny(), "mesh": mesh, "batch": batch}
        if "context_parallel(" not in lines:
            given["cp"] = context_parallel(given["model"], mesh)
        exec(lines, given)
        torch.testing.assert_close(given["loss"], expected, rtol=1e-5, atol=1e-6)
        for (parameter, own), (_, other) in zip(given["model"].named_parameters(), whole.named_parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6, msg=lambda text, at=parameter: f"{at}: {text}")
        print(f"{name}: as one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
