"""README's first lines, as printed, train a transformers model on a ring as one process would; so they do under FSDP2."""

import pytest
from launch import torchrun

pytestmark = pytest.mark.slow


def test_the_first_lines_give_the_loss_and_gradients_of_one_process():
    printed = torchrun("readme_worker.py", 2)
    assert printed.count("as one process") == 2, printed


def test_a_model_is_wrapped_by_fsdp_before_or_after():
    printed = torchrun("fsdp_transformers_worker.py", 2)
    assert printed.count("FSDP first: as one process") == printed.count("ring first: as one process") == 2, printed
