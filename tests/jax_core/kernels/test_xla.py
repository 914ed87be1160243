"""The XLA kernel where the cases of tests/jax_core/api do not go."""

import pytest
from attention_cases import make_cotangents, make_inputs, ring_results
from far_positions import FAR
from oracle_assertions import assert_like_the_oracle


@pytest.mark.parametrize("name", FAR)
def test_positions_anywhere_among_32_bits(name: str):
    case = FAR[name]
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    assert_like_the_oracle(case, ring_results(case, inputs, cotangents), inputs, cotangents)
