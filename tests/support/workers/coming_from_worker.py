"""Runs each "after" of docs/coming-from.md on two ranks and compares its ``out`` with attention over the whole sequence."""

import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import ring_attn

PAGE = Path(__file__).parents[3] / "docs/coming-from.md"
AFTER = re.findall(r'^```python title="after: (.*?)"\n(.*?)^```', PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def main() -> None:
    dist.init_process_group("gloo")
    ring = ring_attn.Ring(init_device_mesh("cpu", (dist.get_world_size(),)), layout="zigzag")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 64, 4, 16) for _ in range(3))
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    for name, lines in AFTER:
        given = {"q": q, "k": k, "v": v, "ring": ring, "group": dist.group.WORLD, "torch": torch, "F": F, "ring_attn": ring_attn}
        exec(lines, given)
        if "out" in given:
            torch.testing.assert_close(given["out"], expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        else:
            whole, x = ring.unshard(given["y"]), ring.unshard(given["x"])
            alone = torch.nn.MultiheadAttention(64, 4, batch_first=True)
            alone.load_state_dict(given["torch_model"][0].state_dict())
            mask = torch.nn.Transformer.generate_square_subsequent_mask(64)
            torch.testing.assert_close(whole, alone(x, x, x, attn_mask=mask, need_weights=False)[0], rtol=1e-4, atol=1e-5)
        print(f"{name}: as in one process", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
