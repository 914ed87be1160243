"""Layers with a state: the operators that transformers' layers look up at the call, on the ring.

A layer of a family in :data:`FAMILIES` finds its operators (:data:`OPERATORS`) by their names in its modelling file, whatever
kernels are behind them. There they are wrapped, once and for all models: outside of a layer of a sharded batch they are as before.
What a layer needs to know of its batch is in the mask that it is given, so that it is right where it is run again, in the backward
of a checkpoint.
"""

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dis import get_instructions
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ring_attn.integrations.transformers.calls import CALL, Call
from ring_attn.integrations.transformers.layers.attention import check_sharded
from ring_attn.integrations.transformers.layers.kernels import Operators
from ring_attn.integrations.transformers.layers.operators import FUSED, OPERATORS, LayerOnRing
from ring_attn.ring import Ring
from torch_bridge.call.counting import ON_CALL
from torch_bridge.tracing import untraced

# The folders of transformers' families whose layers mix tokens by these operators and by attention alone, and the first release
# in which they are looked up so.
FAMILIES = frozenset(
    (
        *("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_hybrid"),
        *("mamba2", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2"),
        *("lfm2", "lfm2_moe", "lfm3"),
        *("jamba", "zamba"),
    )
)
FIRST_RELEASE = "5.16"
_MASK = "create_recurrent_attention_mask"
_NAMES = frozenset(OPERATORS)


class StateMask:
    """What a layer with a state gets in the place of its mask. ``ring``: None where the batch is whole; ``ids``: int32 ``[batch,
    local]``, of documents, negative on padding, None for one a row without padding; ``mask``: transformers' own, of this rank's
    tokens. No dataclass: FSDP takes those apart."""

    ndim = 2

    def __init__(self, ring: Ring | None, ids: Tensor | None, mask: Tensor | None) -> None:
        self.ring, self.ids, self.mask = ring, ids, mask

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # copy and pickle ask for these
            raise AttributeError(name)
        raise NotImplementedError(
            f"this layer reads {name} of its mask, as of a tensor, and on a ring a layer with a state gets none; use the layers of "
            "transformers as they are"
        )


_LAYER: ContextVar[LayerOnRing | None] = ContextVar("ring_attn_layer_with_a_state", default=None)


def operators_of(module: nn.Module) -> tuple[frozenset[str], dict[str, Any]]:
    """The operators that a layer looks up, and the names of the file where; nothing for another module."""
    for kind in type(module).__mro__:
        forward = inspect.unwrap(vars(kind)["forward"]) if "forward" in vars(kind) else None
        if inspect.isfunction(forward) and not _NAMES.isdisjoint(forward.__code__.co_names):
            looked_up = {step.argval for step in get_instructions(forward) if step.opname == "LOAD_GLOBAL"}
            return _NAMES & looked_up, forward.__globals__
    return frozenset(), {}


def layers_with_a_state(model: nn.Module) -> dict[nn.Module, frozenset[str]]:
    """Those that look their operators up, and whose masks this version makes in one place."""
    found = ((module, *operators_of(module)) for module in model.modules())
    return {module: names for module, names, file in found if names and _MASK in file}


def family_of(module: nn.Module) -> str:
    """The name of transformers' folder that has a layer's file."""
    return operators_of(module)[1].get("__package__", "").split(".")[-1]


def on_the_ring(module: nn.Module, is_off: Callable[[], bool], operators: Operators | None) -> Callable[..., object]:
    """A layer's forward, whose operators run on the ring of the batch that its mask is of. ``operators``: what computes a rank's
    tokens there."""
    names, file = operators_of(module)
    for name in (*OPERATORS, *FUSED, _MASK):
        if name in file and not hasattr(file[name], "ring_attn"):
            file[name] = _of_masks(file[name]) if name == _MASK else _of_layers(name, file[name])
    forward = module.forward
    signature = inspect.signature(forward)

    @wraps(forward)
    @untraced
    def on_ring(*arguments: object, **options: object) -> object:
        bound = signature.bind(*arguments, **options)
        mask = bound.arguments.get("attention_mask")
        if not isinstance(mask, StateMask):
            if not is_off():
                raise NotImplementedError(_no_mask(module))
            return forward(*arguments, **options)
        bound.arguments["attention_mask"] = mask.mask
        if mask.ring is None:
            return forward(*bound.args, **bound.kwargs)
        layer = LayerOnRing({"ring": mask.ring, "segment_ids": mask.ids}, operators, set())
        before, listener = _LAYER.set(layer), ON_CALL.set(None)  # attentions are counted, these calls are not
        try:
            output = forward(*bound.args, **bound.kwargs)
        finally:
            _LAYER.reset(before)
            ON_CALL.reset(listener)
        if missing := names - layer.called:
            raise NotImplementedError(
                f"{_named(module)} did not call {', '.join(sorted(missing))}, by which it would have passed its state over the "
                "ring: another forward took the place of its own (use_kernels=True does so); leave that out"
            )
        return output

    return on_ring


def _named(module: nn.Module) -> str:
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', None)}"


def _no_mask(module: nn.Module) -> str:
    return (
        f"{_named(module)} got no mask from transformers' {_MASK} in the forward of the model that context_parallel was given, so "
        "it is not known which part of the sequence it has: call that model, or its base model, not another part of it"
    )


def _of_masks(original: Callable[..., Tensor | None]) -> Callable[..., object]:
    @wraps(original)
    def make(*arguments: object, **options: object) -> object:
        call = CALL.get()
        if call is None:
            return original(*arguments, **options)
        check_sharded(call)
        return _mask_of(call) if call.sharded is not None else StateMask(None, None, original(*arguments, **options))

    make.ring_attn = True  # type: ignore[attr-defined]
    return make


def _mask_of(call: Call) -> StateMask:
    assert call.sharded is not None
    sequence = call.sharded.sequences[call.part]
    hidden = None if sequence.hidden is None else ~sequence.ring.shard(sequence.hidden)
    # What comes after the last token is not seen, but would change a state that a cache keeps.
    ids = sequence.segments_with(sequence, causal=call.cache is None)[1]
    if ids is not None:
        from ring_attn.recurrence.documents import fix  # which loads JAX

        fix(ids)
    return StateMask(sequence.ring, ids, hidden)


def _of_layers(name: str, original: Callable[..., object]) -> Callable[..., object]:
    @wraps(original)
    def operator(*arguments: object, **options: object) -> object:
        # A layer on the ring is never in a graph; others' graphs need not know of it.
        layer = None if torch.compiler.is_compiling() else _LAYER.get()
        if layer is None:
            return original(*arguments, **options)
        if name in FUSED:
            return None
        layer.called.add(name)
        return OPERATORS[name](layer, *arguments, **options)

    operator.ring_attn = True  # type: ignore[attr-defined]
    return operator
