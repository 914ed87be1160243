"""What has not met its hardware says so: in its module, in the documents, and once in each process that uses it."""

import warnings
from functools import cache


class ExperimentalWarning(UserWarning):
    """Something was used for the first time in this process that has been checked only as far as its hardware is not needed."""


@cache
def warn_experimental(name: str, tried: str) -> None:
    """``tried``: what was checked, and what was not."""
    warnings.warn(
        f'{name} is experimental: {tried}. Compare its results with platform="xla" on a small case first; '
        'warnings.simplefilter("ignore", ring_attn.ExperimentalWarning) silences this',
        ExperimentalWarning,
        stacklevel=2,
    )
