"""The seed of dropout as an operand."""

import torch


def words_of_seed(seed: int, device: torch.device | str) -> torch.Tensor:
    """The 64-bit seed as two int32 words, low word first, written on ``device``."""
    low = (seed + 2**31) % 2**32 - 2**31
    high = (seed // 2**32 + 2**31) % 2**32 - 2**31
    words = torch.full((2,), low, dtype=torch.int32, device=device)
    words[1:] = high  # no view of one int64: compiled by torch 2.11 that gives the low word twice
    return words
