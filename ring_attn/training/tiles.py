"""A module that computes each token by itself, in tiles of tokens: what it makes in between exists for one tile at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from ring_attn.functional import is_dtensor
from ring_attn.sharding.autograd import Context
from ring_attn.training.partial_gradients import added, hooks_off, unknown_leaf
from torch_bridge.tracing import untraced

TILE = 4096  # tokens: in 16 bits an MLP of 12,288 makes 0.3 GiB of them
_FEW = 4  # tokens that are computed together and alone, once
_NEAR = 0.02  # of the largest number: other shapes of a product may round otherwise in 16 bits
Module = TypeVar("Module", bound=nn.Module)


def tiled(module: Module, tile_size: int = TILE) -> Module:
    """``module`` itself, whose ``forward`` from now on computes ``tile_size`` tokens at a time: an MLP, dense or of experts, or
    anything that computes each token by itself. Its class, hooks, parameters and state dict stay; ``del module.forward`` undoes it.

    ```
    layer.mlp = ring_attn.tiled(layer.mlp, 4096)
    ```

    Every tensor among its arguments has a row for each token, ``[..., tokens, width]`` or ``[batch * tokens, width]``, and so have
    its results, a tensor or a tuple of them. All else is given to each tile as it is.

    Until the backward its inputs alone are held. The backward computes each tile again and adds the parameters' gradients up in
    float32 (float64 of float64). Results and gradients are the plain ones within rounding, with the plain ones' bits where the
    tokens fit one tile, which is computed as ever. Inside of an activation checkpoint nothing is computed more often than without
    tiles, unless the checkpoint is reentrant or what follows in it needs the result. FSDP2 around it gathers once.

    Hooks of its own see all tokens, hooks of modules in it a tile at a time, in the backward again. Dropout is drawn a tile at a
    time, and again alike. Autograd's inputs are changed by no tile, so the module must not change them in place either.

    Raises ValueError for what is no module, a size that is no count and a module in tiles already; at the first call
    NotImplementedError where a token's result depends on other tokens, where the module uses a tensor with a gradient that is none
    of its parameters, and where a module in it is in FSDP2 by itself, which would gather once a tile; under ``torch.compile``, and
    where gradients are to be differentiated again. Compile what is inside of the module instead.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"tiled must be given an nn.Module, got {type(module).__name__}")
    if isinstance(vars(module).get("forward"), Tiles):
        raise ValueError(f"this {type(module).__name__} is in tiles already; call del module.forward first")
    module.forward = Tiles(module, tile_size)
    return module


def check_tile_size(size: object, name: str = "tile_size") -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} must be a positive int, the tokens that are computed at a time; got {size!r}")


