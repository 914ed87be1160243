"""What has to be known of a model before it is sharded, and what cannot be."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ring_attn.integrations.transformers.layers.positions import (
    counts_from_ids,
    embeds_positions,
    has_relative_bias,
    knows_its_bias,
)
from ring_attn.integrations.transformers.layers.states import FAMILIES, FIRST_RELEASE, family_of, layers_with_a_state
from ring_attn.integrations.transformers.model.table import BOTH, OPTIONS, STATES, check_layer_types, types_of
from ring_attn.integrations.transformers.versions import (
    Cache,
    PretrainedConfig,
    PreTrainedModel,
    counts_within_documents,
    in_modelling_file,
    mentions,
    pretrained_in,
    uses_the_interface,
)
from ring_attn.ring import Ring

# Heads by the names of their classes, and whether a token's label is the token after it.
_HEADS = {
    "ForCausalLM": True,
    "LMHeadModel": True,
    "GenerationDecoder": True,
    "ForConditionalGeneration": True,
    "MTModel": True,
    "ForMaskedLM": False,
    "ForTokenClassification": False,
}
_ONE_TOKEN = "reads tokens that one rank has (the first, or the last)"
_OTHER_HEADS = {
    "ForSequenceClassification": _ONE_TOKEN,
    "ForMultipleChoice": _ONE_TOKEN,
    "ForNextSentencePrediction": _ONE_TOKEN,
    "DoubleHeads": _ONE_TOKEN,
    "WithProjection": _ONE_TOKEN,
    "ForQuestionAnswering": "chooses positions by a softmax over the whole sequence",
}


@dataclass(frozen=True)
class Plan:
    """``base``: the model without its head, which losses in chunks call, or the model itself where it holds no such part.
    ``whole_encoder``: the name of the encoder's input where that is no sequence of tokens: every rank encodes all of it.
    ``states``: the layers with a state, and the operators that each looks up."""

    model: PreTrainedModel
    base: PreTrainedModel
    config: PretrainedConfig
    head: str | None
    encoder_decoder: bool
    whole_encoder: str | None
    parameters: frozenset[str]
    layers: dict[str, int]
    states: dict[nn.Module, frozenset[str]] = field(default_factory=dict)
    counts_within_documents: bool = counts_within_documents

    @property
    def shifts_labels(self) -> bool:
        # A decoder by itself (BartForCausalLM) takes labels as the encoder-decoder of its kind does: each where it is predicted.
        alone = any(type(part).__name__.endswith("DecoderWrapper") for part in self.model.children())
        return not (self.encoder_decoder or alone) and self.head is not None and _HEADS[self.head]

    @property
    def pad_id(self) -> int:
        token = getattr(self.config, "pad_token_id", None)
        return token if isinstance(token, int) and token >= 0 else 0

    @property
    def masks_read_token_types(self) -> bool:
        """As Gemma 3's and PaliGemma's do. Or else embeddings do: BERT's of their own, GPT-2's those of the tokens."""
        readers = "block_sequence_ids", "token_type_ids_mask_function"
        return not getattr(self.config, "type_vocab_size", 0) and any(mentions(self.model, name) for name in readers)

    @property
    def takes_positions(self) -> bool:
        return self.takes("decoder_position_ids" if self.encoder_decoder else "position_ids")

    @property
    def axes(self) -> int:
        """Of the coordinates in position ids ``[axes (+ 1), batch, seq]``, if it takes any: HunYuan's may have four."""
        return len((getattr(self.config, "rope_parameters", None) or {}).get("mrope_section") or ()) or 3

    @property
    def takes_use_cache(self) -> bool:
        """Also where the model passes it on to its base model, among others (Granite 4)."""
        signatures = [inspect.signature(module.forward).parameters for module in (self.model, self.base)]
        passes_on = any(x.kind == inspect.Parameter.VAR_KEYWORD for x in signatures[0].values())
        return "use_cache" in signatures[0] or (passes_on and "use_cache" in signatures[1])

    def takes(self, name: str) -> bool:
        return name in self.parameters

    def decoder_inputs(self, labels: Tensor) -> Tensor:
        """Labels shifted to the right, as the model itself would from whole ones."""
        if hasattr(self.model, "prepare_decoder_input_ids_from_labels"):
            return self.model.prepare_decoder_input_ids_from_labels(labels)
        shift = in_modelling_file(self.model, "shift_tokens_right")
        return shift(labels, self.config.pad_token_id, self.config.decoder_start_token_id)

    def check_labels(self) -> None:
        if self.head is None:
            raise ValueError(f"{type(self.model).__name__} has no head, so labels mean nothing to it; leave them out")
        if "_loss_function" in vars(self.model):
            raise NotImplementedError("model.loss_function was replaced; compute the loss from outputs.logits, without labels")

    def positions_of(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """Positions ``[batch, seq]`` as the model itself counts them from whole ids, where it does (RoBERTa's); else None.
        ValueError where it would count them from a mask, of which a rank sees its part."""
        for name, module in self.model.named_modules():
            if (count := counts_from_ids(module)) is not None:
                # Of embeddings all are taken for tokens.
                ids = tokens if tokens.ndim == 2 else torch.full(tokens.shape[:2], module.padding_idx + 1, device=tokens.device)
                return count(ids, module.padding_idx)
            by_mask = isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters
            if by_mask and mask is not None and not bool((mask != 0).all()):
                raise ValueError(f"{name} counts positions by the tokens it sees, which are one rank's; give position_ids too")
        return None

    def check_layout(self, ring: Ring) -> None:
        """NotImplementedError where layers with a state would have a piece of the sequence at each token."""
        if self.states and ring.layout == "striped":
            raise NotImplementedError(
                f"{type(self.model).__name__} carries a state along the sequence, from each token to the next, and "
                'layout="striped" gives a rank every n-th token; use layout="zigzag", "contiguous" or a plan of balance'
            )

    def check_attended(self, attended: Mapping[str, int], groups: int) -> None:
        """NotImplementedError where fewer attentions than layers went through the ring, ``groups`` of them a layer."""
        for part, layers in self.layers.items():
            if attended[part] // groups < layers:
                whose = ("" if len(self.layers) == 1 else f"the {part} of ") + type(self.model).__name__
                raise NotImplementedError(
                    f"{attended[part] // groups} attentions of {whose} went through the ring, but it has {layers} layers: the "
                    "others attended to this rank's tokens alone, or carry a state along the sequence"
                )

    @property
    def cache_name(self) -> str:
        return "past_key_values" if self.takes("past_key_values") else "cache_params"

    def check_cache(self) -> None:
        """NotImplementedError where a cache over the ring could not keep what the model carries from token to token."""
        kind, reason = type(self.model).__name__, None
        if self.encoder_decoder:
            reason = "its decoder attends to an encoder's output, too"
        elif "layers" not in inspect.signature(Cache.__init__).parameters:
            reason = f"transformers {transformers.__version__} has another kind of caches; 4.57 or newer is needed"
        if reason is not None:
            raise NotImplementedError(
                f"a cache over the ring cannot be made for {kind}: {reason}. model.generate without past_key_values instead "
                "generates on each rank by itself"
            )

    @property
    def against_any_order(self) -> str | None:
        """Why tokens may not lie in any order, each told its position, in words; None where they may."""
        if self.states:
            return (
                f"place_documents=True cuts documents where it likes, and {type(self.model).__name__} carries a state along the "
                "sequence, in the pieces of a layout; leave it out"
            )
        if self.encoder_decoder or not self.takes_positions or any(has_relative_bias(module) for module in self.model.modules()):
            return f"place_documents=True is for decoders that take position_ids, not for {type(self.model).__name__}; leave it out"
        return None

    def check_length(self, length: int) -> None:
        for name, module in self._routers:
            capacity = module.expert_capacity
            if capacity < length:
                raise ValueError(
                    f"{name} drops the tokens beyond expert_capacity={capacity}, counted along the whole sequence, of which a rank "
                    f"has a part; set expert_capacity to at least the sequence's length, {length}, and none are dropped"
                )

    @cached_property
    def _routers(self) -> list[tuple[str, Any]]:
        """Those that drop tokens."""
        modules = self.model.named_modules()
        return [(name, module) for name, module in modules if isinstance(getattr(module, "expert_capacity", None), int)]


def pretrained_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model that a module is or wraps; NotImplementedError for PEFT's virtual tokens, ValueError for none."""
    pretrained = pretrained_in(model)
    peft = (getattr(part, "active_peft_config", None) for part in model.modules())
    if any(getattr(config, "is_prompt_learning", False) for config in peft):
        raise NotImplementedError(
            "PEFT puts its virtual tokens before those that it sees, which are one rank's, or into a K/V cache (prefix tuning). "
            "Use LoRA; or make context_parallel of model.get_base_model(), give its cp.shard the inputs_embeds of the whole, "
            "virtual tokens (model.get_prompt) first, and sum with ring_attn.sync_gradients(model, ring=cp.ring)"
        )
    if pretrained is None:
        raise ValueError(f"context_parallel needs a transformers model, got {type(model).__name__}")
    return pretrained


def plan_of(model: PreTrainedModel) -> Plan:
    """NotImplementedError, by name of what stands in the way."""
    kind, config = type(model).__name__, model.config.get_text_config()
    encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    states = _states(model, config)
    check_layer_types(config, bool(states))
    _check_kind(model, encoder_decoder, bool(states))
    if not (_only_states(config, states) or uses_the_interface(model)):
        raise NotImplementedError(
            f"the layers of {kind} do not look their attention up in the AttentionInterface of this version of transformers, so "
            "they cannot be given another; a newer version may have it"
        )
    head = _head(model)
    parameters = frozenset(inspect.signature(model.forward).parameters)
    source = model.get_encoder().main_input_name if encoder_decoder else "input_ids"
    _check_layers(model, config)
    if not _only_states(config, states):
        _check_parameters(model, parameters, encoder_decoder)
    whole_encoder = None if source == "input_ids" else source
    layers = {"decoder": _attending(config)} if states else _layers(config, encoder_decoder, whole_encoder)
    return Plan(model, _base(model), config, head, encoder_decoder, whole_encoder, parameters, layers, states)


def _states(model: nn.Module, config: object) -> dict[nn.Module, frozenset[str]]:
    """The layers with a state, where all of them are known, or none. NotImplementedError where a newer transformers has them so."""
    expected = sum(kind in (*STATES, *BOTH) for kind in types_of(config))
    if not (expected or getattr(model, "_is_stateful", False)):
        return {}
    states = layers_with_a_state(model)
    if expected == len(states) and {family_of(module) for module in states} <= FAMILIES:
        return states
    family = next((kind.__module__.split(".")[-2] for kind in type(model).__mro__ if ".modeling_" in kind.__module__), "")
    if family in FAMILIES and not states:
        raise NotImplementedError(
            f"{type(model).__name__} carries a state along the sequence, which needs transformers {FIRST_RELEASE} or newer, "
            f"whose layers look their operators up at the call; {transformers.__version__} is installed"
        )
    return {}


def _attending(config: object) -> int:
    """How many layers of a family with states attend."""
    return sum(kind in (*OPTIONS, *BOTH) for kind in types_of(config))


def _only_states(config: object, states: dict[nn.Module, frozenset[str]]) -> bool:
    return bool(states) and not _attending(config)


def _layers(config: object, encoder_decoder: bool, whole_encoder: str | None) -> dict[str, int]:
    """How many layers must attend over the ring, by the part of the model."""
    count = getattr(config, "num_hidden_layers", None) or 1
    if not encoder_decoder:  # Mllama's cross-attention is skipped where there is no image
        return {"decoder": count - len(getattr(config, "cross_attention_layers", None) or ())}
    names = ("num_decoder_layers", "decoder_layers", "decoder_num_hidden_layers")
    decoder = next((layers for name in names if (layers := getattr(config, name, None))), 1)
    return {"decoder": decoder} if whole_encoder else {"encoder": count, "decoder": decoder}


def _check_kind(model: PreTrainedModel, encoder_decoder: bool, states: bool) -> None:
    kind, source = type(model).__name__, model.main_input_name
    if getattr(model, "_is_stateful", False) and not states:
        raise NotImplementedError(
            f"{kind} is recurrent: it carries a state along the sequence, and how its layers do so is not known here; known are "
            f"{', '.join(sorted(FAMILIES))}. Use one of these, or shard the batch instead of the sequence"
        )
    if source != "input_ids" and not encoder_decoder:
        raise NotImplementedError(
            f"{kind} takes {source}, no tokens: its layers convolve them, and a CTC loss runs, along the whole sequence, over the "
            "ends of the shards. Shard the batch instead of the sequence"
        )


def _head(model: nn.Module) -> str | None:
    names = [kind.__name__ for kind in type(model).__mro__]
    head = next((head for name in names for head in _HEADS if head in name), None)
    other = next((head for name in names for head in _OTHER_HEADS if head in name), None) if head is None else None
    if head is None and (other is not None or not names[0].endswith("Model")):
        reason = "is not known to make its outputs and its loss of each token by itself" if other is None else _OTHER_HEADS[other]
        raise NotImplementedError(f"the head of {names[0]} {reason}; use the model without it, and cp.unshard what it returns")
    return head


def _base(model: PreTrainedModel) -> PreTrainedModel:
    base = model.base_model
    if base is model:  # it names none: Llama 4, and in older versions all models of images and text
        base = getattr(model, "model", model)
    pretrained = pretrained_in(base) if isinstance(base, nn.Module) else None  # FSDP wraps it
    return model if pretrained is None else pretrained


def _check_layers(model: nn.Module, config: object) -> None:
    for name, module in model.named_modules():
        if getattr(module, "token_dropout", False) is True:
            raise NotImplementedError(
                f"{name} scales by the share of masked tokens that it sees, which are one rank's; set token_dropout=False"
            )
        if getattr(module, "trigram_input", False) is True:
            raise NotImplementedError(
                f"{name} joins each token's embedding with those of its neighbours, which another rank may have; set "
                "trigram_input=False"
            )
        if has_relative_bias(module) and not knows_its_bias(module):
            raise NotImplementedError(f"{name} makes its position bias in a way that is not known")
        if name.split(".")[-1] == "pooler":
            raise NotImplementedError(
                f"{name} reads the first token, which one rank has; make the model without it (add_pooling_layer=False)"
            )
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            raise NotImplementedError(f"{name} would leave out other layers on other ranks, which then wait forever; set it to 0")


def _check_parameters(model: nn.Module, parameters: frozenset[str], encoder_decoder: bool) -> None:
    name = "decoder_position_ids" if encoder_decoder else "position_ids"
    knows_positions = any(has_relative_bias(module) or embeds_positions(module) for module in model.modules())
    if name not in parameters and not knows_positions:
        raise NotImplementedError(
            f"{type(model).__name__} takes no {name}: it would count positions within this rank's tokens from 0"
        )
