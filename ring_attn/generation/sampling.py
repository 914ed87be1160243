"""How the next token is chosen from the logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampler:
    """Chooses tokens. ``temperature`` 0: the most likely one. Otherwise one is drawn from ``softmax(logits / temperature)``, among
    the ``top_k`` most likely and among the fewest whose probabilities add up to ``top_p`` ("nucleus sampling", Holtzman et al.
    2020, arXiv:1904.09751). ``seed``: of the draws; the same seed gives the same tokens on a ring of any size.

    Raises ValueError for numbers out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or (self.top_k is not None and self.top_k < 1):
            raise ValueError(f"a Sampler needs temperature >= 0, 0 < top_p <= 1 and top_k >= 1 or None; got {self}")

    def generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(self.seed)

    def __call__(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """``logits [batch, vocabulary] -> int64 [batch]``"""
        if self.temperature == 0:
            return logits.argmax(-1)
        ordered, tokens = (logits.float() / self.temperature).sort(descending=True, dim=-1)
        likely = ordered.softmax(-1)
        hidden = likely.cumsum(-1) - likely >= self.top_p  # the first is never hidden
        if self.top_k is not None:
            hidden[:, self.top_k :] = True
        drawn = torch.multinomial(likely.masked_fill(hidden, 0), 1, generator=generator)
        return tokens.gather(-1, drawn)[:, 0]


GREEDY = Sampler()
