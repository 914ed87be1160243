"""Run by torchrun with TRITON_INTERPRET=1: each rank holds a part of the keys, in an order of its own, and torch launches the
kernels. The results are those of all keys in one process."""

import torch.distributed as dist
from decoding_cases import CASES, arrays, check

import ring_attn
from torch_bridge.attention import decoding
from torch_bridge.call import programs

KEYS = ("k", "v", "kv_segment_ids", "kv_position_ids")


def main() -> None:
    dist.init_process_group("gloo")
    decoding.launches = lambda *_: True
    decoding._SHORTEST_PART = 16
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in ("sinks", "several, in order"):
        case = CASES[name]
        given = arrays(case)
        part = {name: x[:, rank::size].contiguous() if name in KEYS else x for name, x in given.items()}
        out, lse = ring_attn.ring_attention(**part, **case.options, strategy="decode", return_lse=True)
        check(case, given, out, lse)
        assert isinstance(next(reversed(programs._PROGRAMS.values())).program, decoding.Decoding)
    try:
        ring_attn.ring_attention(given["q"][:, :1] + rank, *(part[name][:, :9].contiguous() for name in "kv"), strategy="decode")
    except ValueError as error:
        assert "the queries must be the same on all ranks" in str(error), error
    else:
        raise AssertionError("ranks had different queries")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
