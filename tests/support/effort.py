"""How much is tried of the tests that take long: all on many cores or with FULL=1, otherwise a part, another one each day. With
SHARE=2 half of everything."""

import os
from datetime import date
from zlib import crc32

ALL = len(os.sched_getaffinity(0)) >= 8 or os.environ.get("FULL") == "1"
SELDOM = {"slow": 3, "wide": 8, "costly": 8}  # by mark: one in so many, drawn anew each day
SHARE = int(os.environ.get("SHARE", "1"))
# pytest's workers have it from the process that started them.
SALT = os.environ.setdefault("SALT", date.today().isoformat())


def of_the_day(name: str, parts: int) -> int:
    """Which of so many parts it is that ``name`` belongs to."""
    return crc32(f"{SALT} {name}".encode()) % parts
