"""The sizes of a model: of which memory is made."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# By what configurations call them; the first name that is there counts.
_FIELDS = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "intermediate": ("intermediate_size",),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True)
class Shapes:
    """A decoder with gated MLPs, as Llama's and Qwen3's. ``experts``: so many MLPs of ``expert_width`` in the place of each one,
    ``per_token`` of which compute a token, beside one of ``shared`` that computes all. ``counted``: the parameters of a model that
    was counted, where the others are known by these sizes."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    tied: bool = False
    experts: int = 0
    per_token: int = 0
    expert_width: int = 0
    shared: int = 0
    counted: int | None = None

    @property
    def of_an_mlp(self) -> int:
        """Parameters."""
        if not self.experts:
            return 3 * self.hidden * self.intermediate
        return 3 * self.hidden * (self.experts * self.expert_width + self.shared) + self.experts * self.hidden

    @property
    def width(self) -> int:
        """What an MLP makes of a token in between."""
        return self.per_token * self.expert_width + self.shared if self.experts else self.intermediate

    @property
    def of_a_layer(self) -> int:
        return self.hidden * self.dim * 2 * (self.heads + self.kv_heads) + self.of_an_mlp

    @property
    def of_the_ends(self) -> int:
        return self.hidden * self.vocabulary * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.of_a_layer + self.of_the_ends if self.counted is None else self.counted


KNOWN = {
    "Llama-3.2-1B": Shapes(16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    "Llama-3.1-8B": Shapes(32, 4096, 14336, 32, 8, 128, 128256),
    "Qwen3-8B": Shapes(36, 4096, 12288, 32, 8, 128, 151936),
    "Qwen3-32B": Shapes(64, 5120, 25600, 64, 8, 128, 151936),
}


def shapes_of(model: object) -> tuple[str, Shapes]:
    """Of a model, its configuration, such a configuration's fields, a folder with ``config.json``, or a name of ``KNOWN``: what it
    is called, and its sizes. ValueError, by name of what is missing."""
    if isinstance(model, Shapes):
        return "a model", model
    if isinstance(model, str | Path):
        return _by_name(str(model))
    if hasattr(model, "parameters") and hasattr(model, "config"):
        name, counted = type(model).__name__, sum(x.numel() for x in model.parameters())
        return name, _of_fields(_fields(model.config), counted)
    fields = _fields(model)
    return str(fields.get("model_type") or "a model"), _of_fields(fields)


def _by_name(name: str) -> tuple[str, Shapes]:
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if file.is_file():
        return name, _of_fields(_fields(json.loads(file.read_text(encoding="utf-8"))))
    known = {each.lower(): each for each in KNOWN}
    model = known.get(name.rpartition("/")[2].lower())
    if model is None:
        raise ValueError(
            f"{name} is no folder with a config.json, no such file, and none of {', '.join(KNOWN)}; nothing is downloaded: give "
            "the folder"
        )
    return model, KNOWN[model]


def _fields(config: Any) -> Mapping[str, Any]:
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    fields = config if isinstance(config, Mapping) else vars(config)
    return fields.get("text_config") or fields


def _of_fields(fields: Mapping[str, Any], counted: int | None = None) -> Shapes:
    if fields.get("kv_lora_rank"):
        raise NotImplementedError(
            "kv_lora_rank: what DeepSeek's attention holds of a token is not known to the plan; measure a few layers instead"
        )
    shapes: dict[str, Any] = {}
    for field, names in _FIELDS.items():
        number = next((value for name in names if (value := fields.get(name)) is not None), None)
        if number is None:
            raise ValueError(f"the model's configuration must have {' or '.join(names)}, and has none")
        shapes[field] = number
    heads, experts = shapes["heads"], next((value for name in _EXPERTS if (value := fields.get(name))), 0)
    shapes |= {"kv_heads": fields.get("num_key_value_heads") or heads, "dim": fields.get("head_dim") or shapes["hidden"] // heads}
    if experts:
        width = fields.get("moe_intermediate_size") or shapes["intermediate"]
        shared = fields.get("shared_expert_intermediate_size") or (fields.get("n_shared_experts") or 0) * width
        per_token = fields.get("num_experts_per_tok") or 1
        shapes |= {"experts": experts, "per_token": per_token, "expert_width": width, "shared": shared}
    return Shapes(**shapes, tied=bool(fields.get("tie_word_embeddings")), counted=counted)
