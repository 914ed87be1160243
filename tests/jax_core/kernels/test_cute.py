"""platform="cute": what it refuses and why, which rows and blocks a call covers, the files of compiled programs, and the ring over
flash-attn-4's programs, which a stand-in in plain JAX replaces here (cute_stand_in.py)."""

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import cute_stand_in
import jax
import jax.numpy as jnp
import numpy as np
import packed_rows
import pytest
from attention_cases import (
    CAUSAL,
    MASK,
    PACKED,
    SHUFFLED,
    SINKS,
    Case,
    over,
    quick_compiles,
    ring_mesh,
)
from jax.sharding import PartitionSpec as P
from oracle_assertions import assert_ring_is_like_the_oracle
from pairs import ShardPair, check

import jax_core
from jax_core.config import BwdParams, FwdParams
from jax_core.kernels import cute
from jax_core.kernels.blocks import index
from jax_core.kernels.contract import Extras, Pair, Problem, Scores
from jax_core.kernels.cute import accumulators, calls, kernel, rectangles
from jax_core.kernels.cute.block_sparse import make_block_sparse
from jax_core.kernels.cute.tiles import TILES
from jax_core.masks.layout import runs
from jax_core.masks.plan import Plan
from jax_core.masks.static import make_mask, visible
from jax_core.request import hardware
from jax_core.request.dispatch import KERNELS
from jax_core.request.features import refusal
from jax_core.request.preferences import ON_GPUS

FULL, WINDOW, CHUNKS = Scores(make_mask(), 0.2), Scores(make_mask(True, 37), 0.2), Scores(make_mask(True, None, 50), 0.2)
PROBLEM = Problem(Scores(make_mask(True), 0.125), "bfloat16", 2, 256, 256, 8, 2, 128, 128, backend="gpu", capability=90)


def on_gpu(monkeypatch) -> None:
    monkeypatch.setattr(calls, "missing", lambda *_: None)
    monkeypatch.setattr(hardware, "capability", lambda backend: 90)


@pytest.fixture
def stand_in(monkeypatch) -> Iterator[None]:
    """In any dtype: in float32 nothing is rounded, and what surrounds the programs is all that can be wrong."""
    monkeypatch.setattr(kernel, "call", cute_stand_in.call)
    monkeypatch.setattr(accumulators, "call", cute_stand_in.call)
    on_gpu(monkeypatch)
    monkeypatch.setattr(cute, "CAPABILITIES", cute.CAPABILITIES | {"float32"})
    with quick_compiles():
        yield


# ------------------------------------------------------------------------------------------------------ one pair of shards


def _pair(queries: int, keys: int | None = None, **settings: Any) -> ShardPair:
    given: dict[str, Any] = {"dim": 72} | settings
    return ShardPair(queries, queries if keys is None else keys, **given)


def _in_ring(layout: str, rank: int, source: int, **settings: Any) -> ShardPair:
    return _pair(128, layout=layout, rank=rank, source=source, size=3, **settings)


