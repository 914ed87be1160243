"""Tiny random models of transformers' families, and whole batches for them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

LENGTH, VOCABULARY, WINDOW = 27, 97, 7
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    attn_implementation="eager",
)
_NO_HEAD_DIM = {name: size for name, size in SIZES.items() if name != "head_dim"}
_LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
_BALANCED = dict(output_router_logits=True, router_aux_loss_coef=0.5)


def _causal(name: str, config: str, /, **settings: Any) -> Callable[[], Any]:
    """A model by the names of its class and its configuration's; made only when asked for, as old versions lack some."""
    return lambda: getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{config}Config")(**settings))


CAUSAL: dict[str, Callable[[], Any]] = {
    "llama": _causal("Llama", "Llama", **SIZES),
    "llama 3": _causal(
        "Llama",
        "Llama",
        **SIZES,
        rope_scaling={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "llama 4": _causal(
        "Llama4",
        "Llama4Text",
        **SIZES,
        attention_chunk_size=9,
        no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"],
        intermediate_size_mlp=48,
        num_local_experts=2,
        floor_scale=8,
        attn_scale=0.5,
        attn_temperature_tuning=True,
    ),
    "mistral": _causal("Mistral", "Mistral", **SIZES, sliding_window=WINDOW),
    "mixtral": _causal("Mixtral", "Mixtral", **SIZES, num_local_experts=4, **_BALANCED),
    "gemma 2": _causal("Gemma2", "Gemma2", **SIZES, sliding_window=WINDOW, attn_logit_softcapping=3.0),
    "gemma 2, low cap": _causal("Gemma2", "Gemma2", **SIZES, attn_logit_softcapping=2.0, initializer_range=0.3),
    "gemma 3": _causal("Gemma3", "Gemma3Text", **SIZES, **_LAYERS),
    "gpt-oss": _causal("GptOss", "GptOss", **SIZES, **_LAYERS, num_local_experts=4, num_experts_per_tok=2),
    "qwen 2": _causal("Qwen2", "Qwen2", **_NO_HEAD_DIM, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen 2 moe": _causal("Qwen2Moe", "Qwen2Moe", **_NO_HEAD_DIM, **_EXPERTS, shared_expert_intermediate_size=16),
    "qwen 3": _causal("Qwen3", "Qwen3", **SIZES),
    "qwen 3 moe": _causal("Qwen3Moe", "Qwen3Moe", **SIZES, **_EXPERTS, **_BALANCED),
    "deepseek 3": _causal(
        "DeepseekV3",
        "DeepseekV3",
        **{**_NO_HEAD_DIM, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "cohere": _causal("Cohere", "Cohere", **_NO_HEAD_DIM, use_qk_norm=True),
    "cohere 2": _causal("Cohere2", "Cohere2", **SIZES, **_LAYERS),
    "phi": _causal("Phi", "Phi", **_NO_HEAD_DIM),
    "phi 3": _causal(
        "Phi3",
        "Phi3",
        **{**_NO_HEAD_DIM, "original_max_position_embeddings": 16},
        rope_scaling={"rope_type": "longrope", "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]},
    ),
    "granite": _causal("Granite", "Granite", **_NO_HEAD_DIM, attention_multiplier=0.4, residual_multiplier=0.5),
    "starcoder 2": _causal("Starcoder2", "Starcoder2", **_NO_HEAD_DIM, sliding_window=WINDOW),
    "olmo 2": _causal("Olmo2", "Olmo2", **_NO_HEAD_DIM),
    "olmo 3": _causal("Olmo3", "Olmo3", **_NO_HEAD_DIM, **_LAYERS),
}


_TEXT = {name: size for name, size in SIZES.items() if name != "attn_implementation"}
_VISION: dict[str, Any] = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
)
_IMAGES: dict[str, Any] = dict(attn_implementation="eager", image_token_id=VOCABULARY - 1)


def gemma3_with_images() -> Any:
    config = transformers.Gemma3Config(
        text_config={**_TEXT, **_LAYERS}, vision_config=_VISION, mm_tokens_per_image=4, attn_implementation="eager", pad_token_id=0
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def gemma4() -> Any:
    """Its last two layers have the keys and values of the first two."""
    layers = {"num_hidden_layers": 4, "layer_types": 2 * _LAYERS["layer_types"], "sliding_window": WINDOW}
    shared = dict(num_kv_shared_layers=2, global_head_dim=8, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY)
    return transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**{**SIZES, **layers}, **shared))


def llava() -> Any:
    vision = {**_VISION, "projection_dim": 32, "model_type": "clip_vision_model"}
    config = transformers.LlavaConfig(text_config={**_TEXT, "model_type": "llama"}, vision_config=vision, **_IMAGES)
    return transformers.LlavaForConditionalGeneration(config)


def paligemma() -> Any:
    vision = {**_VISION, "projection_dim": 32, "model_type": "siglip_vision_model"}
    text = {**_TEXT, "model_type": "gemma"}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=32, hidden_size=32, **_IMAGES)
    return transformers.PaliGemmaForConditionalGeneration(config)


def qwen3_vl() -> Any:
    """Its ``position_ids [4, batch, seq]`` are the text's, and three coordinates."""
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=8, out_hidden_size=32)
    config = transformers.Qwen3VLConfig(
        text_config={**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}},
        vision_config={**vision, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        attn_implementation="eager",
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


_CLIP: dict[str, Any] = {
    **{name: size for name, size in _NO_HEAD_DIM.items() if name != "num_key_value_heads"},
    "projection_size": 32,
}


def clip_text() -> Any:
    """It returns one vector for each entry beside the hidden states."""
    return transformers.CLIPTextModel(transformers.CLIPTextConfig(**_CLIP))


def siglip_text() -> Any:
    return transformers.SiglipTextModel(transformers.SiglipTextConfig(**_CLIP))


def mobilebert() -> Any:
    """Its embeddings are made of three tokens each."""
    sizes = {**_NO_HEAD_DIM, "embedding_size": 16, "intra_bottleneck_size": 16, "intermediate_size": 32}
    return transformers.MobileBertForMaskedLM(transformers.MobileBertConfig(**sizes))


def mllama() -> Any:
    """Its layer 1 attends to images, and is left out without them."""
    unused = ("head_dim", "max_position_embeddings")
    text = {name: size for name, size in _TEXT.items() if name not in unused}
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_global_layers=1, attention_heads=2)
    sizes = dict(image_size=16, patch_size=8, intermediate_layers_indices=[0], vision_output_dim=32)
    config = transformers.MllamaConfig(
        text_config={
            **text,
            "num_hidden_layers": 3,
            "cross_attention_layers": [1],
            "rope_scaling": {"rope_type": "default", "rope_theta": 1e4},
        },
        vision_config={**vision, **sizes, "supported_aspect_ratios": [[1, 1]]},
        attn_implementation="eager",
    )
    return transformers.MllamaForConditionalGeneration(config)


def modernbert() -> Any:
    return transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(
            **{**_NO_HEAD_DIM, "num_key_value_heads": None},
            local_attention=2 * WINDOW,
            global_attn_every_n_layers=2,
            cls_token_id=1,
            sep_token_id=2,
        )
    )


def bert() -> Any:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(**_NO_HEAD_DIM, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def roberta() -> Any:
    """Its positions are counted from the padding's id, and padding has that one."""
    sizes = {**_NO_HEAD_DIM, "pad_token_id": 1, "bos_token_id": 0}
    return transformers.RobertaForMaskedLM(
        transformers.RobertaConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


_SEQ2SEQ: dict[str, Any] = dict(vocab_size=VOCABULARY, d_model=32, pad_token_id=0, attn_implementation="eager")

_T5: dict[str, Any] = dict(
    **_SEQ2SEQ,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=16,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)


def gpt2() -> Any:
    """Its token types are embedded as tokens are."""
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = dict(vocab_size=VOCABULARY, n_embd=32, n_head=4, n_layer=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, attn_implementation="eager"))


def t5() -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5))


