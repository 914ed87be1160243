"""Two ranks make the mistakes that no error shows; run by test_sanity_checks.py, which reads what they print."""

import os
import sys
import warnings

import torch
import torch.distributed as dist

import ring_attn
from ring_attn import Ring

GENERATOR = torch.Generator().manual_seed(0)
WHOLE = torch.randn(1, 16, 2, 8, generator=GENERATOR)


def told(name: str, call) -> None:
    """Prints what a call warns or raises; it is made twice, and the second time must be silent unless strict."""
    for turn in ("first", "second"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                call()
                texts = [str(warning.message) for warning in caught]
            except ValueError as error:
                texts = [f"ERROR {error}"]
        sys.stdout.write(f"{name}, {turn}: {texts or 'nothing'}\n")  # in one piece: both ranks write here
        sys.stdout.flush()


def attend(x: torch.Tensor, **options) -> None:
    ring_attn.ring_attention(x, x, x, causal=True, **options)


def main() -> None:
    told("no process group", lambda: attend(WHOLE))
    dist.init_process_group("gloo")
    told("all hold the same", lambda: attend(WHOLE))
    told("all hold ones", lambda: attend(torch.ones_like(WHOLE), scale=1.0))
    told("each its own", lambda: attend(WHOLE + dist.get_rank(), scale=2.0))
    ring = Ring(layout="striped")
    told("one ring", lambda: ring.attention(*[ring.shard(WHOLE[:, :8])] * 3))
    told("zigzag as contiguous", lambda: attend(ring.shard(WHOLE[:, :12])))
    if dist.get_rank():
        ring_attn.positions(16, layout="zigzag")
    told("two layouts", lambda: ring.attention(*[ring.shard(WHOLE)[..., :4]] * 3))
    dist.destroy_process_group()


if __name__ == "__main__":
    assert (sys.argv[1] == "strict") == ("RING_ATTN_STRICT" in os.environ)
    main()
