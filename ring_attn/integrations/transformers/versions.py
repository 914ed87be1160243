"""All that is taken from inside transformers, beyond what it documents, and the words for a version that does not have it."""

import inspect
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

import transformers
from torch import Tensor, nn

try:
    from transformers import AttentionInterface, GenerationConfig, PretrainedConfig, PreTrainedModel
    from transformers import masking_utils as masks
    from transformers.cache_utils import Cache, DynamicCache
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.utils import ModelOutput
except ImportError as error:
    raise ImportError(
        "ring_attn.integrations.transformers needs transformers 4.53 or newer, the first with an interface for mask functions "
        f"(transformers.masking_utils.AttentionMaskInterface) and with shift_labels in its losses; {transformers.__version__} is "
        "installed"
    ) from error

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "Cache",
    "DynamicCache",
    "GenerationConfig",
    "ModelOutput",
    "PreTrainedModel",
    "PretrainedConfig",
]


def _inner(name: str) -> CodeType | None:
    """The code of the functions that a factory of ``masking_utils`` makes; None where this version has no such factory."""
    factory = getattr(masks, name, None)
    codes = () if factory is None else factory.__code__.co_consts
    return next((code for code in codes if inspect.iscode(code) and not code.co_name.startswith("<")), None)


_FACTORIES = (
    "and_masks",
    "or_masks",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "chunked_overlay",
)
_FACTORY_OF = {code: name for name in _FACTORIES if (code := _inner(name)) is not None}
# Newer versions count windows and chunks from the start of a document that position ids tell.
counts_within_documents = hasattr(masks, "remap_positions_for_packed_sequence")
_PLAIN = {
    function: name
    for name in ("causal_mask_function", "bidirectional_mask_function")
    if (function := getattr(masks, name, None)) is not None
}


def origin(function: Callable[..., object]) -> str | None:
    """The name of the mask function of transformers, or of the factory that made it; None for any other."""
    if function in _PLAIN:
        return _PLAIN[function]
    return _FACTORY_OF.get(getattr(function, "__code__", None))  # type: ignore[arg-type]


def captured(function: Callable[..., object]) -> dict[str, Any]:
    """What a function closes over, by name."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def mask_function_of(implementation: str) -> Callable[..., object] | None:
    """The mask function of another attention implementation; None where it needs no mask."""
    return masks.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.get(implementation)


def attention_function_of(implementation: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Another attention implementation, as the layer ``module`` would call it; "eager" is one of its modelling file."""
    if implementation in AttentionInterface._global_mapping:
        return AttentionInterface._global_mapping[implementation]
    return in_modelling_file(module, "eager_attention_forward")


def pretrained_in(module: nn.Module) -> PreTrainedModel | None:
    """The transformers model that a module is or wraps; None where there is none."""
    return next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)


def uses_the_interface(model: PreTrainedModel) -> bool:
    """Whether the layers of the model, or of the text model in it (LLaVA's), look their attention function up by name."""
    text = type(model.config.get_text_config())
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel) and type(part.config) is text)
    return any(in_modelling_file(part, "ALL_ATTENTION_FUNCTIONS") is not None for part in (model, *parts))


def load_balancing_loss(model: nn.Module) -> Callable[..., Tensor] | None:
    """The auxiliary loss of the routers, as the model's modelling file defines it."""
    return in_modelling_file(model, "load_balancing_loss_func")


def mentions(module: nn.Module, name: str) -> bool:
    """Whether the modelling file of a module's class, or of one of its bases, has this name in its text."""
    kinds = (kind.__module__ for kind in type(module).__mro__ if kind not in PreTrainedModel.__mro__)
    return any(name in inspect.getsource(sys.modules[file]) for file in set(kinds) if ".modeling_" in file)


def in_modelling_file(module: nn.Module, name: str) -> Any:
    """What the file that defines a module's class has by this name, or None; also for a user's subclass, and for the class that
    FSDP makes of it."""
    files = [vars(sys.modules[kind.__module__]) for kind in type(module).__mro__ if kind not in PreTrainedModel.__mro__]
    return next((file[name] for file in files if name in file), None)
