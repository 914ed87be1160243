"""Numbers as people write them."""

import re

_POWERS = {"": 0, "k": 1, "m": 2, "g": 3}


def count(text: str) -> int:
    """``131072``, ``128k``, ``1M``: in powers of 1,024."""
    return round(_number(text) * 1024 ** _POWERS[_unit(text)])


def gigabytes(text: str) -> float:
    """``80``, ``80G``, ``80GB``, ``1.5T``."""
    return _number(text) * {"": 1, "g": 1, "t": 1024}[_unit(text)]


def _number(text: str) -> float:
    return float(re.sub(r"[a-zA-Z]+$", "", text.replace(",", "").replace("_", "")))


def _unit(text: str) -> str:
    unit = re.search(r"([a-zA-Z]*)$", text)
    return unit[1].lower().removesuffix("b").removesuffix("i") if unit else ""
