"""Draws the pictures of docs/strategies.md: `python docs/strategies/draw.py` writes them beside itself.

A row is a rank, a column is a moment. A coloured block is keys and values: its colour says which rank owns them, its height how
many of the heads they have. Arrows are what is sent.
"""

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")
ROW, COLUMN, BLOCK, LEFT, TOP = 62, 180, 20, 92, 58


class Block(NamedTuple):
    """Keys and values of rank ``owner``: those of ``heads``, a part of all from 0 to 1."""

    owner: int
    heads: tuple[float, float] = (0.0, 1.0)


class Moment(NamedTuple):
    """``held``: each rank's blocks. ``sends``: pairs of ranks, from this moment to the next; the text is written at the arrows."""

    title: str
    held: list[list[Block]]
    sends: Iterable[tuple[int, int]] = ()


def svg(ranks: list[str], moments: list[Moment]) -> str:
    width, height = LEFT + COLUMN * len(moments), TOP + ROW * len(ranks)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" font-family="sans-serif" '
        'font-size="13" fill="#333333">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto"><path d="M0,0 L6,3 L0,6 z" '
        'fill="#777777"/></marker></defs>',
        *(f'<text x="8" y="{_middle(rank) + 5}">{escape(name)}</text>' for rank, name in enumerate(ranks)),
    ]
    for number, moment in enumerate(moments):
        lines += _moment(number, moment)
    return "\n".join([*lines, "</svg>", ""])


def _moment(number: int, moment: Moment) -> Iterator[str]:
    x = LEFT + COLUMN * number
    for line, words in enumerate(moment.title.split("\n")):
        yield f'<text x="{x}" y="{18 + 16 * line}">{escape(words)}</text>'
    for rank, blocks in enumerate(moment.held):
        for place, block in enumerate(blocks):
            yield _block(x + place * (BLOCK + 2), rank, block)
    for source, target in moment.sends:
        start, end = x + max(len(moment.held[source]), 1) * (BLOCK + 2) + 4, x + COLUMN - 6
        ends = f'x1="{start}" y1="{_middle(source)}" x2="{end}" y2="{_middle(target)}"'
        yield f'<line {ends} stroke="#777777" stroke-width="1.2" marker-end="url(#head)"/>'


def _block(x: int, rank: int, block: Block) -> str:
    tall = ROW - 18
    first, last = block.heads
    top = TOP + ROW * rank + tall * first
    return (
        f'<rect x="{x}" y="{top:g}" width="{BLOCK}" height="{tall * (last - first):g}" fill="{COLOURS[block.owner]}" rx="2"/>'
        f'<text x="{x + BLOCK / 2 - 4}" y="{top + tall * (last - first) / 2 + 5:g}" fill="white">{block.owner}</text>'
    )


def _middle(rank: int) -> int:
    return TOP + ROW * rank + (ROW - 18) // 2


def ring() -> list[Moment]:
    return [
        Moment(f"step {step}", [[Block((rank - step) % 4)] for rank in range(4)], _next() if step < 3 else ()) for step in range(4)
    ]


def _next() -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % 4) for rank in range(4)]


def all_gather() -> list[Moment]:
    own = [[Block(rank)] for rank in range(4)]
    everything = [[Block(owner) for owner in range(4)] for _ in range(4)]
    return [
        Moment("own keys", own, [(a, b) for a in range(4) for b in range(4) if a != b]),
        Moment("one kernel over all keys", everything),
    ]


def window() -> list[Moment]:
    edges = [(rank, rank + 1) for rank in range(3)]
    widened = [[Block(rank - 1, (0.0, 1.0)), Block(rank)] if rank else [Block(0)] for rank in range(4)]
    return [
        Moment("own keys; their last ones\nare sent", [[Block(rank)] for rank in range(4)], edges),
        Moment("one kernel", widened),
    ]


def ulysses() -> list[Moment]:
    quarter = [(rank / 4, (rank + 1) / 4) for rank in range(4)]
    everyone = [(a, b) for a in range(4) for b in range(4) if a != b]
    return [
        Moment("a shard, all heads", [[Block(rank)] for rank in range(4)], everyone),
        Moment(
            "all shards, a quarter\nof the heads: one kernel",
            [[Block(o, quarter[r]) for o in range(4)] for r in range(4)],
            everyone,
        ),
        Moment("the output: a shard,\nall heads", [[Block(rank)] for rank in range(4)]),
    ]


def ring_ulysses() -> list[Moment]:
    half = [(0.0, 0.5), (0.5, 1.0)]
    pairs = [(0, 1), (1, 0), (2, 3), (3, 2)]
    here = [[Block(rank // 2 * 2 + i, half[rank % 2]) for i in (0, 1)] for rank in range(4)]
    return [
        Moment("a shard, all heads", [[Block(rank)] for rank in range(4)], pairs),
        Moment("two shards, half\nof the heads", here, [(rank, (rank + 2) % 4) for rank in range(4)]),
        Moment("a ring over the\nsecond axis", [here[(rank + 2) % 4] for rank in range(4)], pairs),
        Moment("the output: a shard,\nall heads", [[Block(rank)] for rank in range(4)]),
    ]


def hierarchical() -> list[Moment]:
    """Two hosts of two: the keys of the other host travel while those of this one are used."""
    at = [[(host - o) % 2 * 2 + (gpu - i) % 2 for host in (0, 1) for gpu in (0, 1)] for o in (0, 1) for i in (0, 1)]
    inside, between = [(0, 1), (1, 0), (2, 3), (3, 2)], [(rank, (rank + 2) % 4) for rank in range(4)]
    titles = ("this host's keys;\nthe next host's are sent", "... and arrive", "the other host's keys", "")
    return [Moment(titles[n], [[Block(owner)] for owner in at[n]], (inside + between, between, inside, ())[n]) for n in range(4)]


def decode() -> list[Moment]:
    parts = [[Block(rank)] for rank in range(4)]
    everyone = [(a, b) for a in range(4) for b in range(4) if a != b]
    return [
        Moment("the same query on all;\neach its part of the cache", parts, everyone),
        Moment("outputs and LSEs of all\nparts, joined everywhere", [[Block(owner, (0.4, 0.6)) for owner in range(4)]] * 4),
    ]


def main() -> None:
    ranks, hosts = [f"rank {rank}" for rank in range(4)], [f"host {rank // 2}, {rank % 2}" for rank in range(4)]
    for picture in (ring, all_gather, window, ulysses, ring_ulysses, hierarchical, decode):
        names = hosts if picture is hierarchical else ranks
        (Path(__file__).parent / f"{picture.__name__}.svg").write_text(svg(names, picture()), encoding="utf-8")


if __name__ == "__main__":
    main()
