"""Attention shapes of common models, from their published configurations. A decoder attends causally; of one whose layers
alternate both kinds are here. Models of equal shapes are listed once."""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """``asks``: arguments of ``ring_attention``; ``window`` counts the position itself, as in transformers."""

    model: str
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    causal: bool = True
    sinks: bool = False

    @property
    def options(self) -> dict[str, Any]:
        window = {} if self.window is None else {"sliding_window": (self.window - 1, 0)}
        return {"causal": self.causal, **window}


SHAPES = (
    Shape("Llama 3 8B, Qwen 3 4B and 8B", 32, 8, 128),
    Shape("Llama 3 70B, Qwen 3 32B", 64, 8, 128),
    Shape("gpt-oss", 64, 8, 64, sinks=True),
    Shape("gpt-oss, window", 64, 8, 64, window=128, sinks=True),
    Shape("Gemma 3 12B", 16, 8, 256),
    Shape("Gemma 3 12B, window", 16, 8, 256, window=1024),
    Shape("Gemma 3 27B", 32, 16, 128),
    Shape("Gemma 3 27B, window", 32, 16, 128, window=1024),
    Shape("Qwen 3 0.6B and 1.7B", 16, 8, 128),
    Shape("Qwen 3 14B", 40, 8, 128),
    Shape("Qwen 3 30B-A3B", 32, 4, 128),
    Shape("Qwen 3 235B-A22B", 64, 4, 128),
    Shape("Gemma 3 4B", 8, 4, 256),
    Shape("Gemma 3 4B, window", 8, 4, 256, window=1024),
    Shape("heads of 128", 16, 16, 128),
    Shape("heads of 64", 32, 32, 64),
    Shape("heads of 256", 8, 8, 256),
    Shape("heads of 128, not causal", 16, 16, 128, causal=False),
    Shape("heads of 64, not causal", 32, 32, 64, causal=False),
    Shape("heads of 256, not causal", 8, 8, 256, causal=False),
)
