"""A rank is busy between two ring calls of a backward, and no longer."""

import pytest

from torch_bridge.call.busy import busy
from torch_bridge.failures import peers


def stopped():
    with busy(), busy():
        raise ValueError(str(len(peers.state.preparing)))


def test_what_raises_is_over():
    before = len(peers.state.preparing)
    with pytest.raises(ValueError, match=f"^{before + 2}$"):
        stopped()
    assert len(peers.state.preparing) == before