PIECES = Plan(128, ((0, 3, 4), (1, 2, 5)))
PAIRS = {
    "alone, odd": _pair(77, batch=2),
    "alone, fewer keys": _pair(77, 31, batch=2),
    "alone, more keys": _pair(31, 177),
    "alone, all visible, wide": _pair(90, 70, dim=128, scores=FULL),
    "alone, window of two sides": _pair(99, kv_heads=2, scores=Scores(make_mask(False, (13, 20)), 0.2)),
    "alone, window over more keys": _pair(50, 177, scores=WINDOW),
    "alone, chunks": _pair(199, scores=CHUNKS),
    "alone, soft cap": _pair(77, scores=Scores(make_mask(True), 0.3, softcap=1.5)),
    "all visible in a ring": _in_ring("contiguous", 0, 2, batch=2, scores=FULL, carry=True),
    "contiguous, odd window": _pair(205, rank=1, size=2, scores=WINDOW, carry=True),
    "contiguous, causal over other lengths": _pair(140, 90, rank=1, source=1, size=2, batch=2),
    "contiguous, odd": _pair(77, rank=1, size=2, carry=True),
    "zigzag, window": _pair(256, layout="zigzag", rank=1, size=2, scores=WINDOW, carry=True),
    "zigzag, other lengths": _pair(512, 256, layout="zigzag", rank=1, size=2, carry=True),
    "pieces of a plan": _pair(384, layout=PIECES, rank=1, size=2, batch=2, carry=True),
    "own pieces of a plan": _pair(384, layout=PIECES, size=2, kv_heads=2, scores=WINDOW),
    "bfloat16": _in_ring("zigzag", 1, 0, dtype="bfloat16", batch=2),
    "deterministic": _in_ring("zigzag", 1, 0, batch=2, deterministic=True),
    "deterministic, own heads": _in_ring("zigzag", 1, 1, batch=2, kv_heads=2, deterministic=True),
}
PAIRS |= {
    f"{layout}, {where}, batch {batch}, {kv_heads} of 2 heads": _in_ring(
        layout, 1, source, batch=batch, kv_heads=kv_heads, value_dim=72 if kv_heads == 1 else 40, carry=where != "own"
    )
    for layout, batch, kv_heads in (
        ("contiguous", 1, 2),
        ("contiguous", 2, 1),
        ("zigzag", 1, 1),
        ("zigzag", 2, 1),
        ("zigzag", 2, 2),
    )
    for source, where in ((0, "earlier"), (1, "own"), (2, "later"))
}


QUICK = (
    "alone, odd",
    "alone, window of two sides",
    "contiguous, earlier, batch 2, 1 of 2 heads",
    "contiguous, later, batch 1, 2 of 2 heads",
    "zigzag, earlier, batch 2, 2 of 2 heads",
    "zigzag, own, batch 2, 1 of 2 heads",
    "zigzag, later, batch 2, 1 of 2 heads",
    "zigzag, window",
    "pieces of a plan",
)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in PAIRS])
def test_a_pair_of_shards(name: str):
    check(cute, PAIRS[name], cute.default_params(PROBLEM))


# ----------------------------------------------------------------------------------------------------------------- a ring


def _case(name: str, **settings: Any) -> Case:
    given: dict[str, Any] = {"queries": 128, "heads": 2, "kv_heads": 1, "dim": 72, "batch": 1, "options": CAUSAL} | settings
    given["settings"] = {"platform": "cute"} | given.get("settings", {})
    return Case(name, block=None, **given)


SAME_BITS = {"deterministic": True}
CASES = (
    _case("zigzag of two", ring=2, layout="zigzag", batch=2, settings=SAME_BITS),
    _case("alone with segments", mode="alone", queries=77, batch=2, arrays=PACKED | SINKS),
    _case("zigzag of four with sinks", slow=True, ring=4, layout="zigzag", kv_heads=2, arrays=SINKS),
    _case("contiguous of four", slow=True, ring=4, queries=77, kv_heads=2, value_dim=40, settings=SAME_BITS),
    _case("contiguous with segments", slow=True, ring=2, queries=150, batch=2, arrays=PACKED),
    _case("all visible, other lengths", slow=True, ring=4, layout="striped", queries=30, keys=50, batch=2, options={}),
    _case("mask and window", slow=True, ring=2, queries=60, batch=2, options=CAUSAL | {"sliding_window": 40}, arrays=MASK),
    _case("positions", slow=True, ring=2, queries=60, batch=2, arrays=SHUFFLED),
    *(_case(f"ring of {n}", slow=True, ring=n, queries=16, dim=8, options=CAUSAL) for n in (3, 8)),
    _case("four hosts of two", slow=True, ring=8, axes=(4, 2), queries=16, dim=8, settings={"strategy": "hierarchical"}),
)


@pytest.mark.usefixtures("stand_in")
@over(CASES)
def test_ring_over_a_stand_in(case: Case):
    assert_ring_is_like_the_oracle(case)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.wide
@pytest.mark.parametrize("name", packed_rows.CASES)
def test_documents_as_rectangles(monkeypatch, name: str):
    """Nothing is judged pair by pair, and all is what the segment ids say by another kernel."""
    packed = packed_rows.CASES[name]
    monkeypatch.setattr(kernel, "make_block_sparse", None)
    names = "out", "lse", "dq", "dk", "dv"
    for what, found, wanted in zip(names, packed_rows.computed(packed, "cute"), packed_rows.computed(packed, "xla"), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4, err_msg=what)


