"""README's first lines, and the loss in chunks of docs/transformers.md, as printed, train a transformers model on a ring as one
process would; so they do under FSDP2 and DDP."""

import pytest
from launch import torchrun

pytestmark = pytest.mark.slow


def test_the_printed_lines_give_the_loss_and_gradients_of_one_process():
    printed = torchrun("readme_worker.py", 2)
    for file in ("README.md", "transformers.md"):
        assert printed.count(f"{file}: as one process") == 2, printed


WRAPPED = (
    "fsdp_first",
    "ring_first",
    "fsdp_around_chunks",
    "fsdp_of_the_base_model",
    "fsdp_lends_its_call",
    "ddp_around_chunks",
    "ddp_lends_its_call",
    "ddp_lends_it_to_forward",
)


def test_a_model_and_a_loss_in_chunks_are_wrapped_by_fsdp_and_ddp():
    printed = torchrun("fsdp_transformers_worker.py", 2)
    for way in WRAPPED:
        assert printed.count(f"{way}: as one process") == 2, printed
