"""Layers with a state along the sequence, for torch tensors."""

from ring_attn.recurrence.functions import Along, Result, causal_conv1d, gated_delta_rule, kda, linear_attention, ssd

__all__ = ["Along", "Result", "causal_conv1d", "gated_delta_rule", "kda", "linear_attention", "ssd"]