def whisper() -> Any:
    ids = dict(bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None)
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48)
    layers = dict(encoder_layers=1, decoder_layers=2, num_mel_bins=8, max_source_positions=12, max_target_positions=64)
    return transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**_SEQ2SEQ, **layers, **heads, **ids))


def seq2seq(name: str, config: str) -> Callable[[], Any]:
    """A model of BART's kind, with positions that are embedded."""
    heads = dict(encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48)
    sizes = dict(encoder_layers=2, decoder_layers=2, max_position_embeddings=64, **heads)
    off = dict.fromkeys(("dropout", "attention_dropout", "encoder_layerdrop", "decoder_layerdrop"), 0.0)
    ids = dict(bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)
    return lambda: getattr(transformers, name)(getattr(transformers, f"{config}Config")(**_SEQ2SEQ, **sizes, **off, **ids))


def switch(expert_capacity: int = 64) -> Any:
    config = transformers.SwitchTransformersConfig(
        **_T5,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        expert_capacity=expert_capacity,
        router_jitter_noise=0.0,
    )
    return transformers.SwitchTransformersForConditionalGeneration(config)


def moonshine() -> Any:
    heads = {f"{part}_num_{kind}_heads": 4 for part in ("encoder", "decoder") for kind in ("attention", "key_value")}
    layers = dict(encoder_num_hidden_layers=1, decoder_num_hidden_layers=2, intermediate_size=48, max_position_embeddings=64)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    config = transformers.MoonshineConfig(
        vocab_size=VOCABULARY, hidden_size=32, attn_implementation="eager", **layers, **heads, **ids
    )
    return transformers.MoonshineForConditionalGeneration(config)


def tokens(length: int = LENGTH, rows: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def batch(padding: str = "none", length: int = LENGTH) -> dict[str, Tensor]:
    """Token ids and labels, and, with padding on the "left" or the "right" of the second row, its mask."""
    ids = tokens(length)
    if padding == "none":
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    mask[1, slice(None, 6) if padding == "left" else slice(-6, None)] = 0
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


def with_coordinates(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Position ids as models of images and text take them: the text's, and three coordinates."""
    return {**batch, "position_ids": batch["position_ids"].expand(4, -1, -1)}


def packed(*lengths: int) -> dict[str, Tensor]:
    """One row of documents, as a padding-free collator makes it: position ids restart, a document's first token has no label."""
    ids = tokens(sum(lengths), rows=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}