TABLES = (
    "alone, padded, own heads, two rows",
    "zigzag of two, one row, own heads",
    "contiguous of four",
    "placed on two, none cut",
    "placed on two, a part sent, own heads",
    "placed on four, a part sent",
)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_documents_is_their_segment_ids(name: str):
    """To a kernel that knows no documents."""
    packed = packed_rows.CASES[name]
    for by_table, by_ids in zip(*(packed_rows.computed(packed, "xla", by_table=told) for told in (True, False)), strict=True):
        if packed.placed:  # gradients are added in another order
            np.testing.assert_allclose(by_table, by_ids, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(by_table, by_ids)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("platform", ["xla", "cute"])
@pytest.mark.parametrize("strategy", ["ulysses", "ulysses_ring", "ring_ulysses", "all_gather"])
def test_placed_documents_by_other_strategies(strategy: str, platform: str):
    """Whose inner shards are several ranks', which the table does not know."""
    two = strategy == "ulysses"
    packed = packed_rows.CASES["placed on two, a part sent, own heads" if two else "placed on four, a part sent"]._replace(
        kv_heads=2
    )
    wanted = packed_rows.computed(packed, "xla")
    for found, by_ring in zip(packed_rows.computed(packed, platform, by_table=True, strategy=strategy), wanted, strict=True):
        np.testing.assert_allclose(found, by_ring, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "part"), [("none cut", 0), ("a part sent, own heads", 1 / 2), ("one cut", 1)])
def test_of_placed_documents_only_what_others_see_is_sent(name: str, part: float):
    """Of the words that a program sends without the placement."""
    packed = packed_rows.CASES[f"placed on two, {name}"]
    told, by_ids = (sent(packed, by_table) for by_table in (True, False))
    assert told == part * by_ids > -1


def sent(packed: packed_rows.Packed, by_table: bool) -> int:
    function, arrays = packed_rows.call_of(packed, "xla", by_table=by_table)
    sizes = re.findall(r"stablehlo.collective_permute.*-> tensor<(\d+)xui", function.lower(*arrays).as_text())
    return sum(map(int, sizes))


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("wanted", [False, True])
def test_deterministic_reaches_every_backward(monkeypatch, wanted: bool):
    seen = []

    def call(name, settings, *operands):
        seen.append((name, getattr(settings, "deterministic", None)))
        return cute_stand_in.call(name, settings, *operands)

    monkeypatch.setattr(kernel, "call", call)
    q, k = (jax.random.normal(jax.random.key(0), (1, 2 * 64, heads, 72)) for heads in (2, 1))
    rows = P(None, "ring")
    attend = partial(jax_core.ring_attention, axis_name="ring", causal=True, platform="cute", deterministic=wanted)
    on_ring = jax.shard_map(lambda q, k: attend(q, k, k), mesh=ring_mesh(2), in_specs=(rows, rows), out_specs=rows)
    jax.make_jaxpr(jax.grad(lambda q: on_ring(q, k).sum()))(q)
    assert [settings for name, settings in seen if name == "backward"] == [wanted] * 2
    assert not any(settings for name, settings in seen if name == "forward")


def test_deterministic_is_a_feature_of_every_kernel_or_refused():
    words = {name: refusal(frozenset({"deterministic"}), module.CAPABILITIES) for name, module in KERNELS.items()}
    assert words.pop("cuda") == "it does not handle deterministic=True"
    assert set(words.values()) == {None}


# ------------------------------------------------------------------------------------------------------- what it refuses


def _changed(**changes: Any) -> Problem:
    return replace(PROBLEM, **changes)


def _scored(**changes: Any) -> Problem:
    return _changed(scores=replace(PROBLEM.scores, **changes))


def _asking(*features: str, **changes: Any) -> Problem:
    return _changed(features=frozenset(features), **changes)


