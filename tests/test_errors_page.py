"""docs/errors.md has every error and warning of the library: its lists are what tools/error_catalogue.py reads in the source."""

import re
from pathlib import Path

from tools import error_catalogue as catalogue
from tools.error_cures import CURES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def test_every_message_of_the_source_is_there():
    assert catalogue.written(PAGE) == PAGE, "python -m tools.error_catalogue writes the lists anew"
    assert sum(len(listed.splitlines()) for listed in catalogue.lists().values()) > 400


# A message that says what must hold, or what to do.
SAYS = re.compile(
    r"\b(must|needs?|needed|give|pass|instead)\b|(^|[;:,.] )(or |and )?(call|cast|change|compute|convert|decode|detach|install|"
    r"leave|make|materialise|move|name|number|pad|renumber|reshape|run|say|see|set|start|sum|take|use|pip|ring_attn\.|warnings\.)",
    re.IGNORECASE,
)


def test_every_entry_says_what_to_do():
    """By itself or after it; "in a message" are parts of others."""
    entries = re.findall(r"^- (\w[\w ]+): `(.+?)`(\.? ?.*)$", "\n".join(catalogue.lists().values()), re.MULTILINE)
    silent = [text for kind, text, cure in entries if not (kind == "in a message" or cure or SAYS.search(text))]
    assert len(entries) > 400 and not silent, f"tools/error_cures.py must say what to do about {silent}"
    assert not set(CURES) - {text for _, text, _ in entries}, "no such message"


def test_what_most_people_meet_is_said_by_the_library():
    said = " ".join(message.text for message in catalogue.messages())
    met = PAGE.split("## What most people meet")[1].split("## When a process fails")[0]
    words = [text for bold in re.findall(r"^\*\*.*$", met, re.MULTILINE) for text in re.findall(r"\*\*`([^`]+)`", bold)]
    assert len(words) > 7
    for text in words:
        parts = [part.strip() for part in text.replace("zigzag", "…").split("…") if len(part.split()) > 1]
        assert all(part.strip("; ") in said for part in parts), text


def test_a_new_message_would_be_missed(tmp_path, monkeypatch):
    """It can fail."""
    (tmp_path / "ring_attn").mkdir()
    (tmp_path / "ring_attn/new.py").write_text('raise ValueError(f"the {thing} must be {1}, got nothing at all")\n')
    monkeypatch.setattr(catalogue, "ROOT", tmp_path)
    assert [message.text for message in catalogue.messages()] == ["the … must be …, got nothing at all"]
    assert catalogue.written(PAGE) != PAGE
