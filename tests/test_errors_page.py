"""docs/errors.md has every error and warning of the library: its lists are what tools/error_catalogue.py reads in the source."""

import re
from pathlib import Path

from tools import error_catalogue as catalogue

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def test_every_message_of_the_source_is_there():
    assert catalogue.written(PAGE) == PAGE, "python -m tools.error_catalogue writes the lists anew"
    assert sum(len(listed.splitlines()) for listed in catalogue.lists().values()) > 400


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
