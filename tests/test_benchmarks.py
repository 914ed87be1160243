"""The parts of the benchmarks that need no GPU: what is counted, how it is timed and told, and what peers are handed."""

import json
import re
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
import torch
from jax.sharding import Mesh

from benchmarks.harness import timing
from benchmarks.harness.report import Report, short
from benchmarks.harness.streams import Event, events_of, split
from benchmarks.harness.systems import Case, difference, make_inputs, ours
from benchmarks.harness.team import Team
from benchmarks.one_gpu import choice
from benchmarks.one_gpu import systems as one_gpu_systems
from benchmarks.one_gpu.bench import Bench
from benchmarks.ring import alone, flash_attn_of_torch, generation, memory, overlap, profile, states
from ring_attn import ring_attention

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/*.md", "docs/contributing/[!a]*.md", "benchmarks/*.md", "benchmarks/[!r]*/*.md")
FILES = (*PAGES, "Makefile", "benchmarks/**/*.py", "tests/**/*.py", "tools/*.*")
OF_THE_LIBRARY = ("jax_core/**/*.py", "jax_core/**/*.json", "jax_core/**/*.md")


def test_what_files_name_of_the_benchmarks_exists():
    """Paths, some with a star for several results, and modules to start."""
    missing, seen = [], 0
    for file in (file for pattern in FILES for file in ROOT.glob(pattern)):
        text = file.read_text(encoding="utf-8").replace("\\*", "*")
        modules = [name.replace(".", "/") + ".py" for name in re.findall(r"-m (benchmarks\.[\w.]+\w)", text)]
        for name in {*re.findall(r"(?<![\w/])(?:benchmarks|tests|tools)/[\w./*-]*[\w*]", text), *modules}:
            seen += 1
            missing += [] if any(ROOT.glob(name)) else [f"{file.relative_to(ROOT)}: {name}"]
    assert seen > 50 and missing == []


def test_every_result_that_is_kept_is_cited():
    """By its name, or with a star for several."""
    texts = (file.read_text(encoding="utf-8") for pattern in (*FILES, *OF_THE_LIBRARY) for file in ROOT.glob(pattern))
    cited = {
        name.replace("\\", "") for text in texts for name in re.findall(r"(?:20\d\d-\d\d-\d\d|\\\*)-[\w\\*-]+(?:\.txt)?", text)
    }
    results = [file.name for file in (ROOT / "benchmarks/results").iterdir()]
    assert results
    assert sorted(name for name in results if not any(fnmatch(name, pattern) for pattern in cited)) == []


def test_work_is_counted_by_visible_pairs():
    whole = Case("", 1024)
    assert whole.tflop("forward") == 4 * 16 * 128 * 1024**2 / 2 / 1e12
    assert whole.tflop("backward") == 2.5 * whole.tflop("forward")
    assert Case("", 1024, causal=False).pairs == 2 * whole.pairs
    assert Case("", 1024, window=1024).pairs == whole.pairs
    assert Case("", 1024, documents=(512, 512)).pairs == whole.pairs / 2


def test_all_passes_of_a_system_give_the_same_gradients():
    inputs = make_inputs(Case("", 64, heads=4, kv_heads=2, dim=8), "cpu")
    prepared = ours("xla", inputs, causal=True, mesh="local")
    assert difference(prepared.results("backward"), prepared.results("both")) == 0.0
    whole = ours("xla", inputs, mesh="local")
    assert difference(whole.results("both"), prepared.results("both")) > 0.1


def test_a_call_from_jax_is_the_call_from_torch():
    case = Case("", 64, heads=4, kv_heads=2, dim=8)
    inputs = make_inputs(case, "cpu")
    here, there = (make("xla", case, inputs) for make in (one_gpu_systems.ours_in_jax, one_gpu_systems.ours))
    for gradients in ("backward", "both"):
        assert difference(here.results(gradients), there.results(gradients)) < 0.01
    timed = here.passes["backward"]
    timed.begin()
    timed.end(timed.call())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("features", [{}, {"window": 9}, {"documents": (5, 40, 19)}, {"softcap": 2.0}, {"causal": False}], ids=str)
def test_peers_compute_the_same_case(features, monkeypatch):
    """FlexAttention's masks and flash-attn's arguments, with stand-ins for what compiles and for what needs a GPU."""
    monkeypatch.setattr(torch, "compile", partial(without_gradients, torch.compile))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", SimpleNamespace(**FLASH_ATTN))
    case = Case("", 64, heads=4, kv_heads=2, dim=16, **features)
    inputs = make_inputs(case, "cpu")
    truth = one_gpu_systems.ours("xla", case, inputs).passes["forward"].call()
    for system in (one_gpu_systems.flex, one_gpu_systems.flash_attn_4):
        prepared = system(case, inputs)
        assert difference([prepared.arrange_back(prepared.passes["forward"].call())], [truth]) < 0.01