RING = {"size": 4, "layout": "zigzag"}
IDS = "q_segment_ids", "kv_segment_ids"
ANY_POSITION = Scores(replace(make_mask(True, None, 64), any_position=True), 0.125)
TAKEN = {
    "causal": PROBLEM,
    "odd lengths": _changed(q_length=77, k_length=33),
    "zigzag": _changed(**RING),
    "contiguous, odd, one entry": _changed(batch=1, q_length=77, k_length=77, size=4),
    "a plan": _changed(size=2, layout=PIECES, q_length=384, k_length=384),
    "segments in zigzag": _asking(*IDS, **RING),
    "deterministic": _asking("deterministic", **RING),
    "wide values, own heads": _changed(kv_heads=8, value_dim=256),
}
REFUSED = {
    "dim": (_changed(dim=100, value_dim=100), "multiples of 8 from 8 to 256, got 100 and 100"),
    "too wide": (_changed(dim=264, value_dim=264), "got 264 and 264"),
    "value dim": (_changed(value_dim=64), "a value dim equal to the head dim, got 128 and 64"),
    "logits dtype": (_scored(logits_dtype="bfloat16"), "logits in float32, got logits_dtype bfloat16"),
    "scale": (_scored(scale=-0.5), "positive softmax_scale, got -0.5"),
    "striped": (_changed(layout="striped", size=4), 'needs layout="zigzag" or "contiguous", got "striped"'),
    "striped lists": (_asking(*IDS, layout="striped", size=4), "every block is partly visible"),
    "chunks by ids": (_changed(scores=ANY_POSITION), "chunk_size without position ids only"),
    "deterministic lists": (_asking("deterministic", *IDS), "over lists of blocks is not deterministic"),
    "deterministic over other lengths": (_asking("deterministic", k_length=300), "over lists of blocks is not deterministic"),
    "odd zigzag": (_changed(**RING | {"q_length": 200, "k_length": 200}), "a multiple of 128 positions here, got 200"),
    "odd pieces": (_changed(size=2, layout=Plan(64, PIECES.table), q_length=192, k_length=192), "pieces of a multiple of 128"),
    "odd lists": (_asking(*IDS, **RING, k_length=384), "a multiple of 256 positions here, got 256 and 384"),
    "odd batch": (_changed(size=4, q_length=200, k_length=200), "with several batch entries"),
}


def _reason(problem: Problem) -> str | None:
    return cute.unsupported(problem, FwdParams(), BwdParams())


