"""One rank of ``python -m ring_attn verify MODEL``."""

import argparse

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ring_attn.integrations.transformers.context import context_parallel
from ring_attn.verification.verdict import Verdict


def verify_model(options: argparse.Namespace) -> Verdict:
    """Of a model with few layers and random weights. Raises OSError where AutoConfig finds none."""
    config = AutoConfig.from_pretrained(options.what, trust_remote_code=options.trust_remote_code)
    with torch.device("meta"):  # its shapes decide how much of it is tried
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=options.trust_remote_code)
    vocabulary = config.get_text_config().vocab_size
    return context_parallel(model, layout=options.layout).verify(_batch(options.length, vocabulary, options.packed))


def _batch(length: int, vocabulary: int, packed: bool) -> dict[str, Tensor]:
    """``input_ids``, ``labels`` ``[rows, length]``, and ``position_ids`` of three uneven documents if packed."""
    tokens = torch.randint(3, vocabulary, (1 if packed else 2, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if packed:
        ends = [length // 5, length // 2, length]
        starts = [0, *ends[:-1]]
        batch["position_ids"] = torch.cat([torch.arange(b - a) for a, b in zip(starts, ends, strict=True)])[None]
        batch["labels"][0, starts] = -100
    return batch
