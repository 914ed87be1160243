"""What docs/long-context.md says of lengths that nothing here has run: ``ring_attn.memory.plan`` as a table and a picture.

python -m benchmarks.training.long            # the table
python -m benchmarks.training.long --write    # the table and the rows of one plan in the page, and the picture beside it
"""

import argparse
from collections.abc import Iterator
from html import escape

from benchmarks.harness.report import ROOT
from ring_attn.memory import Plan, plan
from ring_attn.memory.formula import GIB
from ring_attn.memory.planning import Row, room
from tools import marks

PAGE, PICTURE = ROOT / "docs/long-context.md", ROOT / "docs/pictures/levers.svg"
MODELS, MEMORIES, GPUS = ("Qwen3-8B", "Qwen3-32B"), (80, 141), 8
TOKENS = {"128k": 2**17, "512k": 2**19, "1M": 2**20, "4M": 2**22}
PARTS = {"states": "#4477aa", "held": "#ee6677", "work": "#ccbb44", "ring": "#228833", "reserved": "#999999"}
LEFT, BAR, GAP, SCALE = 190, 20, 12, 2.6  # pixels; of a GiB


def table() -> str:
    lines = [
        "| tokens | " + " | ".join(f"{model}, {memory} GB" for model in MODELS for memory in MEMORIES) + " |",
        "|---" * 5 + "|",
    ]
    for name, tokens in TOKENS.items():
        found = (plan(model, tokens, GPUS, memory) for model in MODELS for memory in MEMORIES)
        lines.append(f"| {name} | " + " | ".join(map(_cell, found)) + " |")
    return "\n".join(lines)


def _cell(found: Plan) -> str:
    if found.levers is None or found.peak is None:
        return "-"
    names = ", ".join(f"`{name}`" if name != "checkpoint" else '`"offload"`' for name in found.levers) or "none"
    host = f", host {found.peak.host / GIB:.0f}" if found.peak.host else ""
    return f"{names}: {found.peak.device / GIB:.0f} GiB{host}"


def printed() -> str:
    return f"```text\n{plan('Qwen3-8B', 2**20, GPUS, 80)}\n```"


def picture(found: Plan) -> str:
    """A bar for each row of a plan, of what takes a GPU's memory, and a line where a GPU is full."""
    height = 34 + (BAR + GAP) * len(found.rows)
    full = LEFT + SCALE * room(found.memory) / GIB
    width = round(LEFT + SCALE * max(row.peak.device for row in found.rows) / GIB) + 40
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-family="sans-serif" '
            'font-size="13" fill="#333333">',
            '<rect width="100%" height="100%" fill="white"/>',
            *(_legend(place, name) for place, name in enumerate(PARTS)),
            *(part for place, row in enumerate(found.rows) for part in _bar(30 + place * (BAR + GAP), row)),
            f'<line x1="{full:.0f}" y1="24" x2="{full:.0f}" y2="{height}" stroke="#333333" stroke-dasharray="4 3"/>',
            "</svg>",
            "",
        ]
    )


def _legend(place: int, name: str) -> str:
    x = LEFT + 90 * place
    return f'<rect x="{x}" y="6" width="11" height="11" fill="{PARTS[name]}"/><text x="{x + 16}" y="16">{name}</text>'


def _bar(y: int, row: Row) -> Iterator[str]:
    x = float(LEFT)
    yield f'<text x="8" y="{y + 15}">{escape(row.name)}</text>'
    for name, colour in PARTS.items():
        wide = SCALE * getattr(row.peak, name) / GIB
        yield f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}" fill="{colour}"/>'
        x += wide
    yield f'<text x="{x + 6:.1f}" y="{y + 15}">{row.peak.device / GIB:.0f}</text>'


def written(page: str) -> str:
    return marks.written(page, {"lengths": table(), "a plan": printed()}, "benchmarks/training/long.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if not parser.parse_args().write:
        print(table())
        return
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(picture(plan("Qwen3-8B", 2**20, GPUS, 80)), encoding="utf-8")


if __name__ == "__main__":
    main()
