"""Two ranks ask what their calls run, before and after they have made them; run by tests/ring_attn/test_explain.py."""

import torch

from ring_attn import Explaining, Ring, explain, ring_attention, sdpa
from tests.support.healthy import gloo_world

SHARD = 64


def main() -> None:
    with gloo_world("explain"):
        q, k = torch.randn(1, SHARD, 4, 8), torch.randn(1, SHARD, 2, 8)
        found = explain(q, k, k, causal=True, layout="zigzag")
        assert (found.strategy, found.kernel) == ("ring", "xla"), found
        assert found.ranks == 2 and "ranks     2 (each has a part of the sequence)" in str(found)
        assert found.forward.sent == 2 * k.nbytes and found.backward.sent == 2 * k.nbytes * 2 + 2 * k.nbytes, found
        ring_attention(q, k, k, causal=True, layout="zigzag")
        assert explain(q, k, k, causal=True, layout="zigzag") == found
        assert explain(q, k, k, strategy="all_gather").strategy == "all_gather"
        assert "two mesh axes" in (found.strategies["hierarchical"] or "")
        with Explaining() as calls:
            seen = sdpa(*(x.transpose(1, 2) for x in (q, k, k)), is_causal=True, enable_gqa=True, ring=Ring(layout="zigzag"))
        assert [each.strategy for each in calls.found.values()] == ["ring"]
        torch.testing.assert_close(seen.transpose(1, 2), ring_attention(q, k, k, causal=True, layout="zigzag"))


if __name__ == "__main__":
    main()
