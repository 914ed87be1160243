"""The table of causal language models in docs/models.md: what transformers' auto class knows, each tried with a tiny
configuration and random weights on a ring of two against one process.

    torchrun --standalone --nproc-per-node 2 -m tools.transformers_families             # writes the table, in minutes
    torchrun --standalone --nproc-per-node 2 -m tools.transformers_families llama bart  # tries these, and says what it found
"""

import os
import re
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from ring_attn.integrations.transformers import context_parallel
from tools import marks

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
LENGTH, VOCABULARY, LARGEST = 27, 97, 20_000_000
RIGHT, REFUSED, WRONG, NOT_TRIED = "right", "refused", "WRONG", "not tried"
# What configurations call their sizes; of each those are set that it has.
SIZES: dict[int, tuple[str, ...]] = {
    VOCABULARY: ("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"),
    128: ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"),
    48: (
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "ffn_hidden_size",
        "intermediate_size_mlp",
    ),
    32: ("hidden_size", "n_embd", "d_model", "embedding_size", "dim", "input_embedding_size", "output_embedding_size"),
    16: ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "expert_ffn_hidden_size"),
    8: (
        "mamba_n_heads",
        "head_dim",
        "v_head_dim",
        "qk_nope_head_dim",
        "global_head_dim",
        "hidden_size_per_layer_input",
        "attention_chunk_size",
    ),
    7: ("sliding_window", "attention_window_size"),
    4: (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "qk_rope_head_dim", "rotary_dim"),
    ),
    2: (
        *("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "moe_k", "moe_topk", "eos_token_id"),
        *("num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_hidden_layers"),
    ),
    1: ("n_group", "topk_group", "bos_token_id", "n_shared_experts", "first_k_dense_replace", "decoder_start_token_id"),
    0: ("pad_token_id", "mlp_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop"),
}
LAYERS = ("num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_hidden_layers")
# What fits together only so.
SETTINGS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1},
    "nemotron": {"num_key_value_heads": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2": {"layer_types": ["conv", "full_attention"]},  # as its checkpoints have them
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16, "num_heads": 4, "hidden_size": 32, "n_groups": 2},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": [*["linear_attention"] * 2, "hybrid", "linear_attention", "hybrid"]},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


class Outcome(NamedTuple):
    """What became of a kind of model: its class, one of the four results, and why, or how far off it is."""

    kind: str
    model: str
    result: str
    words: str


def tiny(config: Any, **settings: Any) -> Any:
    """A configuration like this one, as small as its own checks allow, with a layer of each type."""
    sizes: dict[str, Any] = {name: size for size, names in SIZES.items() for name in names if _is_size(config, name)}
    if "qk_rope_head_dim" in sizes:  # latent attention has as many keys as queries, and its rotary embedding is of these
        sizes |= {"num_key_value_heads": sizes["num_attention_heads"], "head_dim": sizes["qk_rope_head_dim"]}
    indices = _layer_indices(config)
    sizes |= dict.fromkeys((name for name in LAYERS if name in sizes), len(indices))
    sizes |= {name: [value[i] for i in indices] for name, value in _by_layer(config)}
    inner = config.sub_configs if type(config).sub_configs else {}
    parts = {name: tiny(part).to_dict() for name in inner if (part := getattr(config, name, None)) is not None}
    return type(config)(**(sizes | parts | settings))


def _is_size(config: Any, name: str) -> bool:
    if isinstance(getattr(type(config), name, None), property):
        return False
    try:
        value = getattr(config, name, "absent")
    except Exception:  # one for each layer
        return True
    return name == "head_dim" if value is None else type(value) is int


def _by_layer(config: Any) -> Iterator[tuple[str, list[Any]]]:
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == layers:
            yield name, value


def _layer_indices(config: Any) -> list[int]:
    """The first layer of each type; two at least."""
    kinds = getattr(config, "layer_types", None) or ["all"]
    indices = sorted({kinds.index(kind) for kind in kinds})
    return indices if len(indices) > 1 else [0, 1]


def tried(kind: str) -> Outcome:
    known, config = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.CONFIG_MAPPING[kind]
    outcome = partial(Outcome, kind, known[config].__name__)
    try:
        model = _build(known[config], tiny(config(), **SETTINGS.get(kind, {})))
    except Exception as error:
        return outcome(NOT_TRIED, f"no tiny one could be made: {_short(error)}")
    try:
        cp = context_parallel(model)
        with cp.detached():
            broken = _fails(model)
        if broken is not None:
            return outcome(NOT_TRIED, f"the tiny one fails in one process: {_short(broken)}")
        verdict = cp.verify(_batch())
    except NotImplementedError as error:
        return outcome(REFUSED, _short(error))
    except Exception as error:
        return outcome(WRONG, _short(error))
    return outcome(RIGHT, f"{max(verdict.errors.values()):.0e}") if verdict.ok else outcome(WRONG, "; ".join(verdict.reasons))


def _fails(model: Any) -> Exception | None:
    try:
        model(**_batch())
    except Exception as error:
        return error
    return None


def _build(model: Any, config: Any) -> Any:
    text = config.get_text_config()
    config = text if model.config_class is type(text) else config
    config._attn_implementation = "eager"
    text.is_decoder = True  # BERT's kind is causal only then
    with torch.device("meta"):
        size = sum(x.numel() for x in model(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    return model(config).eval()


def _batch() -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _short(error: Exception) -> str:
    return f"{'' if isinstance(error, NotImplementedError) else type(error).__name__ + ': '}{' '.join(str(error).split())}"[:300]


def page(outcomes: list[Outcome]) -> str:
    """What stands between the marks: results and reasons, each with the kinds of models that have it."""
    groups: dict[str, list[str]] = {RIGHT: []}
    for one in sorted(outcomes, key=lambda one: [RIGHT, WRONG, REFUSED, NOT_TRIED].index(one.result)):
        groups.setdefault(_reason(one), []).append(one.kind)
    worst = max((float(one.words) for one in outcomes if one.result == RIGHT), default=0.0)
    right, version = len(groups[RIGHT]), transformers.__version__
    lines = [
        f"Of the {len(outcomes)} kinds of models in the auto class of transformers {version}, {right} are right: loss, logits and "
        f"gradients are within {worst:.0e} of one process, relative to the largest.",
        "",
        "| on a ring of two | kinds of models |",
        "|---|---|",
        *(f"| {reason} | {', '.join(kinds)} |" for reason, kinds in groups.items()),
    ]
    return "\n".join(lines)


def _reason(one: Outcome) -> str:
    """Without what is of this model or layer alone, so that those with the same reason stand together."""
    if one.result in (RIGHT, NOT_TRIED):
        return one.result
    words = re.sub(r"^layer \d+ of \w+ is of type '\w+', .* over a ring: |^\w+ is recurrent: ", "", one.words)
    return f"{one.result}: {escape(re.split(r'[.] |, which |, so |; ', words.replace(one.model, 'the model'))[0], quote=False)}"


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    chosen, outcomes = sys.argv[1:], []
    for kind in chosen or transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        begun = time.monotonic()
        outcomes.append(tried(kind))
        if dist.get_rank() == 0:
            print(*outcomes[-1], f"{time.monotonic() - begun:.0f} s", sep=" | ", flush=True)
    if dist.get_rank() == 0 and not chosen:
        PAGE.write_text(marks.written(PAGE.read_text(), {"families": page(outcomes)}, "tools/transformers_families.py"))
    dist.destroy_process_group()
    sys.exit(any(one.result == WRONG for one in outcomes))


if __name__ == "__main__":
    main()
