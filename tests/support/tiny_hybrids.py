"""Tiny random hybrid models of transformers' families, whose layers carry a state along the sequence."""

from collections.abc import Callable
from typing import Any

import tiny_transformers as tiny
import transformers

_SIZES = {name: size for name, size in tiny.SIZES.items() if name != "head_dim"} | {"num_hidden_layers": 3}
_WITH_DIM = {**_SIZES, "head_dim": 8}
_KINDS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_HEADS = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=8)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)


def _model(name: str, config: str, /, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{config}Config")(**settings))


_LATENT = dict(
    kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, num_experts_per_tok=2, moe_intermediate_size=16
)
_CONVOLUTIONS = ["conv", "full_attention", "conv"]
_OF_NO_NUMBER = {name: size for name, size in _SIZES.items() if name != "num_hidden_layers"}
_MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=2, mamba_d_state=6, mamba_expand=2, mamba_chunk_size=4)
_MAMBA2 = dict(
    vocab_size=tiny.VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_heads=4,
    head_dim=16,
    n_groups=2,
    state_size=6,
    chunk_size=4,
    pad_token_id=0,
)

FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen 3 next": _model("Qwen3Next", "Qwen3Next", **_WITH_DIM, **_KINDS, **_HEADS, **_EXPERTS),
    "qwen 3.5": _model("Qwen3_5", "Qwen3_5Text", **_WITH_DIM, **_KINDS, **_HEADS),
    "qwen 3.5 moe": _model("Qwen3_5Moe", "Qwen3_5MoeText", **_WITH_DIM, **_KINDS, **_HEADS, **_EXPERTS),
    "olmo hybrid": _model("OlmoHybrid", "OlmoHybrid", **_SIZES, **_KINDS, **_HEADS),
    "bamba": _model("Bamba", "Bamba", **_SIZES, attn_layer_indices=[1], **_MAMBA),
    "granite 4": _model("GraniteMoeHybrid", "GraniteMoeHybrid", **_SIZES, **_KINDS, **_MAMBA, shared_intermediate_size=16),
    "falcon h1": _model("FalconH1", "FalconH1", **_SIZES, **_MAMBA, mamba_d_ssm=64),
    "nemotron h": _model(
        "NemotronH",
        "NemotronH",
        **_OF_NO_NUMBER,
        head_dim=8,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=6,
        chunk_size=4,
        n_routed_experts=4,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
    "zamba 2": _model(
        "Zamba2",
        "Zamba2",
        **_SIZES,
        layers_block_type=["linear_attention", "hybrid", "linear_attention"],
        n_mamba_heads=4,
        mamba_ngroups=2,
        mamba_d_state=6,
        chunk_size=4,
        adapter_rank=4,
    ),
    "mamba 2": _model("Mamba2", "Mamba2", **_MAMBA2),
    "kimi linear": _model(
        "KimiLinear",
        "KimiLinear",
        **{**_SIZES, "num_key_value_heads": 4},
        **_KINDS,
        linear_num_heads=4,
        linear_head_dim=8,
        **_LATENT,
        num_local_experts=4,
    ),
    "lfm2 moe": _model("Lfm2Moe", "Lfm2Moe", **_SIZES, layer_types=_CONVOLUTIONS, num_experts=4, moe_intermediate_size=16),
    "lfm3": _model(
        "Lfm3", "Lfm3", **{**_WITH_DIM, "num_hidden_layers": 4}, layer_types=[*_CONVOLUTIONS, "sliding_attention"], sliding_window=9
    ),
    "bailing hybrid": _model(
        "BailingHybrid",
        "BailingHybrid",
        **{**_WITH_DIM, "num_key_value_heads": 4},
        **_KINDS,
        **_LATENT,
        num_experts=4,
        n_group=2,
        topk_group=1,
    ),
    "jamba": _model(
        "Jamba",
        "Jamba",
        **_SIZES,
        attn_layer_period=3,
        attn_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=6,
        mamba_dt_rank=4,
    ),
    "zamba": _model(
        "Zamba",
        "Zamba",
        **{**_SIZES, "num_hidden_layers": 5},
        attn_layer_period=2,
        attn_layer_offset=1,
        n_mamba_heads=2,
        mamba_d_state=6,
        mamba_dt_rank=4,
    ),
    "lfm2": _model("Lfm2", "Lfm2", **_SIZES, layer_types=_CONVOLUTIONS, block_auto_adjust_ff_dim=False),
}


def _qwen35_of_images() -> Any:
    """Given text alone."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    sizes = {name: size for name, size in _WITH_DIM.items() if name != "attn_implementation"}
    text = {**sizes, **_KINDS, **_HEADS, "rope_parameters": {**rope, "partial_rotary_factor": 1.0}}
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32)
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, attn_implementation="eager")
    return transformers.Qwen3_5ForConditionalGeneration(config)


ON_RINGS = {**FAMILIES, "qwen 3.5, with images": _qwen35_of_images}
OTHERS = {"mamba 2, biased projections": _model("Mamba2", "Mamba2", **_MAMBA2, use_bias=True)}
