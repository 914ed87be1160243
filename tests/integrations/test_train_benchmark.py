"""benchmarks/training: the batches that all systems get, and what is counted. The systems themselves run on GPUs."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness.report import Report
from benchmarks.harness.streams import Event, split
from benchmarks.harness.team import Team
from benchmarks.training import job, lengths, systems


def test_documents_restart_positions_and_have_no_label_across_their_end():
    batch = job.batch(torch.Generator().manual_seed(0), 64, torch.device("cpu"), documents=5)
    starts = (batch.positions[0] == 0).nonzero().flatten().tolist()
    assert len(starts) == 5 and starts[0] == 0
    ends = [*starts[1:], 64]
    assert batch.positions[0].tolist() == [p for start, end in zip(starts, ends, strict=True) for p in range(end - start)]
    unlabelled = (batch.labels[0] == -100).nonzero().flatten().tolist()
    assert unlabelled == [end - 1 for end in ends]
    kept = batch.labels[0] != -100
    assert torch.equal(batch.labels[0][kept], batch.tokens[0].roll(-1)[kept])


def test_one_document_is_the_whole_sequence():
    batch = job.batch(torch.Generator().manual_seed(0), 16, torch.device("cpu"))
    assert batch.positions[0].tolist() == list(range(16))
    assert (batch.labels == -100).sum() == 1


def test_new_lengths_are_new_and_divide():
    row = job.ROWS["lengths"]
    lengths = job.new_lengths(row, torch.Generator().manual_seed(0))
    assert len({*lengths}) == len(lengths) == 12
    assert all(length % 4 == 0 and 2**12 <= length < 2**14 for length in lengths)


def test_a_row_is_timed_without_its_first_steps(monkeypatch):
    losses = iter(range(100))
    clock = iter([0.0, 9.0, *(x for n in range(10, 15) for x in (float(n), n + 0.5))])
    monkeypatch.setattr(job, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    row = job.Row(64, steps=2, warm=1)
    make = lambda tokens: SimpleNamespace(tokens=tokens)  # noqa: E731
    found = job.one_length(Team(), lambda batch: torch.tensor(float(next(losses))), row, make, scale=2)
    assert found == {"seconds": 0.5, "tokens/s": 64, "loss, first": 0.0, "loss, last": 2.0, "loss, mean": 1.0}


def test_a_moment_of_a_step_is_counted_once():
    """As attention where it runs beside another stream's kernel, as a collective only where nothing else runs."""
    names = [
        ("7", "flash_fwd_sm90FlashAttentionForwardSm90", 0, 4),
        ("7", "flash_bwd_sm90FlashAttentionBackwardSm90", 4, 3),
        ("7", "nvjet", 8, 1),
    ]
    beside = [("9", "add", 2, 6.5), ("13", "ncclDevKernel_SendRecv", 1, 10), ("7", "Memcpy DtoD", 11, 1)]
    events = [Event(stream, name, 1000.0 * start, 1000.0 * length) for stream, name, start, length in names + beside]
    found = split([*events, Event("7", "add", 13_000.0, 1000.0)], job.kind, job.KINDS)
    assert list(found.values()) == [4, 3, 1, 2, 1, 2, 1] and list(found) == [f"{kind} ms" for kind in job.KINDS]


def test_each_system_is_made_with_one_more_lever():
    """And what the plan says of it falls."""
    setting = systems.Setting(sharded=True, of="Qwen3-8B")
    devices = [systems.predicted(f"ring-attn, {name}", setting, 2, 2**17)["device by the plan, GiB"] for name in systems.LEVERS]
    assert devices[:5] == sorted(devices[:5], reverse=True) and len({*devices}) == len(devices)
    assert systems.predicted("SDPA on one GPU", setting, 2, 2**17) == {}
    assert round(setting.shapes.parameters / 1e9, 1) == 3.6


def test_packed_rows_are_nearly_full_and_none_is_over():
    rows = lengths.packed_lengths(30, 1024, torch.Generator().manual_seed(0))
    filled = [sum(row) for row in rows]
    assert len(rows) == 30 and filled[0] == max(filled) == 1024 and min(filled) > 900 and len({*filled}) > 8
    longest = lengths.longest_alone("packed", rows, 1024)
    assert [sum(row) for row in longest] == [1024] * 30 and [len(row) for row in longest] == [len(row) for row in rows]


def test_padded_batches_have_lengths_of_one_octave():
    batches = lengths.padded_lengths(40, 512, torch.Generator().manual_seed(0))
    longest = [max(batch) for batch in batches]
    assert longest[0] == 512 and min(longest) > 256 and len({*longest}) > 20
    batch = lengths.padded([torch.ones(3, dtype=torch.int64), torch.ones(5, dtype=torch.int64)])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["labels"].tolist() == [[1, 1, 1, -100, -100], [1] * 5]


def test_compiling_is_what_its_steps_took_beyond_the_others():
    report = Report(None, "")
    options = SimpleNamespace(way="packed", steps=4)
    changing = {"seconds": [5.0, 1.0, 3.0, 0.8], "compiled": [True, False, True, False], "forward": 2, "backward": 2}
    more = {"of all ranks": 4, "lengths": 3}
    lengths.told(report, options, {**changing, **more}, {"seconds": [2.0, 1.0, 1.0], "of all ranks": 0})
    assert report.find("packed", "changing", "", "compiling, s") == 6.0
    assert [ratio["value"] for ratio in report.data["ratios"]] == pytest.approx([0.95, 2, 2.0])