@pytest.mark.parametrize("name", TAKEN)
def test_takes(monkeypatch, name: str):
    on_gpu(monkeypatch)
    assert _reason(TAKEN[name]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_and_says_why(monkeypatch, name: str):
    on_gpu(monkeypatch)
    problem, words = REFUSED[name]
    assert words in (_reason(problem) or "")


def test_refuses_tiles_and_other_machines():
    assert "tiles are chosen by head dim" in (cute.unsupported(PROBLEM, FwdParams(q_blocksize=128), BwdParams()) or "")
    assert 'runs on "cpu"' in (_reason(replace(PROBLEM, backend="cpu", capability=0)) or "")
    assert "needs an NVIDIA GPU, and this process has none" in (_reason(replace(PROBLEM, capability=0)) or "")


def test_a_generation_has_tiles_a_class_and_a_place_in_the_order(monkeypatch):
    """What docs/contributing/a-kernel.md lists; the class is read from the source, since nothing here can import it."""
    (classes,) = (
        node.value
        for node in ast.parse(Path(calls.__file__).with_name("programs.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CLASSES"
    )
    assert isinstance(classes, ast.Dict)
    assert {ast.literal_eval(key) for key in classes.keys if key} == set(TILES)
    tried = {gpus.capabilities for gpus in ON_GPUS if any("cute" in row.order for row in gpus.kernels)}
    assert frozenset().union(*tried) == set(TILES)
    monkeypatch.setattr(calls, "changed", lambda: None)
    assert calls.missing("gpu", 80) == "the cute kernel is for compute capability 9.0, this GPU has 8.0"


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """The pinned packages, by name and version; a test may change them."""
    versions = dict(calls.PINNED)

    def version(package: str) -> str:
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(calls, "_library", lambda: tmp_path)
    calls.changed.cache_clear()
    calls._code.cache_clear()
    yield versions
    calls.changed.cache_clear()
    calls._code.cache_clear()


def test_other_versions(installed, monkeypatch):
    assert calls.changed() is None
    calls.changed.cache_clear()
    monkeypatch.setattr(calls, "_library", lambda: None)
    assert "finds no libcute_dsl_runtime.so" in (calls.changed() or "")
    calls.changed.cache_clear()
    installed["quack-kernels"] = "0.0.1"
    assert "written for quack-kernels==0.6.5, this is 0.0.1" in (calls.changed() or "")
    calls.changed.cache_clear()
    del installed["flash-attn-4"]
    assert "needs flash-attn-4==" in (calls.changed() or "")


# -------------------------------------------------------------------------------------------- which rows and blocks


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_rectangles(layout: str, batch: int):
    length, size = 6, 3
    for rank, source in itertools.permutations(range(size), 2):
        q_runs, k_runs = (runs(layout, jnp.int32(x), size, length) for x in (rank, source))
        seen = np.asarray(index(q_runs)[:, None] >= index(k_runs))
        shard = jnp.zeros((batch, length, 1, 8))
        pair = Pair(shard, shard, shard, q_runs, k_runs, Scores(make_mask(True), 1.0))
        area = rectangles.rectangle(pair)
        i, j = np.arange(length)[:, None], np.arange(length)
        np.testing.assert_array_equal(seen, (i >= area.q_first) & (j < area.k_end))
        q_ends, q_used, k_ends, k_used = rectangles.where_of(area, pair)
        assert q_ends is not None and k_ends is not None
        covered = np.zeros((batch, length, batch, length), bool)
        for b in range(batch):
            rows = int(q_ends[b]), int(q_ends[b + 1] if q_used is None else q_ends[b] + q_used[b])
            keys = int(k_ends[b]), int(k_ends[b + 1] if k_used is None else k_ends[b] + k_used[b])
            covered.reshape(batch * length, -1)[slice(*rows), slice(*keys)] = True
        wanted = np.eye(batch, dtype=bool)[:, None, :, None] & seen[None, :, None]
        np.testing.assert_array_equal(covered, wanted)


def _table(counts, indices) -> np.ndarray:
    table = np.zeros(indices.shape, bool)
    for row in np.ndindex(counts.shape):
        chosen = np.asarray(indices)[row][: int(counts[row])]
        assert (np.diff(chosen) > 0).all()
        table[row][chosen] = True
    return table


@pytest.mark.parametrize("of_queries", [False, True], ids=["of keys", "of queries"])
@pytest.mark.parametrize(
    "mask", [make_mask(True, 300), make_mask(True, None, 400), make_mask()], ids=["window", "chunks", "segments"]
)
def test_lists(mask, of_queries: bool):
    """Every block with a visible pair is in exactly one list, and those of the second have no hidden pair."""
    q_runs, k_runs = runs("contiguous", 0, 1, 500), runs("contiguous", 0, 1, 420)
    ids = jnp.searchsorted(jnp.array([210, 460]), jnp.arange(500) + jnp.array([[0], [40]]), side="right")
    ids = jnp.where(ids == 2, -1, ids).astype(jnp.int32)
    extras = Extras() if mask != make_mask() else Extras(q_segment_ids=ids, kv_segment_ids=ids[:, :420])
    shards = jnp.zeros((2, 500, 1, 8)), jnp.zeros((2, 420, 1, 8)), jnp.zeros((2, 420, 1, 8))
    lists = make_block_sparse(Pair(*shards, q_runs, k_runs, Scores(mask, 1.0), extras), 96, of_queries)
    seen = np.asarray(visible(mask, jnp.arange(500)[:, None], jnp.arange(420)))[None]
    if extras.q_segment_ids is not None:
        seen = seen & np.asarray((ids[:, :, None] == ids[:, None, :420]) & (ids[:, :, None] >= 0))
    some, every = (
        np.array([[[op(rows[i : i + 128, j : j + 96]) for j in range(0, 420, 96)] for i in range(0, 500, 128)] for rows in seen])
        for op in (np.any, np.all)
    )
    counts, indices, whole_counts, whole_indices = (x.array for x in lists.blocks)
    partly, whole = _table(counts, indices), _table(whole_counts, whole_indices)
    if of_queries:
        partly, whole = partly.swapaxes(1, 2), whole.swapaxes(1, 2)
    assert not (partly & whole).any()
    assert not (some & ~(partly | whole)).any()
    assert not (whole & ~every).any()
    assert whole.any() and (~(partly | whole)).any()


# ------------------------------------------------------------------------------------------------- compiled programs' files

TYPES = ((calls._Type("bfloat16", (1, 2)),), ())


@pytest.fixture
def compiled(installed, monkeypatch):
    """The names of the programs that were compiled."""
    names: list[str] = []
    monkeypatch.setattr(calls, "_compile", lambda name, *_: names.append(name) or f"object of {name}".encode())
    return names


def _code(folder, name: str = "forward", settings: Any = None, types: Any = TYPES, architecture: str = "sm_90a") -> bytes:
    """As a new process has it."""
    calls._code.cache_clear()
    return calls._code(name, settings, types, 0, architecture, folder)


def test_compiled_once_a_machine(compiled, tmp_path):
    assert _code(tmp_path) == _code(tmp_path) == b"object of forward"
    assert compiled == ["forward"]
    assert len(list(tmp_path.rglob("*"))) == 2  # a folder and a file: nothing is left over


def test_a_file_for_each_program(compiled, installed, monkeypatch, tmp_path):
    """Whatever a program depends on is in the name of its file."""
    _code(tmp_path)
    others: list[dict[str, Any]] = [{"name": "backward"}, {"settings": 1}, {"architecture": "sm_100a"}]
    others += [{"types": ((calls._Type("float16", (1, 2)),), ())}, {"types": ((), (calls._Type("bfloat16", (1, 2)),))}]
    for other in others:
        _code(tmp_path, **other)
    installed["flash-attn-4"] = "4.0.1"
    _code(tmp_path)
    monkeypatch.setattr(calls, "_sources", lambda: "another version of this library")
    _code(tmp_path)
    assert len(compiled) == len(list(tmp_path.rglob("*.o"))) == 3 + len(others)


@pytest.mark.parametrize("damage", [lambda x: x[:-1], lambda x: b"", lambda x: b"?" + x[1:], lambda x: x + b"more"])
def test_a_damaged_file_is_made_again(compiled, tmp_path, damage):
    _code(tmp_path)
    (file,) = tmp_path.rglob("*.o")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert _code(tmp_path) == b"object of forward"
    assert file.read_bytes() == whole and len(compiled) == 2


def test_without_files(compiled, tmp_path):
    """Caches are off, or their folder cannot be written."""
    (tmp_path / "file").touch()
    assert _code(None) == _code(tmp_path / "file") == _code(tmp_path / "file") == b"object of forward"
    assert len(compiled) == 3


@pytest.mark.parametrize("mapped", [False, True], ids=["one", "vmap"])
def test_lowers_for_a_gpu(compiled, monkeypatch, mapped: bool):
    """The real call with an object that is none, in a ring of two, as far as a machine without a GPU can go; under vmap it is
    called for one entry after another."""
    on_gpu(monkeypatch)
    monkeypatch.setattr(calls, "register", lambda: None)
    rows = P(None, None, "ring") if mapped else P(None, "ring")

    def attend(q, k, v):
        attention = partial(jax_core.ring_attention, axis_name="ring", causal=True, layout="zigzag", platform="cute")
        return (jax.vmap(attention) if mapped else attention)(q, k, v)

    on_ring = jax.shard_map(attend, mesh=ring_mesh(2), in_specs=(rows,) * 3, out_specs=rows)
    gradients = jax.grad(lambda *arrays: on_ring(*arrays).astype(jnp.float32).sum(), (0, 1, 2))
    query, key = (jax.ShapeDtypeStruct((3, 1, 1024, n, 64) if mapped else (1, 512, n, 64), jnp.bfloat16) for n in (4, 2))
    text = jax.jit(gradients).trace(query, key, key).lower(lowering_platforms=("cuda",)).as_text()
    assert {"forward", "backward", "convert"} == set(compiled)
    assert text.count(calls._TARGET) >= 4 and ("stablehlo.while" in text) == mapped
