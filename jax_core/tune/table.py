"""The table of a device's configurations, and its form as JSON. Nothing of a file is taken that was not checked here."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jax_core.caches import parse_json
from jax_core.config import BwdParams, FwdParams

SCHEMA = 1
PASSES: Mapping[str, type[FwdParams]] = {"forward": FwdParams, "backward": BwdParams}


@dataclass(frozen=True)
class Tuned:
    """What a search found for one pass: its parameters; milliseconds a call with them, and with those that the kernel chooses (None
    if it could not run with these); whether all candidates were tried, or time ended the search; the day, and the versions of what
    compiled it."""

    params: FwdParams
    ms: float
    heuristic_ms: float | None
    complete: bool
    day: str
    versions: Mapping[str, str]

    @property
    def gain(self) -> float | None:
        """How much less time it takes than the heuristic's, in percent."""
        return None if self.heuristic_ms is None else 100 * (1 - self.ms / self.heuristic_ms)


Table = Mapping[str, Mapping[str, Tuned]]  # by the problem's key, then by pass


class NewerSchemaError(ValueError):
    """A later release wrote the file: it is not for this one, and it is not broken."""


def joined(table: Table, added: Table) -> Table:
    """Both, with ``added`` in place of what has the same key and pass."""
    return {key: {**table.get(key, {}), **added.get(key, {})} for key in sorted({*table, *added})}


def to_json(table: Table, device: str) -> str:
    entries = {key: {name: _plain(tuned) for name, tuned in passes.items()} for key, passes in table.items()}
    return json.dumps({"schema": SCHEMA, "device": device, "configurations": entries}, indent=1) + "\n"


def _plain(entry: Tuned) -> dict[str, object]:
    params = {name: value for name, value in vars(entry.params).items() if value is not None}
    return {**asdict(entry), "params": params, "versions": dict(entry.versions)}


def from_json(text: str, device: str) -> Table:
    """ValueError, with the reason, unless ``text`` is a table of this device in this schema."""
    data = parse_json(text)
    if not isinstance(data, dict) or not isinstance(data.get("schema"), int) or not isinstance(data.get("configurations"), dict):
        raise ValueError("it is no table of configurations")
    if data["schema"] > SCHEMA:
        raise NewerSchemaError(f"a later release wrote it, in schema {data['schema']}; this one reads {SCHEMA}")
    if data["schema"] < SCHEMA:
        raise ValueError(f"it has schema {data['schema']}, and this release reads {SCHEMA}")
    if data.get("device") != device:
        raise ValueError(f"it is of {data.get('device')!r}, and this device is {device!r}")
    return {key: _passes(key, passes) for key, passes in data["configurations"].items()}


def _passes(key: str, passes: Any) -> dict[str, Tuned]:
    try:
        return {name: _tuned(PASSES[name], **entry) for name, entry in passes.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the entry {key!r} is not one of a table ({type(error).__name__}: {error})") from None


def _tuned(
    kind: type[FwdParams],
    *,
    params: dict[str, int | None],
    ms: float,
    heuristic_ms: float | None,
    complete: bool,
    day: str,
    versions: dict[str, str],
) -> Tuned:
    texts = (day, *versions, *versions.values())
    if not all(isinstance(text, str) for text in texts) or not all(_is_time(time) for time in (ms, heuristic_ms or 1.0)):
        raise ValueError(f"times are positive numbers, day and versions are text; got {ms!r}, {heuristic_ms!r}, {texts!r}")
    if not isinstance(complete, bool):
        raise ValueError(f"complete is true or false, got {complete!r}")
    return Tuned(kind(**params), ms, heuristic_ms, complete, day, versions)


def _is_time(time: object) -> bool:
    return isinstance(time, (int, float)) and not isinstance(time, bool) and 0 < time < float("inf")
