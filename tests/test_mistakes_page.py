"""docs/mistakes.md is true: each row has a test that is there, and what it quotes of an error is in the library's source."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
LIBRARY = ("ring_attn", "torch_bridge", "jax_core")
PAGE = (ROOT / "docs" / "mistakes.md").read_text(encoding="utf-8")
HOLE = "…"  # what an f-string puts there, in the page and in the source
COLUMNS = {
    "mistakes": ["the mistake", "what is said", "when", "test"],
    "faults": ["what happened", "here", "test"],
    "right": ["the loop", "test"],
}
FEWEST = 60
KINDS = r"[A-Z]\w*(?:Error|Warning|Failure)|verify|verdict"  # whose words they are


class Row(NamedTuple):
    section: str
    cells: tuple[str, ...]


def rows(columns: list[str]) -> Iterator[Row]:
    """Of all tables of the page that have these columns."""
    section, inside = "", False
    for line in PAGE.splitlines():
        if line.startswith("#"):
            section = line.strip("# ")
        cells = tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1])
        inside = list(cells) == columns or (inside and bool(cells))
        if inside and list(cells) != columns and not set(line) <= set("|- "):
            yield Row(section, cells)


MISTAKES, FAULTS, RIGHT = (list(rows(columns)) for columns in COLUMNS.values())


# ---------------------------------------------------------------------------------------------------------- the source


def of_node(node: ast.expr) -> str | None:
    """The text of a string, with holes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(HOLE if isinstance(part, ast.FormattedValue) else of_node(part) or "" for part in node.values)
    return None


def normal(text: str) -> str:
    """With one hole where several meet, or where ``str.format`` puts something, and one space."""
    return re.sub(r"\s+", " ", re.sub(rf"(?:{{\w*}}|{HOLE})+", HOLE, text))


def without_docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return (node for node in ast.walk(tree) if id(node) not in docstrings)


