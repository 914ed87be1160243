"""Where the documents of a batch begin is decided in one place: the same table for all that read a batch (transformers' models:
tests/integrations/test_transformers.py)."""

import pytest
import torch
from document_cases import CASES, Case, same

from ring_attn import shard_batch, shard_packed
from ring_attn.documents.reading import read_documents


def of_the_reading(case: Case):
    return read_documents(case.batch, case.batch["input_ids"].shape, torch.device("cpu")).numbers


def of_shard_batch(case: Case):
    """Its ``attention_mask``, ``segment_ids`` and ``position_ids``; it has no other argument for them."""
    return shard_batch(**case.batch, mesh="local").segment_ids


def of_shard_packed(case: Case):
    shard = shard_packed(case.batch, mesh="local")
    numbers = torch.full((case.batch["input_ids"].numel(),), -1)
    numbers[shard.tokens] = shard.segment_ids[0][shard.places].long()
    return numbers.view_as(case.batch["input_ids"])


READERS = {"the reading": of_the_reading, "shard_batch": of_shard_batch, "shard_packed": of_shard_packed}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("reader", READERS)
def test_all_understand_the_same(reader, name):
    case = CASES[name]
    if reader == "shard_batch" and not case.entries.keys() <= {"position_ids", "segment_ids", "attention_mask"}:
        with pytest.raises(TypeError, match="unexpected keyword"):
            of_shard_batch(case)
        return
    if isinstance(case.understood, str):
        with pytest.raises(ValueError, match=case.understood):
            READERS[reader](case)
        return
    assert same(READERS[reader](case), torch.tensor(case.understood))


def test_numbers_that_come_back():
    """Equal ids see each other wherever they are; what is placed by documents cannot have it so."""
    ids, again = torch.arange(6)[None], torch.tensor([[0, 0, 1, 1, 0, 0]])
    assert torch.equal(shard_batch(ids, segment_ids=again, mesh="local").segment_ids, again)
    with pytest.raises(ValueError, match="segment_ids gives one number to tokens that are apart"):
        shard_packed({"input_ids": ids, "segment_ids": again}, mesh="local")


def test_labels_stay_within_what_the_mask_numbers():
    batch = shard_batch(torch.arange(6)[None], attention_mask=torch.tensor([[1, 1, 2, 2, 2, 0]]), mesh="local")
    assert batch.segment_ids.tolist() == [[0, 0, 1, 1, 1, -1]]
    assert batch.labels.tolist() == [[1, -100, 3, 4, -100, -100]]
