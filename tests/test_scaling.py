"""benchmarks/scaling: what it reads of results, that a fit finds what made them, and that its README.md says what they say."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling import fit, predict, tables
from benchmarks.scaling.costs import Call
from benchmarks.scaling.rows import Results, call_of, read

DOCUMENT = (Path(__file__).parent.parent / "benchmarks/scaling/README.md").read_text(encoding="utf-8")
TWO = "2026-11-21-ring-2xH200"


@pytest.fixture(scope="module")
def shipped():
    machine, bench, results = predict.shipped()
    return machine, bench, predict.rows_of(results)[0]


def test_results_are_named_with_what_auto_took():
    text = f"{TWO}=cuda@4096,triton@0"
    results = Results.parsed(f"benchmarks/results/{text}")
    assert str(results) == text
    assert [results.taken(length) for length in (8192, 4096, 2048)] == ["cuda", "cuda", "triton"]
    assert Results.parsed(TWO).taken(8192) is None


def test_rows_are_read_as_the_calls_that_were_timed():
    rows, left_out = read(Results.parsed(f"{TWO}=cuda@4096,triton@0"))
    assert left_out == []
    short = next(row for row in rows if (row.case, row.platform, row.phase) == ("4k tokens", "triton", "forward"))
    assert (short.call, short.calls, short.in_jax) == (Call(2048, 2, home_itemsize=4), 19, False)
    overlap = next(row for row in rows if row.case == "overlap at 8k tokens a GPU")
    assert overlap.call == Call(8192, 2, home_itemsize=4)
    assert overlap.still_ms == pytest.approx(2.3616, abs=1e-4)
    assert call_of("32k tokens a GPU, ring of 4", 8, [32, 8, 128]) == Call(32768, 4)
    assert call_of("1M tokens", 4, [16, 4, 64]) == Call(2**18, 4, 16, 4, 64, 64)
    window = call_of("64k window 4096", 1, [32, 8, 128])
    assert isinstance(window, Call)
    assert (window.length, window.mask.left) == (65536, 4095)
    assert call_of("16x64 8k", 1, [32, 8, 128]) == Call(8192, 1, 16, 16, 64, 64)
    assert call_of("segments 8k", 1, [32, 8, 128]) == "packed documents and soft caps are not in the model"
    assert call_of("nonsense", 1, [32, 8, 128]) == "a case that the program does not know"


def test_the_ring_among_other_strategies_and_a_rank_alone_are_read():
    rows, left_out = read(Results.parsed("2026-11-22-ring-2xH200=cute@4096,triton@0"))
    assert left_out == ['2026-11-22-ring-2xH200: 4k tokens, auto: "auto" is another strategy there']
    found = {(row.case, row.platform, row.phase): row for row in rows}
    assert found["16k tokens", "triton", "both"].call == Call(8192, 2, home_itemsize=4)  # before it went home rounded
    assert {platform for case, platform, _ in found if case == "4k tokens"} == {"cute", "cuda", "triton"}
    rows, _ = read(Results.parsed("2026-11-22-ring-alone-of-8-1M"))
    assert {(row.platform, row.phase, row.call, row.alone, row.in_jax) for row in rows} == {
        ("cute", phase, Call(131072, 8), True, True) for phase in ("forward", "backward")
    }


def test_what_is_not_covered_is_told():
    rows, left_out = read(Results.parsed(TWO))
    assert {row.platform for row in rows if row.still_ms is None} == {"cuda", "triton"}
    assert left_out[0] == f'{TWO}: 4k tokens, auto: what "auto" took is not known; say it: {TWO}=PLATFORM@LENGTH,...'
    _, left_out = read(Results.parsed("2026-11-21-one-gpu=cuda@4096,triton@0"))
    assert any("packed documents and soft caps are not in the model" in reason for reason in left_out)


def test_a_fit_finds_what_made_the_times(shipped):
    """Times that a machine's figures predict are predicted by a fit to those of one and two GPUs."""
    machine, bench, rows = shipped
    bench = bench._replace(warm={})
    made = [replace(row, ms=fit.predicted(machine, bench, row), spread=0.0) for row in rows if row.platform == "cuda"]
    made = [row for row in made if row.still_ms is None]
    found = fit.fit([row for row in made if predict.is_fitted(row)])
    mean, worst = predict.summary([fit.error(found.machine, found.bench, row) for row in made if not predict.is_fitted(row)])
    assert mean < 0.01
    assert worst < 0.02
    assert found.machine.kernels["cuda"].forward.edge == pytest.approx(machine.kernels["cuda"].forward.edge, rel=0.05)


def test_the_document_says_how_far_off_the_shipped_figures_are(shipped):
    """On rings larger than those fitted: each row and their summary, recomputed from the committed results."""
    machine, bench, rows = shipped
    tested = [row for row in rows if not predict.is_fitted(row)]
    assert {row.call.size for row in tested} == {4}
    lines = set(DOCUMENT.splitlines())
    times = [row for row in tested if row.still_ms is None]
    mean, worst = predict.summary([fit.error(machine, bench, row) for row in times])
    assert f"Error of the times: {mean:.1%} on average, {worst:.1%} at most ({len(times)} rows)." in lines
    assert mean < 0.05
    for row in tested:
        error = f"{fit.error(machine, bench, row):+.1%}"
        assert any(line.startswith(f"| {row.results} | {row.case} | {row.phase} |") and f"| {error} |" in line for line in lines)


def test_the_documents_predictions_are_the_shipped_figures(shipped):
    machine = shipped[0]
    told = tables.Told(machine, shipped[1], {}, shipped[2], [], (0.0, 0.0))
    for name in ("hidden", "sensitivity", "eight"):
        block = "\n".join(getattr(tables, name)(told))
        assert tables.replaced(DOCUMENT, name, block) == DOCUMENT
    platform = tables.fastest(machine)
    forward, both = tables.rates(machine, platform, 2**20, 64)
    row = next(line for line in DOCUMENT.splitlines() if line.startswith("| 64 |"))
    assert f"| {forward:.0f} / {both:.0f} (" in row


def test_check_prints_the_error(capsys):
    predict.check([Results.parsed("2026-11-21-ring-4xH200-scaling=cuda@4096,triton@0")])
    printed = capsys.readouterr().out
    assert re.search(r"^error of 10 rows: \d\.\d% on average, \d+\.\d% at most$", printed, re.MULTILINE)


def test_a_block_must_have_its_place():
    with pytest.raises(ValueError, match=r"scaling/README\.md must have <!-- errors"):
        tables.replaced("no comment here", "errors", "text")
