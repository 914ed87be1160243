"""The MLPs and norms of a transformers model in tiles of tokens."""

import inspect
from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from ring_attn.integrations.transformers.versions import PreTrainedModel
from ring_attn.training.tiles import Tiles, check_tile_size

# What layers call that part of them which computes each token by itself.
_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe", "experts")


def tiles_of(model: nn.Module, config: object, size: int) -> dict[nn.Module, Tiles]:
    """The modules to be computed ``size`` tokens at a time, each with its new forward. NotImplementedError where there is no MLP.

    Of a mixture of experts it is the experts, given their routing: routers see all tokens, so that their losses stay exact. Norms
    that transformers computes in float32 are among them: until the backward they would hold half of what a layer saves.
    """
    check_tile_size(size, "mlp_tile")
    texts = [x for x in model.modules() if isinstance(x, PreTrainedModel) and type(x.config) is type(config)]
    layers = _layers(texts)
    tiles = {part: Tiles(part, size) for layer in layers for block in _blocks(layer) for part in _parts(block)}
    if not tiles:
        raise NotImplementedError(
            f"the layers of {type(model).__name__} hold no module that is known as their MLP ({', '.join(_NAMES)}); leave mlp_tile "
            "out, or call ring_attn.tiled with modules of theirs that compute each token by itself"
        )
    within = {x for part in tiles for x in part.modules()}
    places = *(layer.modules() for layer in layers), *(text.children() for text in texts)  # the last norm is a child of the model
    width = getattr(config, "hidden_size", None)
    return tiles | {norm: Tiles(norm, size, width, asked=False) for place in places for norm in _norms(place) if norm not in within}


def _layers(texts: Iterable[nn.Module]) -> list[nn.Module]:
    """Of text models alone: those of images are short."""
    layers = (layer for text in texts for stack in text.children() if isinstance(stack, nn.ModuleList) for layer in stack)
    return list(dict.fromkeys(layers))


def _blocks(layer: nn.Module) -> Iterator[nn.Module]:
    return (child for name, child in layer.named_children() if name in _NAMES)


def _norms(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """torch's own hold no float32 copies."""
    return (x for x in modules if type(x).__name__.endswith("Norm") and not type(x).__module__.startswith("torch."))


def _parts(block: nn.Module) -> list[nn.Module]:
    experts = getattr(block, "experts", None)
    if not isinstance(experts, nn.Module) or isinstance(experts, nn.ModuleList) or not _is_routed(experts):
        return [block]
    return [experts, *(child for name, child in block.named_children() if name.startswith("shared_") and _has_weights(child))]


def _is_routed(experts: nn.Module) -> bool:
    """Whether it is given each token's experts, and does not read them off the order of its rows (Llama 4's)."""
    return len(inspect.signature(experts.forward).parameters) > 1


def _has_weights(module: nn.Module) -> bool:
    """More than one: a shared expert, and not the gate before it."""
    return sum(1 for x in module.parameters() if x.ndim > 1) > 1


def check_tiles(model: PreTrainedModel, tiles: Mapping[nn.Module, Tiles], options: Mapping[str, object]) -> None:
    """Before each forward: ``torch.compile`` and requests for router logits may come at any time."""
    if not tiles:
        return
    if (name := _compiled_around(model, tiles)) is not None:
        raise NotImplementedError(
            f"mlp_tile: {name} is compiled, and a graph of torch.compile would hold what all tiles make; compile the attention of "
            "layers alone (layer.self_attn.compile()), or leave mlp_tile out"
        )
    asked = options.get("output_router_logits")
    if asked is None:
        asked = getattr(model.config.get_text_config(), "output_router_logits", False)
    if asked and (kind := _recorded_in_tiles(model, tiles)) is not None:
        raise NotImplementedError(
            f"output_router_logits: transformers records what {kind} returns, which mlp_tile has computed a tile at a time and "
            "without gradients; leave one of the two out"
        )


def _recorded_in_tiles(model: nn.Module, tiles: Mapping[nn.Module, Tiles]) -> str | None:
    """The class of modules inside of tiles whose results are recorded as router logits."""
    for part in model.modules():
        recorder = (getattr(type(part), "_can_record_outputs", None) or {}).get("router_logits")
        for each in recorder if isinstance(recorder, list) else [recorder]:
            kind = getattr(each, "target_class", each)
            if isinstance(kind, type) and any(isinstance(x, kind) for block in tiles for x in block.modules() if x is not block):
                return kind.__name__
    return None


def _compiled_around(model: nn.Module, tiles: Mapping[nn.Module, Tiles]) -> str | None:
    """The name of a module that is compiled and has tiles in it."""
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None and any(x in tiles and tiles[x].asked for x in module.modules()):
            return name or type(module).__name__
    return None
