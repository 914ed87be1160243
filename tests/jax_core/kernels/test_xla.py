"""The XLA kernel where the cases of tests/jax_core/api do not go."""

import pytest
from far_positions import FAR
from oracle_assertions import assert_ring_is_like_the_oracle


@pytest.mark.parametrize("name", FAR)
def test_positions_anywhere_among_32_bits(name: str):
    case = FAR[name]
    assert_ring_is_like_the_oracle(case)
