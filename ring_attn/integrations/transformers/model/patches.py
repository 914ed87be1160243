"""What is changed in a model, and undone: configurations, layers with a bias of positions, rotary embeddings, layers with a
state, ``generate``."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from torch import nn
from torch.utils.hooks import RemovableHandle

from ring_attn.integrations.transformers.calls import CALL
from ring_attn.integrations.transformers.layers.attention import NAME
from ring_attn.integrations.transformers.layers.kernels import Operators
from ring_attn.integrations.transformers.layers.positions import (
    embeds_positions,
    has_relative_bias,
    of_this_rank,
    relative_bias,
    sees_the_longest,
)
from ring_attn.integrations.transformers.layers.states import on_the_ring
from ring_attn.integrations.transformers.model.plan import Plan
from ring_attn.integrations.transformers.versions import PretrainedConfig, PreTrainedModel
from ring_attn.ring import Ring


class Owner(Protocol):
    """The ``ContextParallel`` of a model. ``off``: whether it runs as it did before. ``operators``: of layers with a state."""

    @property
    def off(self) -> bool: ...

    @property
    def operators(self) -> Operators | None: ...

    def generate(self, *arguments: object, **options: object) -> object: ...


class Patches:
    """Applied when made. The model gets configurations of its own: another model may have been made with the same ones."""

    def __init__(self, plan: Plan, ring: Ring, owner: Owner, forwards: Mapping[nn.Module, Callable[..., object]]) -> None:
        self._set: list[tuple[nn.Module, str, object]] = []  # module, attribute, what it was
        self._configs: list[PretrainedConfig] = []
        # Configuration, the model's own copy, and what was in it.
        self._copied: list[tuple[PretrainedConfig, PretrainedConfig, dict[str, object]]] = []
        self._hooks: list[RemovableHandle] = []
        self._previous = plan.config._attn_implementation
        self._copy_configs(plan)
        for module, forward in forwards.items():
            self._assign(module, "forward", forward)
        if hasattr(plan.model, "generate"):
            self._assign(plan.model, "generate", owner.generate)
        for module in plan.model.modules():
            if not plan.takes_positions and embeds_positions(module):
                for name, function in of_this_rank(module, lambda: owner.off).items():
                    self._assign(module, name, function)
            if has_relative_bias(layer := module):
                self._assign(module, "compute_bias", relative_bias(layer, ring, lambda: owner.off))
            if module in plan.states:
                self._assign(module, "forward", on_the_ring(module, lambda: owner.off, owner.operators))
            self._hooks += sees_the_longest(module)
        if plan.encoder_decoder:
            self._follow(plan)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """The model's own attention for a while."""
        self._use(self._previous)
        try:
            yield
        finally:
            self._use(NAME)

    def undo(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module, name, before in reversed(self._set):
            if before is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, before)
        self._use(self._previous)
        for original, copied, before in self._copied:
            _set_back(original, copied, before)
        for left in (self._hooks, self._set, self._configs, self._copied):
            left.clear()

    def _use(self, implementation: str) -> None:
        for config in self._configs:
            config._attn_implementation = implementation

    def _assign(self, module: nn.Module, name: str, value: object) -> None:
        self._set.append((module, name, vars(module).get(name, _ABSENT)))
        setattr(module, name, value)

    def _copy_configs(self, plan: Plan) -> None:
        copies: dict[int, PretrainedConfig] = {}
        self._replace(plan.model, copies)
        # Some versions give the layers a copy of the text configuration, so it is told by its type.
        sharded = plan.model.config.get_text_config()
        configs = {id(x): x for x in (sharded, *_configs(plan.model)) if type(x) is type(sharded)}
        self._configs = list(configs.values())
        self._replace_all({} if plan.whole_encoder is None else _attend_to_whole(plan.model))
        self._use(NAME)

    def _replace_all(self, modules: dict[nn.Module, None]) -> None:
        copies: dict[int, PretrainedConfig] = {}
        for module in modules:
            self._replace(module, copies, deep=False)

    def _replace(self, root: nn.Module, copies: dict[int, PretrainedConfig], deep: bool = True) -> None:
        for module in root.modules() if deep else (root,):
            for name, value in list(vars(module).items()):
                if isinstance(value, PretrainedConfig):
                    if id(value) not in copies:
                        self._copied += [(x, y, copy.deepcopy(vars(x))) for x, y in _pairs(value, copy.deepcopy(value, copies))]
                    self._assign(module, name, copies[id(value)])

    def _follow(self, plan: Plan) -> None:
        """Notes which half of the model runs."""
        for part, module in (("encoder", plan.model.get_encoder()), ("decoder", plan.model.get_decoder())):

            def enter(module: nn.Module, inputs: object, part: str = part) -> None:
                call = CALL.get()
                if call is not None:
                    call.part = part

            self._hooks.append(module.register_forward_pre_hook(enter))


_ABSENT = object()


def _pairs(config: PretrainedConfig, copied: PretrainedConfig) -> Iterator[tuple[PretrainedConfig, PretrainedConfig]]:
    """A configuration and those in it, each with its copy."""
    yield config, copied
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from _pairs(value, vars(copied)[name])


def _set_back(original: object, copied: object, before: dict[str, object]) -> None:
    """What was changed in a copy since it was made is changed in the original too."""
    for name, value in vars(copied).items():
        inner = isinstance(value, PretrainedConfig)  # has a pair of its own
        if not inner and name != "_attn_implementation_internal" and (name not in before or before[name] != value):
            setattr(original, name, value)


def _configs(model: nn.Module) -> Iterator[PretrainedConfig]:
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, PretrainedConfig))


def _attend_to_whole(model: PreTrainedModel) -> dict[nn.Module, None]:
    """The modules that attend to whole sequences on every rank: those of an encoder of features, and the decoder's layers that
    attend to what it returned."""
    encoder = list(model.get_encoder().modules())
    cross = [module for module in model.get_decoder().modules() if getattr(module, "is_causal", True) is False]
    return dict.fromkeys(encoder + cross)
