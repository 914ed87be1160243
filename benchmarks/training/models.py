"""The models that benchmarks/training trains: random, of transformers, of published sizes but for the number of layers."""

from dataclasses import replace

from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from ring_attn.memory import Shapes
from ring_attn.memory.shapes import KNOWN

VOCABULARY = 32000  # tokens are drawn from so many, whatever the model knows
USUAL = "Qwen3"
HYBRID = "Qwen3.5-1B"  # of Qwen3.5's kinds of layers; 0.9e9 parameters in its 24 layers
SHAPES = {
    USUAL: Shapes(12, 2048, 6144, 32, 8, 128, VOCABULARY),
    "Qwen3-8B": KNOWN["Qwen3-8B"],
    "gpt-oss-20b": Shapes(24, 2880, 2880, 64, 8, 64, 201088, experts=32, per_token=4, expert_width=2880),
    "gemma-3-12b": Shapes(48, 3840, 15360, 16, 8, 256, 262208, tied=True),
    HYBRID: Shapes(24, 1536, 4096, 8, 2, 256, VOCABULARY),
}


def small(shapes: Shapes) -> Shapes:
    """Two layers, to see that it runs."""
    few = replace(shapes, layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, dim=16, vocabulary=VOCABULARY)
    return replace(few, experts=4, per_token=2, expert_width=128) if shapes.experts else few


def random_model(name: str, shapes: Shapes) -> PreTrainedModel:
    """On the device that torch is told to use. Its layers' kinds are as in the whole model, but that the last of few layers sees
    all tokens. Sinks know no SDPA; the ring's attention takes the place of either."""
    how = "eager" if name == "gpt-oss-20b" else "sdpa"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(_configuration(name, shapes), attn_implementation=how)
    return model


def _configuration(name: str, shapes: Shapes) -> PretrainedConfig:
    sizes = {
        "hidden_size": shapes.hidden,
        "intermediate_size": shapes.intermediate,
        "num_hidden_layers": shapes.layers,
        "num_attention_heads": shapes.heads,
        "num_key_value_heads": shapes.kv_heads,
        "head_dim": shapes.dim,
        "vocab_size": shapes.vocabulary,
        "max_position_embeddings": 2**20,
        "use_cache": False,
    }
    if name == "gpt-oss-20b":
        kinds = _kinds(shapes.layers, every=2)
        return GptOssConfig(**sizes, num_local_experts=shapes.experts, num_experts_per_tok=shapes.per_token, layer_types=kinds)
    if name == "gemma-3-12b":
        return Gemma3TextConfig(**sizes, sliding_window=1024, layer_types=_kinds(shapes.layers, every=6))
    if name == HYBRID:
        heads, dim = 2 * shapes.heads, shapes.dim // 2
        of_states = dict(
            linear_num_key_heads=heads, linear_num_value_heads=heads, linear_key_head_dim=dim, linear_value_head_dim=dim
        )
        kinds = _kinds(shapes.layers, every=4, others="linear_attention")
        return Qwen3_5TextConfig(**sizes, **of_states, layer_types=kinds)
    return Qwen3Config(**sizes)


def _kinds(layers: int, every: int, others: str = "sliding_attention") -> list[str]:
    """Of so many layers one sees all tokens."""
    every = min(every, layers)
    return [others if (number + 1) % every else "full_attention" for number in range(layers)]
