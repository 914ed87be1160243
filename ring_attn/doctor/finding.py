"""What a check has found."""

from typing import Literal, NamedTuple

Verdict = Literal["right", "wrong", "note"]


class Finding(NamedTuple):
    """``verdict``: "wrong" where something must be done before this machine is used, "note" where it may be worth a look."""

    check: str
    verdict: Verdict
    text: str
