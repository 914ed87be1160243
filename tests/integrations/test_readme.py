"""The lines on README's first screen, as printed, train a transformers model on a ring as one process would."""

import pytest
from launch import torchrun


@pytest.mark.slow
def test_the_first_lines_give_the_loss_and_gradients_of_one_process():
    printed = torchrun("readme_worker.py", 2)
    assert printed.count("as one process") == 2, printed