class Tiles:
    """In the place of a module's ``forward``. ``width``: of what ``size`` is meant for: of narrower rows, as those of heads, a tile
    has as many numbers. ``asked``: False for a module that nobody named: what cannot be in tiles is computed as ever."""

    def __init__(self, module: nn.Module, size: int, width: int | None = None, asked: bool = True) -> None:
        check_tile_size(size)
        self.module, self.size, self.width, self.asked, self.forward = module, size, width, asked, module.forward
        self._tried = self._left = False

    def __call__(self, *arguments: object, **options: object) -> object:
        if not self.asked and (torch.compiler.is_compiling() or _are_functorch_transforms_active()):
            return self.forward(*arguments, **options)
        if torch.compiler.is_compiling():
            _refuse_compiled()
        tensors = [x for x in (*arguments, *options.values()) if isinstance(x, Tensor)]
        if self._left or not tensors or _tokens(tensors[0]) <= self.rows(tensors[0]):
            return self.forward(*arguments, **options)
        call, rows = _Call(self, arguments, options), [x.flatten(0, -2) for x in tensors]
        parameters = self.parameters()
        if _are_functorch_transforms_active():  # they have to see the operators
            self._check_inputs(tensors)
            tiles = [call([x[part] for x in rows]) for part in self.parts(rows[0])]
            return call.whole([torch.cat(parts) for parts in zip(*tiles, strict=True)], tensors)
        if not self._can(call, tensors, rows, parameters):
            return self.forward(*arguments, **options)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in (*rows, *parameters))):
            with torch.no_grad():
                return call.whole(_computed(call, rows), tensors)
        inputs = _SavedInputs.apply(len(rows), *rows, *parameters[:1])
        return call.whole(_InTiles.apply(call, inputs, len(rows), *rows, *parameters), tensors)

    def rows(self, x: Tensor) -> int:
        """Of a tile of ``x``."""
        width = x.shape[-1] if x.ndim else 0
        return self.size if self.width is None or width >= self.width or not width else self.size * self.width // width

    def parts(self, x: Tensor) -> Iterator[slice]:
        """Of rows ``x [tokens, width]``."""
        rows = self.rows(x)
        return (slice(start, start + rows) for start in range(0, len(x), rows))

    def _can(self, call: "_Call", tensors: Sequence[Tensor], rows: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
        try:
            self._check_inputs(tensors)
            self._try(call, rows, parameters)
        except (NotImplementedError, RuntimeError):
            if self.asked:
                raise
            self._left = True
        return not self._left

    def parameters(self) -> list[nn.Parameter]:
        return [x for x in self.module.parameters() if x.requires_grad]

    def _check_inputs(self, tensors: Sequence[Tensor]) -> None:
        tokens = _tokens(tensors[0])
        wrong = next((x for x in tensors if _tokens(x) != tokens), None)
        if wrong is not None:
            raise NotImplementedError(
                f"{self._name} cannot be computed in tiles: it is given a tensor {list(wrong.shape)} that has no row for each of "
                f"{tokens} tokens; leave it as it is"
            )
        if any(map(is_dtensor, tensors)):
            raise NotImplementedError(
                f"{self._name} cannot be computed in tiles of a DTensor; give it this rank's tokens, x.to_local()"
            )

    @property
    def _name(self) -> str:
        return type(self.module).__name__

    def _try(self, call: "_Call", rows: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Once: whether few tokens together and each by itself give the same, without what is drawn at random. Most of them must:
        a token whose experts are nearly tied may get others by another rounding."""
        if self._tried or torch.is_inference_mode_enabled():
            return
        self._check_modules()
        few = [x[:_FEW].detach() for x in rows]
        # A checkpoint around it counts what is saved, and this is not.
        with _evaluating(self.module), saved_tensors_hooks(_itself, _itself), torch.enable_grad():
            together = call(few)
            leaf = unknown_leaf(together, parameters)
            alone = [call([x[token : token + 1] for x in few]) for token in range(len(few[0]))]
        if leaf is not None:
            raise NotImplementedError(
                f"{self._name} uses a tensor {list(leaf.shape)} that needs a gradient and is none of its parameters, so in tiles "
                "it would get none: make it a parameter of the module, or give it as an argument with a row for each token"
            )
        differences = sum(
            _difference(x, torch.cat([each[at] for each in alone])) for at, x in enumerate(together) if x.is_floating_point()
        )
        if isinstance(differences, Tensor) and 2 * int((differences > 0).sum()) > len(few[0]):
            raise NotImplementedError(
                f"{self._name} cannot be computed in tiles: what it makes of a token depends on other tokens; leave it as it is"
            )
        self._tried = True

    def _check_modules(self) -> None:
        inside = ((name, x) for name, x in self.module.named_modules() if name)
        name = next((name for name, x in inside if any(kind.__name__ == "FSDPModule" for kind in type(x).__mro__)), None)
        if name is not None:
            raise NotImplementedError(
                f"{name} in {self._name} is in FSDP2 by itself, and would be gathered once a tile: call fully_shard of the layer "
                f"or of {self._name}, and not of modules in it"
            )


class _Call:
    """A call of a module, as a function of its tensors' rows ``[tokens, width]``. It holds none of them."""

    def __init__(self, tiles: Tiles, arguments: tuple[object, ...], options: Mapping[str, object]) -> None:
        self.tiles, self._positional, self._names = tiles, len(arguments), tuple(options)
        values = [*arguments, *options.values()]
        self._dims = {place: x.ndim for place, x in enumerate(values) if isinstance(x, Tensor)}
        self._others = [None if isinstance(x, Tensor) else x for x in values]
        self._single, self._result_dims = False, list[int]()  # whether it returns one tensor; the dims of what it returns

    def __call__(self, rows: Sequence[Tensor]) -> list[Tensor]:
        values = list(self._others)
        for (place, dims), x in zip(self._dims.items(), rows, strict=True):
            values[place] = x.view(*(1,) * (dims - 2), *x.shape)
        named = dict(zip(self._names, values[self._positional :], strict=True))
        result = self.tiles.forward(*values[: self._positional], **named)
        self._single = isinstance(result, Tensor)
        outputs = [result] if self._single else list(result) if isinstance(result, tuple) else []
        if not outputs or not all(isinstance(x, Tensor) and x.ndim > 1 and _tokens(x) == len(rows[0]) for x in outputs):
            raise NotImplementedError(
                f"{type(self.tiles.module).__name__} cannot be computed in tiles: it does not return tensors with a row for each "
                "token; leave it as it is"
            )
        self._result_dims = [x.ndim for x in outputs]
        return [x.flatten(0, -2) for x in outputs]

    def whole(self, rows: Sequence[Tensor], tensors: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        """What the module returns of all tokens, with the leading dims of an argument of as many dims."""
        lead = {x.ndim: x.shape[:-1] for x in reversed(tensors)}
        outputs = [x.unflatten(0, lead[dims]) if dims in lead else x for x, dims in zip(rows, self._result_dims, strict=True)]
        return outputs[0] if self._single else tuple(outputs)


class _SavedInputs(torch.autograd.Function):
    """A node that holds the tiles' inputs, before theirs: a checkpoint's second run has all that it needs once they are there, and
    computes no tile."""

    @staticmethod
    def forward(ctx: FunctionCtx, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[:count])
        ctx.set_materialize_grads(False)
        return tensors[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Context, _: Tensor | None) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class _Tiled(Context, Protocol):
    call: _Call
    saved: Any  # the node of ``_SavedInputs``
    count: int
    surroundings: "_Surroundings"


class _InTiles(torch.autograd.Function):
    """``count`` inputs and the parameters -> what the module makes of them."""

    @staticmethod
    def forward(ctx: _Tiled, call: _Call, saved: Tensor, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        rows = tensors[:count]
        ctx.call, ctx.saved, ctx.count, ctx.surroundings = call, saved.grad_fn, count, _Surroundings(rows[0])
        ctx.set_materialize_grads(False)
        outputs = _computed(call, rows)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: _Tiled, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "the gradients of a module in tiles are not differentiable again (create_graph=True); leave the module as it is"
            )
        rows, parameters = ctx.saved.saved_tensors, ctx.call.tiles.parameters()
        needed = ctx.needs_input_grad[3 : 3 + ctx.count]
        # Rows of which some tile makes no gradient get zeros, as a slice's backward gives.
        of_rows = [torch.zeros_like(x) if need else None for x, need in zip(rows, needed, strict=True)]
        sums: list[Tensor | None] = [None] * len(parameters)
        with ctx.surroundings.again():
            for part in ctx.call.tiles.parts(rows[0]):
                inputs = [x[part].detach().requires_grad_(need) for x, need in zip(rows, needed, strict=True)]
                wanted = [x for x in inputs if x.requires_grad]
                gradients = _of_tile(ctx.call, inputs, [None if x is None else x[part] for x in cotangents], [*wanted, *parameters])
                for whole in of_rows:
                    if whole is not None and (gradient := gradients.pop(0)) is not None:
                        whole[part] = gradient
                sums = [added(total, gradient) for total, gradient in zip(sums, gradients, strict=True)]
        of_parameters = [x if x is None else x.to(like.dtype) for x, like in zip(sums, parameters, strict=True)]
        return None, None, None, *of_rows, *of_parameters


def _of_tile(call: _Call, inputs: list[Tensor], cotangents: list[Tensor | None], wanted: list[Tensor]) -> list[Tensor | None]:
    with torch.enable_grad():
        results = call(inputs)
    pairs = [(x, g) for x, g in zip(results, cotangents, strict=True) if g is not None and x.requires_grad]
    if not pairs:
        return [None] * len(wanted)
    outputs, given = zip(*pairs, strict=True)
    with hooks_off(wanted):
        return list(torch.autograd.grad(outputs, wanted, given, allow_unused=True))


def _computed(call: _Call, rows: Sequence[Tensor]) -> list[Tensor]:
    whole: list[Tensor] = []
    for part in call.tiles.parts(rows[0]):
        outputs = call([x[part] for x in rows])
        whole = whole or [x.new_empty(len(rows[0]), x.shape[-1]) for x in outputs]
        for x, of_part in zip(whole, outputs, strict=True):
            x[part] = of_part
    # Weights that autocast has cast here have no graph.
    torch.clear_autocast_cache()
    return whole


class _Surroundings:
    """What a run depends on beside its arguments: the generators of random numbers, and autocast."""

    def __init__(self, x: Tensor) -> None:
        self._kind = x.device.type
        self._autocast = torch.is_autocast_enabled(self._kind), torch.get_autocast_dtype(self._kind)
        self._on_host, (self._devices, self._states) = torch.get_rng_state(), get_device_states(x)

    @contextmanager
    def again(self) -> Iterator[None]:
        enabled, dtype = self._autocast
        forked = torch.random.fork_rng(self._devices, device_type=self._kind if self._devices else "cuda")
        with forked, torch.autocast(self._kind, dtype=dtype, enabled=enabled):
            torch.set_rng_state(self._on_host)
            set_device_states(self._devices, self._states, device_type=self._kind)
            torch.clear_autocast_cache()
            yield


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = [x for x in module.modules() if x.training]
    for x in training:
        x.training = False
    try:
        yield
    finally:
        for x in training:
            x.training = True


def _tokens(x: Tensor) -> int:
    return x.shape[:-1].numel() if x.ndim else 0


def _difference(x: Tensor, other: Tensor) -> Tensor:
    """1 for each row that is not near the other's."""
    x, other = x.detach().float(), other.detach().float()
    return ((x - other).abs().amax(-1) > _NEAR * x.abs().max()).int()


def _itself(x: Tensor) -> Tensor:
    return x


@untraced
def _refuse_compiled() -> None:
    raise NotImplementedError(
        "a module in tiles cannot be in a graph of torch.compile, which would hold what all tiles make; compile what is inside of "
        "the module (its children), or leave tiles out"
    )
