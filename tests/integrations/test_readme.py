"""What the pages print of transformers runs as printed and gives what one process gives; so does the loss in chunks under FSDP2
and DDP."""

import re
from pathlib import Path

import pytest
from launch import as_a_user, torchrun

pytestmark = pytest.mark.slow


ROOT = Path(__file__).parents[2]
NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"


def numberless(text: str) -> list[str]:
    """Which of a parameter's gradients is the furthest off depends on the machine."""
    return [re.sub(NUMBER, "#", re.sub(r"\(the gradient of .*\)", "", line)).strip() for line in text.splitlines()]


@pytest.mark.parametrize("file", ["README.md", "docs/first-run.md"])
def test_a_program_prints_what_the_page_says(file, tmp_path):
    """On two CPU processes; the page's first block of text is what it prints, but for the numbers."""
    page = (ROOT / file).read_text(encoding="utf-8")
    program = re.search(r'^```python title="\w+\.py"\n(.*?)^```', page, re.MULTILINE | re.DOTALL)[1]
    expected = re.search(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    done = as_a_user("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(numberless(expected)) <= set(numberless(done.stdout)), done.stdout + done.stderr


def test_the_printed_lines_give_the_loss_and_gradients_of_one_process():
    printed = torchrun("readme_worker.py", 2)
    for name in ("three lines", "a loss in chunks"):
        assert printed.count(f"{name}: as one process") == 2, printed


WRAPPED = (
    "fsdp_first",
    "ring_first",
    "fsdp_first_and_loss_chunk",
    "loss_chunk_and_fsdp",
    "fsdp_of_the_root_alone_first_and_loss_chunk",
    "fsdp_that_reshards_and_loss_chunk",
    "loss_chunk_and_fsdp_of_base_and_root",
    "every_lever_and_fsdp",
    "mlp_tile_and_fsdp",
    "fsdp_of_the_mlps_and_mlp_tile",
    "ddp_and_mlp_tile",
    "ddp_and_loss_chunk",
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
