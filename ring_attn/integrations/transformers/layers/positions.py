"""Layers that take the index in their input for the position in the sequence, put right: on a rank these differ."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ring_attn.integrations.transformers.calls import CALL
from ring_attn.integrations.transformers.sequence import Sequence
from ring_attn.integrations.transformers.versions import in_modelling_file
from ring_attn.ring import Ring
from ring_attn.sharding.sequence import positions


def at_global_positions(module: Any, query: Tensor, ring: Ring) -> Tensor:
    """Queries ``[batch, local, heads, dim]`` whose temperature a layer chose by their index (Llama 4's layers without rotary
    positions do), with that of their positions."""
    if ring.size == 1 or not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    local = query.shape[1]

    def temperature(at: Tensor) -> Tensor:
        return torch.log1p(torch.floor((at.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    index = torch.arange(local, device=query.device)
    position = ring.positions(local * ring.size, device=query.device)
    return query * (temperature(position).double() / temperature(index).double()).to(query.dtype)[:, None, None]


_FROM_IDS, _FROM_EMBEDDINGS = "create_position_ids_from_input_ids", "create_position_ids_from_inputs_embeds"


def counts_from_ids(module: nn.Module) -> Callable[..., Tensor] | None:
    """The function by which a layer counts positions from token ids and the padding's id, as RoBERTa's embeddings do; else None."""
    own = getattr(module, _FROM_IDS, None)
    return in_modelling_file(module, _FROM_IDS) if own is None and hasattr(module, _FROM_EMBEDDINGS) else own


def embeds_positions(module: nn.Module) -> bool:
    """Whether the layer makes embeddings of positions that the model's caller cannot give, but the ring can: BART's, M2M100's."""
    if not type(module).__name__.endswith("PositionalEmbedding"):
        return False
    return hasattr(module, _FROM_IDS) or "position_ids" in inspect.signature(type(module).forward).parameters


_Instead = Callable[[Sequence, tuple[object, ...], dict[str, object]], object]  # given positional and named arguments


def of_this_rank(module: nn.Module, is_off: Callable[[], bool]) -> dict[str, Callable[..., object]]:
    """What takes the place of a layer's functions, by name, so that it embeds this rank's positions."""

    def unless_whole(name: str, instead: _Instead) -> Callable[..., object]:
        original = getattr(module, name)

        def function(*arguments: object, **options: object) -> object:
            sequence = None if is_off() else _sequence()
            return original(*arguments, **options) if sequence is None else instead(sequence, arguments, options)

        return function

    def counted(sequence: Sequence, *_: object) -> Tensor:
        assert sequence.position_ids is not None
        return sequence.position_ids

    if not hasattr(module, _FROM_IDS):  # one row is what these layers take: they count no padding, so all rows' are the same
        return {"forward": unless_whole("forward", _with(module.forward, "position_ids", lambda x: counted(x)[0]))}
    room = _with(module.forward, "past_key_values_length", lambda x: x.padded - x.local)  # in its table, for all positions
    counts = [name for name in (_FROM_IDS, _FROM_EMBEDDINGS) if hasattr(module, name)]
    return {"forward": unless_whole("forward", room), **{name: unless_whole(name, counted) for name in counts}}


def _with(forward: Callable[..., object], name: str, value: Callable[[Sequence], object]) -> _Instead:
    """A call of ``forward`` with another argument of this name."""
    signature = inspect.signature(forward)

    def call(sequence: Sequence, arguments: tuple[object, ...], options: dict[str, object]) -> object:
        bound = signature.bind(*arguments, **options)
        bound.arguments[name] = value(sequence)
        return forward(*bound.args, **bound.kwargs)

    return call


class _OfRelativePositions(Protocol):
    """A layer of T5's kind."""

    compute_bias: Callable[..., Tensor]
    relative_attention_bias: nn.Embedding
    is_decoder: bool
    relative_attention_num_buckets: int
    relative_attention_max_distance: int

    def _relative_position_bucket(
        self, distance: Tensor, *, bidirectional: bool, num_buckets: int, max_distance: int
    ) -> Tensor: ...