def without_gradients(compiled, function, **options):
    """In place of torch.compile: on CPUs FlexAttention has no backward, and refuses what would need one."""
    if function.__name__ != "flex_attention":
        return compiled(function, **options)
    return lambda *qkv, **more: function(*(x.detach() for x in qkv), **more)


def flash_attn_stand_in(q, k, v, *, causal, softcap, window_size=(None, None), cu_seqlens_q=None, **more):
    """Through our own kernel, from flash-attn's arguments; returns the LSE's place too, as some versions do."""
    assert set(more) <= {"cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    options = dict(platform="xla", mesh="local", causal=causal, softcap=softcap or None)
    if cu_seqlens_q is not None:
        lengths = cu_seqlens_q.diff()
        assert more["max_seqlen_q"] == more["max_seqlen_k"] == lengths.max()
        options["q_segment_ids"] = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
        q, k, v = (x[None] for x in (q, k, v))
    if window_size[0] is not None:
        options["sliding_window"] = window_size
    out = ring_attention(q, k, v, **options)
    return (out if cu_seqlens_q is None else out[0]), None


FLASH_ATTN = dict.fromkeys(("flash_attn_func", "flash_attn_varlen_func"), flash_attn_stand_in)


def test_the_fastest_is_marked():
    rows = [dict(case="c", phase="both", system=name, ms=ms) for name, ms in (("cute", 2.0), ("triton", 1.5))]
    told = choice.choices([*rows, dict(case="c", phase="check", system="cuda", failed="no")], ("cute", "cuda", "triton"))
    assert told[-1] == "| c | both | 2.000 |  | **1.500** | triton |"
    assert len(told) == 3


def test_documents_of_a_case_fill_it():
    for length in choice.LENGTHS:
        assert sum(choice.make_case("segments", length).documents) == length


def test_systems_take_turns_and_a_failing_one_stops_none(monkeypatch):
    monkeypatch.setattr(timing, "FIRST_IS_ENOUGH_MS", 0.0)
    seen = []

    def breaks():
        seen.append("b")
        if seen.count("b") > 2:
            raise RuntimeError("no more")

    systems = {"a": timing.Timed(lambda: seen.append("a")), "b": timing.Timed(breaks)}
    times, failed = timing.take_turns(Team(), systems, rounds=3, sample_ms=0)
    assert len(times["a"].samples) == 3
    assert times["a"].calls == 1
    assert "b" not in times
    assert timing.reason(failed["b"]) == "RuntimeError: no more"
    assert "".join(seen) == "ab" + "ba" + "ab"


def test_a_report_keeps_what_came_before_the_end(tmp_path: Path):
    report = Report(tmp_path / "run", "A title")
    report.add(case="c", system="s", phase="forward", ms=2.0, tflops=500.0)
    report.add(case="c", system="t", phase="forward", failed="ImportError: not here")
    report.ratio("s / t", None, at_least=1.5)
    report.ratio("s, TFLOP/s", report.find("c", "s", "forward", "tflops"), at_least=400)
    table = (tmp_path / "run" / "table.md").read_text()
    assert "| s | 2 | 500 |" in table
    assert "- t, forward: ImportError: not here" in table
    assert "| s / t | not measured | >= 1.5 |  |" in table
    assert "| s, TFLOP/s | 500.000 | >= 400 | met |" in table
    report.finish()
    assert (tmp_path / "run" / "plot.png").stat().st_size > 0
    assert [short(n) for n in (16384, 2**20, 100)] == ["16k", "1M", "100"]


def test_the_time_beside_kernels_is_read_from_a_trace():
    found = [
        ("kernel", "cudnn_sdpa_flash_fprop", 7, 100, 50),
        ("kernel", "ncclDevKernel_SendRecv(args)", 13, 110, 20),
        ("kernel", "ncclDevKernel_SendRecv(args)", 13, 140, 20),
        ("gpu_memcpy", "Memcpy DtoD", 7, 150, 5),
    ]
    keys = ("cat", "name", "stream", "ts", "dur")
    trace = [dict(zip(keys, event, strict=True)) for event in found]
    events = events_of({"traceEvents": [{**event, "args": {"stream": event["stream"]}} for event in trace]})
    assert [event.start for event in events] == [0, 10, 40, 50]
    assert [(event.is_kernel, event.is_rotation, event.is_copy) for event in events] == [
        (True, False, False),
        (False, True, False),
        (False, True, False),
        (False, False, True),
    ]
    assert [event.is_attention for event in events] == [True, False, False, False]
    told = split(events, profile.kind, profile.KINDS)
    assert told == {
        "attention ms": 0.05, "other kernels ms": 0.0, "copies ms": 0.005, "rotation alone ms": 0.005, "nothing ms": 0.0
    }  # fmt: skip
    told = profile.summary(events)
    assert told == {"span ms": 0.06, "kernels ms": 0.05, "rotation ms": 0.04, "beside kernels %": 75.0}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (["a warning", '{"peak": {"KiB a token": 88.4}}'], {"KiB a token": 88.4}),
        (["Traceback", "  ValueError: no", "torch.distributed.elastic...ChildFailedError:"], {"failed": "ValueError: no"}),
        ([], {"failed": "it printed nothing in the time it had"}),
    ],
)
def test_what_a_job_said_of_its_memory(said, told):
    assert memory.figures_in(said) == told


