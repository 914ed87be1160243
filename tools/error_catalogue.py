"""The lists of messages in docs/errors.md: `python -m tools.error_catalogue` writes what the library's source raises and warns.

A message is read from the source: its constant parts, with … for what is put into it; the sentences that modules have as constants
are listed too, since functions put them into messages.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tools import marks
from tools.error_cures import CURES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
LIBRARY = ("ring_attn", "torch_bridge", "jax_core")
HOLE = "…"
# The page's lists, and the folders and files whose messages each has; the longest that fits counts.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "starting": (
        "torch_bridge/start",
        "torch_bridge/mesh",
        "torch_bridge/failures",
        "jax_core/caches",
        "jax_core/experimental",
        "jax_core/turns",
        "torch_bridge/backends",
        "jax_core/__init__",
    ),
    "meshes": (
        "torch_bridge/mesh/rings",
        "ring_attn/ring",
        "jax_core/api/mesh",
        "ring_attn/arguments/dtensor",
        "ring_attn/parallel",
    ),
    "arguments": (
        "ring_attn",
        "torch_bridge/attention",
        "torch_bridge/call",
        "jax_core/request",
        "jax_core/api",
        "jax_core/config",
        "jax_core/keywords",
    ),
    "masks": ("jax_core/masks", "ring_attn/module/masks", "ring_attn/torch_sdpa"),
    "documents": (
        "ring_attn/documents",
        "ring_attn/packed",
        "ring_attn/flash",
        "ring_attn/arguments/documents",
        "ring_attn/arguments/local_lengths",
    ),
    "states": ("jax_core/api/recurrence", "jax_core/recurrence", "ring_attn/recurrence", "torch_bridge/recurrence"),
    "sharding": ("ring_attn/sharding",),
    "training": ("ring_attn/training", "ring_attn/verification", "ring_attn/command", "torch_bridge/call/sanity_checks"),
    "transformers": ("ring_attn/integrations/transformers", "ring_attn/integrations/whole_batches"),
    "integrations": ("ring_attn/integrations", "ring_attn/module", "jax_core/integrations"),
    "generation": ("ring_attn/generation",),
    "peers": (
        *(f"torch_bridge/failures/{name}" for name in ("coordinator", "peers", "watchdog", "deadlock", "liveness")),
        "torch_bridge/call/error_propagation",
    ),
    "kernels": ("jax_core/kernels", "jax_core/strategies", "jax_core/testing"),
    "tuning": ("jax_core/tune",),
}
# Files whose messages are put together by functions of their own: all their sentences are taken.
TOGETHER = (
    *(f"torch_bridge/failures/{name}" for name in ("peers", "watchdog", "deadlock")),
    *(f"torch_bridge/call/{name}" for name in ("error_propagation", "sanity_checks")),
    *("ring_attn/training/shared_state", "ring_attn/verification/step", "ring_attn/verification/verdict"),
    "ring_attn/integrations/transformers/verify/verification",
)
WORDS = 5  # the fewest of a sentence
NO_MESSAGES = ("_MAIN", "CALL", "DESCRIPTION", "EXAMPLES")


class Message(NamedTuple):
    """``kind``: the error's name, or "warning"."""

    file: str
    kind: str
    text: str


def messages() -> Iterator[Message]:
    for folder in LIBRARY:
        for path in sorted((ROOT / folder).rglob("*.py")):
            tree, file = ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT).with_suffix(""))
            for kind, text in _texts(tree, file in TOGETHER):
                if re.search(r"\w{3,} \w{2,}", text):
                    yield Message(file, kind, " ".join(text.split()))


def _texts(tree: ast.Module, together: bool) -> Iterator[tuple[str, str]]:
    names = _constants(tree)
    said = [(kind, _text(node, names) or "") for kind, node in _said(tree)]
    yield from said
    whole = {text for _, text in said}
    sentences = [text for name, text in names.items() if name not in NO_MESSAGES]
    sentences += _sentences(tree) if together else []
    yield from (("in a message", text) for text in sentences if text not in whole and len(text.split()) >= WORDS)


def _said(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield ast.unparse(node.exc.func).rpartition(".")[2], node.exc.args[0]
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2] in ("warn", "warn_once"):
            yield "warning", node.args[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".ask") and isinstance(node.args[0], ast.Dict):
            yield from (("ValueError", key) for key in node.args[0].keys if key is not None)


def _sentences(tree: ast.Module) -> Iterator[str]:
    """Every text of a module that is no docstring, nor a part of another text."""
    nodes = list(ast.walk(tree))
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    inner |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (node for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in inner)
    yield from (text for node in texts if (text := _text(node, {})))


def _constants(tree: ast.Module) -> dict[str, str]:
    """The texts that a module has by a name."""
    texts: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (text := _text(node.value, texts)):
            texts[node.targets[0].id] = text
    return texts


def _text(node: ast.expr, names: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{\w*\}", HOLE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, names) or HOLE for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_text(node.left, names) or HOLE) + (_text(node.right, names) or HOLE)
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        return _text(node.func.value, names)
    return None


def section(file: str) -> str:
    fitting = [(len(place), name) for name, places in SECTIONS.items() for place in places if file.startswith(place)]
    assert fitting, f"no section of docs/errors.md has the messages of {file}"
    return max(fitting)[1]


def lists() -> dict[str, str]:
    """By the name that stands in the page's marks."""
    by_section: dict[str, dict[tuple[str, str], None]] = {name: {} for name in SECTIONS}
    for message in messages():
        by_section[section(message.file)][message.kind, re.sub(rf"{HOLE}[{HOLE} ]*{HOLE}", HOLE, message.text)] = None
    return {name: "\n".join(_line(*each) for each in sorted(of_it, key=_by_words)) for name, of_it in by_section.items()}


def _line(kind: str, text: str) -> str:
    return f"- {kind}: `{text}`" + (f". {CURES[text]}" if text in CURES else "")


def _by_words(message: tuple[str, str]) -> str:
    return message[1].replace(HOLE, "").strip().lower()


def written(page: str) -> str:
    return marks.written(page, lists(), "tools/error_catalogue.py")


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
