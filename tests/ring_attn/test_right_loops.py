"""No loop that is right is accused of anything: a model of one's own. context_parallel: tests/integrations/test_mistakes.py."""

import pytest
from launch import torchrun


@pytest.mark.slow
def test_right_loops_are_told_nothing():
    assert torchrun("right_loops_worker.py", 4).count("right loops worker: all right") == 4