def has_relative_bias(module: nn.Module) -> TypeGuard[_OfRelativePositions]:
    """Whether the layer makes a bias for all pairs of positions, as T5's do."""
    return callable(getattr(module, "compute_bias", None)) and hasattr(module, "_relative_position_bucket")


def knows_its_bias(module: _OfRelativePositions) -> bool:
    """Whether the layer makes its bias as T5 does."""
    bias, bucket = (inspect.signature(function).parameters for function in (module.compute_bias, module._relative_position_bucket))
    return {"query_length", "key_length"} <= set(bias) and "bidirectional" in bucket


def relative_bias(module: _OfRelativePositions, ring: Ring, is_off: Callable[[], bool]) -> Callable[..., Tensor]:
    """``compute_bias`` of a layer of T5's kind, for this rank's queries and the keys of all ranks: ``[1, heads, local, whole]``."""
    original = module.compute_bias

    def compute_bias(query_length: int, key_length: int, device: torch.device | None = None, **cache: object) -> Tensor:
        if ring.size == 1 or is_off():
            return original(query_length, key_length, device=device, **cache)
        device = module.relative_attention_bias.weight.device if device is None else device
        queries = positions(query_length * ring.size, device=device, **ring.arguments())
        distance = torch.arange(key_length * ring.size, device=device)[None, :] - queries[:, None]
        bucket = module._relative_position_bucket(
            distance,
            bidirectional=not module.is_decoder,
            num_buckets=module.relative_attention_num_buckets,
            max_distance=module.relative_attention_max_distance,
        )
        return module.relative_attention_bias(bucket).permute(2, 0, 1)[None]

    return compute_bias


def bias_of_all_keys(module: nn.Module, bias: Tensor | None, keys: Sequence) -> Tensor | None:
    """A layer's position bias, if its columns are all keys. One of the shard's keys alone is refused, unless it is zero, as T5's
    layers without such a bias have it."""
    if bias is None or bias.shape[-1] == keys.padded:
        return bias
    if not bias.any():
        return None
    raise NotImplementedError(
        f"the position bias {list(bias.shape)} of {type(module).__name__} covers this rank's keys only; over a ring it must "
        f"cover all {keys.padded}"
    )


_BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings whose frequencies depend on the longest position they see


def sees_the_longest(module: nn.Module) -> list[RemovableHandle]:
    """Hooks by which a rotary embedding of such a kind sees the longest position of the whole sequence; none for another module."""
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    if not set(_BY_LENGTH) & {kind for kind in kinds if isinstance(kind, str)}:
        return []
    return [
        module.register_forward_pre_hook(_with_the_longest, with_kwargs=True),
        module.register_forward_hook(_without_the_longest),
    ]


def _sequence() -> Sequence | None:
    call = CALL.get()
    return None if call is None or call.sharded is None else call.sharded.sequences[call.part]


def _with_the_longest(
    module: nn.Module, arguments: tuple[Tensor, ...], options: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]] | None:
    sequence = _sequence()
    if sequence is None:
        return None
    x, positions = (*arguments, options["position_ids"])[:2] if "position_ids" in options else arguments[:2]
    longest = positions.new_full((*positions.shape[:-1], 1), sequence.highest)
    positions = torch.cat([positions, longest], -1)
    if "position_ids" in options:
        return arguments, {**options, "position_ids": positions}
    return (x, positions, *arguments[2:]), options


def _without_the_longest(
    module: nn.Module, arguments: object, output: Tensor | tuple[Tensor, ...]
) -> Tensor | tuple[Tensor, ...] | None:
    if _sequence() is None:
        return None
    return tuple(x[:, :-1] for x in output) if isinstance(output, tuple) else output[:, :-1]
