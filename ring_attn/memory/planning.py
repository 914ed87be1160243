"""``plan``: which levers a length needs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ring_attn.memory.formula import GIB, Levers, Peak, Setting, peak
from ring_attn.memory.shapes import Shapes, shapes_of

LOSS_CHUNK, MLP_TILE, HEAD_GROUPS = 1024, 4096, (2, 4, 8)
_SHARE = 0.9  # of what a process can have; from 16k tokens on the formula was up to 13 % low


# The cheapest first: nothing is computed twice for the first two, kernels get shorter, copies go to the host and back.
_LADDER: tuple[tuple[str, Any], ...] = (
    ("loss_chunk", LOSS_CHUNK),
    ("mlp_tile", MLP_TILE),
    *(("head_groups", groups) for groups in HEAD_GROUPS),
    ("checkpoint", "offload"),
    ("offload_inputs", True),
)
_NAMES = tuple(dict(_LADDER))


class Row(NamedTuple):
    levers: Levers
    name: str  # of the last lever
    peak: Peak
    fits: bool


class Plan(NamedTuple):
    """``rows``: with no lever, then with one more in each, the cheapest first. ``levers``: the fewest of them with which the length
    fits, as settings for ``context_parallel``, and ``peak`` what is taken then; None where none do. ``print`` it."""

    model: str
    parameters: int
    tokens: int
    gpus: int
    ring: int
    memory: float
    rows: tuple[Row, ...]
    levers: dict[str, Any] | None
    peak: Peak | None

    @property
    def ok(self) -> bool:
        return self.levers is not None

    def __str__(self) -> str:
        local = -(-self.tokens // self.ring)
        head = (
            f"{self.model}, {self.parameters / 1e9:.2f}B parameters: {self.tokens:,} tokens on {_gpus(self.gpus)} of "
            f"{self.memory:g} GB, {local:,} on each"
        )
        return "\n".join([head, _PREDICTED, "", *_aligned([_COLUMNS, *map(_cells, self.rows)]), "", self.advice])

    @property
    def advice(self) -> str:
        if self.levers is None or self.peak is None:
            return "does not fit: more GPUs, or fewer tokens"
        levers = "".join(f", {_written(name, value)}" for name, value in self.levers.items())
        host = f", and {self.peak.host / GIB:.1f} of the host" if self.peak.host else ""
        return f"fits with context_parallel(model, mesh{levers}): {self.peak.device / GIB:.1f} GiB of each GPU{host}"


_PREDICTED = "GiB a GPU, predicted from sizes: AdamW, activation checkpointing in every layer, one row of tokens. Nothing was run."
_COLUMNS = ("levers, each added to those above", "states", "held", "work", "ring", "reserved", "device", "host", "")


def _cells(row: Row) -> tuple[str, ...]:
    needed = row.peak
    sizes = (needed.states, needed.held, needed.work, needed.ring, needed.reserved, needed.device, needed.host)
    return (row.name, *(f"{size / GIB:.1f}" for size in sizes), "fits" if row.fits else "")


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    """The first column to the left, the others to the right."""
    first, *widths = (max(map(len, column)) for column in zip(*lines, strict=True))
    return ["  ".join([name.ljust(first), *map(str.rjust, cells, widths)]).rstrip() for name, *cells in lines]


def _written(name: str, value: object) -> str:
    return f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}"


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


def room(memory: float) -> float:
    """Bytes that a step may take by the formula, of a GPU that is sold with ``memory`` GB."""
    return _SHARE * (memory - 1) * GIB


def fewest_groups(shapes: Shapes, setting: Setting, tokens: int, memory: float, kv_heads: int) -> int:
    """Of ``kv_heads``, with which a step of ``tokens`` on each GPU fits into its ``memory`` bytes; 1 where it never does."""
    groups = [1, *(each for each in HEAD_GROUPS if kv_heads % each == 0)]
    settings = (replace(setting, levers=replace(setting.levers, head_groups=each)) for each in groups)
    fitting = (each for each, at in zip(groups, settings, strict=True) if peak(shapes, at, tokens).device <= _SHARE * memory)
    return next(fitting, 1)


def plan(
    model: object,
    tokens: int,
    gpus: object,
    memory: float = 80,
    *,
    ring: int | None = None,
    sharded: bool = True,
    host: float | None = None,
) -> Plan:
    """Whether a row of ``tokens`` trains on ``gpus``, and the cheapest levers of ``context_parallel`` with which it does.

    ```
    print(ring_attn.memory.plan("Qwen3-8B", 2**20, gpus=8, memory=80))
    ```

    Args:
        model: a transformers model, its configuration, the configuration's fields as a mapping, a folder with ``config.json``, the
            name of one of ``ring_attn.memory.shapes.KNOWN``, or :class:`ring_attn.memory.Shapes`. Nothing is downloaded.
        tokens: of the whole row. gpus: a number, a DeviceMesh or a :class:`ring_attn.Ring`; all share the weights.
        memory: GB of a GPU, as it is sold. host: GiB of host memory for each GPU; None: as much as is needed. Where it is too
            little, attention computed again (``checkpoint=None``), which takes the most time, is the last lever.
        ring: how many of the GPUs share a row; None: all.
        sharded: by FSDP2, weights and AdamW in float32; False: each GPU has all of them, in bfloat16.

    Predicted by :mod:`ring_attn.memory.formula`, which says what was measured of it; a tenth of the memory is left free. Raises
    ValueError for a model whose sizes are not known, NotImplementedError for an attention whose memory is not.
    """
    name, shapes = shapes_of(model)
    count = _count(gpus)
    ring = count if ring is None else ring
    _check(tokens, count, ring, memory)
    local = -(-tokens // ring)

    def row(levers: Levers, name: str) -> Row:
        needed = peak(shapes, Setting(count, sharded, levers=levers), local)
        on_host = host is None or needed.host <= host * GIB
        return Row(levers, name, needed, needed.device <= room(memory) and on_host)

    rows = [row(Levers(), "none"), *(row(levers, name) for levers, name in _rungs(shapes.kv_heads, host))]
    first = next((each for each in rows if each.fits), None)
    chosen = None if first is None else _without_needless(first, row)
    settings = None if chosen is None else _settings(chosen.levers)
    return Plan(
        name, shapes.parameters, tokens, count, ring, memory, tuple(rows), settings, None if chosen is None else chosen.peak
    )


def _rungs(kv_heads: int, host: float | None) -> Iterator[tuple[Levers, str]]:
    levers, dearest = Levers(), () if host is None else (("checkpoint", None),)
    for name, value in (*_LADDER, *dearest):
        if name != "head_groups" or kv_heads % value == 0:
            levers = replace(levers, **{name: value})
            yield levers, _written(name, value)


def _without_needless(first: Row, row: Callable[[Levers, str], Row]) -> Row:
    """The first row that fits, without the levers that it fits without; the dearest are tried first."""
    best = first
    for name in reversed(_NAMES):
        without = row(replace(best.levers, **{name: getattr(Levers(), name)}), "")
        best = without if without.fits else best
    return best


def _settings(levers: Levers) -> dict[str, Any]:
    return {name: value for name in _NAMES if (value := getattr(levers, name)) != getattr(Levers(), name)}


def _count(gpus: object) -> int:
    if isinstance(gpus, int):
        return gpus
    size = getattr(gpus, "size", None)
    count = size() if callable(size) else size
    if not isinstance(count, int):
        raise ValueError(f"gpus must be a number, a DeviceMesh or a Ring, got {type(gpus).__name__}")
    return count


def _check(tokens: int, gpus: int, ring: int, memory: float) -> None:
    if min(tokens, gpus, ring) < 1 or memory <= 0:
        raise ValueError(f"tokens, gpus, ring and memory must be positive, got {tokens}, {gpus}, {ring} and {memory}")
    if gpus % ring:
        raise ValueError(f"the ring must divide the {gpus} GPUs, got {ring}")
