"""What is padding may hold anything: NaN, infinities and huge numbers there change no result by a bit.

Here for the ring over the XLA kernel; over the other kernels in their own files (tests/support/poison.py).
"""

import pytest
from attention_cases import CAUSAL, SINKS, Case, normal, segments
from poison import HIDING, PADDED, assert_padding_holds_anything

from jax_core.masks.layout import LAYOUTS

SLOPES_AND_BIAS = {"alibi_slopes": normal("H"), "bias": normal(1, "H", "T", "S")}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ring", [1, 2, 4])
def test_padding(ring: int, layout: str):
    case = Case("padding", ring=ring, layout=layout, queries=12, kv_heads=2, block=7, options=CAUSAL, arrays=PADDED)
    assert_padding_holds_anything(case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_padding_beside_everything_else(dtype: str):
    options = CAUSAL | {"logits_soft_cap": 3.0, "dropout_prob": 0.2, "dropout_seed": 3}
    case = Case("padding and more", ring=2, queries=12, dtype=dtype, options=options, arrays=PADDED | SINKS | SLOPES_AND_BIAS)
    assert_padding_holds_anything(case)


def test_padding_of_one_side():
    arrays = {"q_segment_ids": segments("q"), "kv_segment_ids": segments("kv", padding=0.3)}
    assert_padding_holds_anything(Case("padded keys", ring=2, queries=10, keys=14, arrays=arrays))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, "H"])
def test_keys_that_a_mask_hides_from_every_query(layout: str, heads):
    case = Case("hidden keys", ring=2, layout=layout, queries=10, keys=14, kv_heads=2, arrays={"mask": HIDING(heads)})
    assert_padding_holds_anything(case)