@pytest.mark.slow
def test_memory_is_asked_of_a_job_of_its_own(tmp_path: Path, monkeypatch):
    """On CPUs there is nothing to count; a system that refuses says why."""
    for name in ("RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    report = Report(tmp_path / "run", "memory")
    options = SimpleNamespace(systems=["xla", "pallas"], memory_tokens=16, memory_sizes=[1], memory_timeout=100.0, heads=[2, 1, 8])
    run = SimpleNamespace(options=options, team=Team(), report=report, may_begin=lambda what: True)
    memory.memory(run)
    ours, other = report.rows
    assert ours["held"] == (4 * 2 + 4 * 1) * 8 * 2 / 1024 + 2 * 4 / 1024
    assert "error: argument system: invalid choice" in other["failed"]


def test_a_picture_of_streams_is_drawn(tmp_path: Path):
    rotations = [Event("13", "nccl", 10.0 * step, 4.0) for step in range(8)]
    kernels = [Event("7", f"kernel {step % 2}", 10.0 * step, 9.0) for step in range(8)]
    events = [*rotations, *kernels]
    assert [name for name, *_ in profile.windows(events, 4)] == [
        "the whole",
        "one step of the forward",
        "one step of the backward",
    ]
    profile.draw(events, 4, "streams", tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").stat().st_size > 0


@pytest.mark.slow
def test_nothing_travels_in_what_overlap_compares_with():
    case = Case("", 64, heads=4, kv_heads=2, dim=8)
    for axis in (overlap.ROTATING, overlap.STILL):
        mesh = Mesh(jax.devices()[:2], (axis,))
        for timed in overlap.compiled_passes(mesh, case, "xla").values():
            assert ("collective-permute" in timed.call.func.as_text()) == (axis == overlap.ROTATING)
            timed.wait(timed.call())


@pytest.mark.slow
def test_a_rank_alone_is_timed_in_both_directions(tmp_path: Path):
    options = SimpleNamespace(platforms=["xla", "triton"], rounds=1, size=2, output=tmp_path)
    bench, mesh = Bench(options, "alone"), Mesh(jax.devices()[:2], (overlap.STILL,))
    alone.measure(bench, mesh, Case("64 tokens, a rank of 2", 64, heads=4, kv_heads=2, dim=8))
    found = {(row["system"], row["phase"]): row for row in bench.report.rows}
    assert "need an NVIDIA GPU" in found.pop(("triton", "check"))["failed"]
    ms = [found["xla", phase]["ms"] for phase in ("forward", "backward", "both")]
    assert len(found) == 3 and ms[2] == ms[0] + ms[1]


def test_flash_attn_is_passed_on_in_the_form_torch_wants():
    q, k = (torch.empty(1, 256, heads, 64, device="meta", dtype=torch.bfloat16) for heads in (8, 2))
    off = {"dropout_p": 0.0, "alibi_slopes": None}
    out, lse, *_ = flash_attn_of_torch._flash_attn_forward(q, k, k, softmax_scale=0.1, causal=True, return_softmax=False, **off)
    assert (out.shape, lse.shape) == (q.shape, (1, 8, 256))
    gradients = [torch.empty_like(x) for x in (q, k, k)]
    flash_attn_of_torch._flash_attn_backward(out, q, k, k, out, lse, *gradients, softmax_scale=0.1, causal=True, **off)
    with pytest.raises(NotImplementedError, match="only plain attention"):
        flash_attn_of_torch._flash_attn_forward(q, k, k, softmax_scale=0.1, causal=True, dropout_p=0.1)


def test_layers_with_a_state_are_measured(tmp_path: Path):
    states.main(["--tokens", "128", "--heads", "2", "--dim", "16", "--rounds", "1", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert [row.get("failed") for row in rows] == [None] * 6


@pytest.mark.slow
def test_generation_is_measured_beside_sdpa(tmp_path: Path):
    small = ["--sizes", "96", "--prefill", "64", "--heads", "4", "2", "16", "--layers", "2", "--rounds", "1"]
    generation.main([*small, "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert not [row for row in rows if "failed" in row]
    of_both = {(system, phase) for system in ("ring of 1", "sdpa") for phase in ("error", "token", "attention", "host", "prefill")}
    assert {(row["system"], row["phase"]) for row in rows} == of_both | {("ring of 1", "step"), ("ring of 1", "step, host")}
    assert all(row["error"] < 0.01 for row in rows if row["phase"] == "error")