@cache
def said_by_the_library() -> str:
    """All that its source has in strings that are no docstrings, one a line."""
    said = []
    for folder in LIBRARY:
        for file in sorted((ROOT / folder).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            said += [text for node in without_docstrings(tree) if isinstance(node, ast.expr) and (text := of_node(node))]
    return "\n".join(map(normal, said))


# ----------------------------------------------------------------------------------------------------------- the tests


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def defined(file: Path) -> frozenset[str]:
    return frozenset(node.name for node in ast.walk(parsed(file)) if isinstance(node, ast.FunctionDef | ast.ClassDef))


@cache
def strings(file: Path) -> frozenset[str]:
    """Those of a file and of what it imports of the repository, whole and word by word: parameters of tests are called by them."""
    imported = [
        node.module for node in ast.walk(parsed(file)) if isinstance(node, ast.ImportFrom) and node.module and not node.level
    ]
    places = [base / f"{name.replace('.', '/')}.py" for name in imported for base in (ROOT, TESTS / "support", file.parent)]
    found = set()
    for each in (file, *(place for place in places if place.is_file())):
        texts = {node.value for node in ast.walk(parsed(each)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        found |= texts | {word for text in texts for word in text.split()}
    return frozenset(found)


@cache
def is_started(worker: str) -> bool:
    """Whether a test starts it, by its file's name, or by a parameter to which ``_worker.py`` is added."""
    names = f"{worker}.py", worker.removesuffix("_worker")
    for file in TESTS.rglob("test_*.py"):
        source = file.read_text(encoding="utf-8")
        if f'"{names[0]}"' in source or ("}_worker.py" in source and f'"{names[1]}"' in source):
            return True
    return False


def problem(reference: str) -> str | None:
    """What is wrong with ``file.py::name`` or ``file.py::name[id]``, where a worker's is in tests/support."""
    found = re.fullmatch(r"([\w/]+\.py)::(\w+)(?:\[(.+)\])?", reference)
    if found is None:
        return "is not file.py::name or file.py::name[id]"
    path, name, case = found.groups()
    worker = path.startswith("workers/")
    file = (TESTS / "support" if worker else TESTS) / path
    if not file.is_file():
        return f"there is no {file.relative_to(ROOT)}"
    if name not in defined(file):
        return f"{path} defines no {name}"
    if not worker and not (name.startswith("test_") and file.name.startswith("test_")):
        return f"{name} is no test"
    if worker and not is_started(file.stem):
        return f"no test starts {path}"
    if case is not None and case not in strings(file):
        return f"{path} has no case {case!r}"
    return None


# -------------------------------------------------------------------------------------------------------- what is tried


def test_the_page_has_enough():
    assert len(MISTAKES) >= FEWEST, len(MISTAKES)
    assert len({row.cells[0] for row in MISTAKES}) == len(MISTAKES), "a mistake stands twice"
    assert all(len(row.cells) == len(COLUMNS["mistakes"]) for row in MISTAKES) and len({row.section for row in MISTAKES}) >= 9
    assert FAULTS and all(len(row.cells) == len(COLUMNS["faults"]) for row in FAULTS)
    assert len(RIGHT) >= 14 and all(len(row.cells) == len(COLUMNS["right"]) for row in RIGHT)


def without_a_test(row: Row) -> list[str]:
    references = re.findall(r"`([^`]+)`", row.cells[-1])
    return [found for reference in references if (found := problem(reference))] if references else ["no test"]


def unsaid(row: Row) -> list[str]:
    """Of words in backticks. Those of torch, JAX or accelerate are in quotes, and of nothing it is told why."""
    said = row.cells[1]
    quoted = [text for text in re.findall(r"`([^`]+)`", said) if " " in text]
    wrong = [f"the library does not say {text!r}" for text in quoted if normal(text) not in said_by_the_library()]
    if not (quoted or re.search(r'"[^"]+ [^"]+"', said) or said.startswith("nothing")):
        wrong.append("neither words nor nothing")
    if quoted and not re.search(KINDS, said):
        wrong.append("words of what?")
    return wrong


@pytest.mark.parametrize(
    ("given", "wrong_with"), [([*MISTAKES, *FAULTS, *RIGHT], without_a_test), (MISTAKES, unsaid)], ids=["tests", "words"]
)
def test_every_row_is_true(given: list[Row], wrong_with: Callable[[Row], list[str]]):
    wrong = {row.cells[0]: found for row in given if (found := wrong_with(row))}
    assert not wrong, "\n".join(f"{mistake}: {'; '.join(found)}" for mistake, found in wrong.items())


def test_what_it_looks_for_is_found():
    """It can fail."""
    real = "ring_attn/test_verify.py::test_steps_and_models"
    assert problem(real) is None
    for wrong in ("test_nothing.py::test_a", "test_fits.py::test_nothing", "ring_attn/test_verify.py", "workers/healthy.py::main"):
        assert problem(wrong)
    assert problem("workers/step_verify_worker.py::Loop") is None
    assert problem("workers/decoder.py::Decoder") == "no test starts workers/decoder.py"
    assert problem("ring_attn/test_verify.py::command") == "command is no test"
    assert problem("ring_attn/test_documents.py::test_all_understand_the_same[a gap]") is None
    assert problem("ring_attn/test_documents.py::test_all_understand_the_same[a hole]")
    assert without_a_test(Row("", ("a mistake", "")))
    assert unsaid(Row("", ("a mistake", "ValueError: `the ranks of this ring have been sharded`")))
    assert unsaid(Row("", ("a mistake", "an error"))) and unsaid(Row("", ("a mistake", "`holds 3 ranks`")))
    assert not unsaid(Row("", ("a mistake", "nothing: nobody can know")))
    assert "the ranks of this ring have sharded different batches: each must" in said_by_the_library()
    assert "… and … say that documents begin at different tokens" in said_by_the_library()
    assert "Remember the checksums of a whole batch" not in said_by_the_library()  # a docstring
