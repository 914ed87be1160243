"""Every entry of a batch that a family of transformers takes has a meaning here, or is refused by name."""

import ast
from pathlib import Path

import pytest
import tiny_transformers as tiny
import torch
import transformers

from ring_attn.integrations.transformers import context_parallel
from ring_attn.integrations.transformers.batch.entries import (
    COUNT,
    DOCUMENTS,
    KNOWN,
    LABELS,
    PASSED,
    REFUSED,
    SEQUENCES,
    TOKEN_TYPES,
    UNKNOWN,
)
from ring_attn.integrations.transformers.model.plan import _HEADS, _OTHER_HEADS
from torch_bridge.call import call_cache, programs

FILES = sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))
FROM_5 = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="the table is that of newer versions")


def parameters(file: Path) -> dict[str, set[str]]:
    """What the forwards of a family's models with a head take, by the model; read from the source, which loads nothing."""
    found = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and any(head in node.name for head in _HEADS):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "forward":
                    found[node.name] = {x.arg for x in (*method.args.args[1:], *method.args.kwonlyargs)}
    return found


TAKEN = {name: taken for file in FILES for name, taken in parameters(file).items()}


@FROM_5
def test_every_family_takes_entries_that_are_known_or_known_not_to_be():
    assert len(TAKEN) > 300
    new = {name: sorted(taken - KNOWN - UNKNOWN) for name, taken in TAKEN.items() if not taken <= KNOWN | UNKNOWN}
    assert not new, (
        "read what these forwards do with these entries, and put each into ring_attn/integrations/transformers/batch/entries.py"
    )
    assert set().union(*TAKEN.values()) >= UNKNOWN  # what no family takes any more goes


def test_an_entry_has_one_meaning():
    meanings = [SEQUENCES, DOCUMENTS, LABELS, COUNT, TOKEN_TYPES, PASSED, REFUSED, UNKNOWN]
    assert sum(map(len, meanings)) == len(KNOWN | UNKNOWN)


@pytest.fixture(scope="module")
def parallel():
    cp = context_parallel(tiny.CAUSAL["llama"](), "local")
    yield cp
    cp.remove()


@pytest.mark.parametrize("name", sorted({*REFUSED, *UNKNOWN}))
def test_what_cannot_be_cut_is_refused_by_name(parallel, name):
    kind, words = (
        (NotImplementedError, f"{name} cannot be sharded: ") if name in REFUSED else (ValueError, f"holds {name!r}, and how")
    )
    with pytest.raises(kind, match=words):
        parallel.shard({**tiny.batch(), name: torch.ones(2, tiny.LENGTH)})


def test_heads_of_one_token_are_no_heads_of_each():
    assert not set(_HEADS) & set(_OTHER_HEADS)


def test_token_types_are_whole_where_masks_read_them():
    for make, whole in ((tiny.gpt2, False), (tiny.bert, False), (tiny.gemma3_with_images, True), (tiny.paligemma, True)):
        assert context_parallel(make(), "local").plan.masks_read_token_types == whole


def test_what_is_context_parallel_can_be_printed(monkeypatch):
    monkeypatch.setattr(programs, "_PROGRAMS", {})  # another test's are on this ring, too
    monkeypatch.setattr(call_cache, "_CALLS", {})
    model = tiny.CAUSAL["llama"]()
    cp = context_parallel(model, "local", layout="zigzag")
    first, *lines = str(cp).splitlines()
    assert first == f"ContextParallel of {type(model).__name__}"
    said = dict(line.split(maxsplit=1) for line in lines)
    assert said.pop("strategy").startswith("auto; ")
    layers = str(model.config.num_hidden_layers)
    assert said.pop("kernel") == "chosen at the first call"
    assert said == {"ring": "rank 0 of 1", "layout": "zigzag", "layers": layers, "checkpoint": "attention"}
    cp(**tiny.batch())
    taken = "the ring strategy with the xla kernel, in the last program on this ring (torch.float32)"
    assert f"kernel      {taken}" in str(cp).splitlines()
    cp.remove()
    assert str(cp).startswith(f"{first} (removed)\n")
