"""A call whose heads are computed a group at a time: the memory that a call needs is then that of a group."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn.arguments.checks import check_tensors
from ring_attn.arguments.formats import check_format, dims_of

MaskMod = Callable[..., object]


class Group(NamedTuple):
    """The tensors of some heads, by the core's names, and options that count heads from the first of these."""

    qkv: dict[str, Tensor]
    others: dict[str, Tensor | None]
    mask_mod: MaskMod | None


@dataclass(frozen=True)
class _FromHead:
    """``mask_mod`` of a group, whose heads count from ``first``. Equal ones share their programs."""

    mask_mod: MaskMod
    first: int

    def __call__(self, batch: Any, head: Any, q_pos: Any, k_pos: Any) -> object:
        return self.mask_mod(batch, head + self.first, q_pos, k_pos)


def check_head_groups(groups: object) -> None:
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(
            f"head_groups must be a positive int, in how many groups of K/V heads attention is computed; got {groups!r}"
        )


def grouped(
    groups: int,
    names: dict[str, str],
    qkv: dict[str, Tensor],
    others: dict[str, Tensor | None],
    qkv_format: str,
    options: dict[str, Any],
) -> Iterator[Group]:
    """ValueError where the K/V heads do not divide, NotImplementedError for what counts heads and cannot be told of the first."""
    check_head_groups(groups)
    check_format(qkv_format)
    check_tensors({**qkv, **others}, qkv["query"], names, dims_of(qkv_format))
    dim = qkv_format.index("h")
    heads, kv_heads = qkv["query"].shape[dim], qkv["key"].shape[dim]
    if kv_heads % groups or heads % kv_heads:
        raise ValueError(f"head_groups must divide the K/V heads, {kv_heads} of {heads} heads here; got {groups}")
    for name in ("dropout_prob", "mask_builder"):
        if options[name]:
            raise NotImplementedError(
                f"{names.get(name, name)} with head_groups: what it makes depends on the number of a head; leave one of them out"
            )
    if any(hasattr(x, "full_tensor") for x in qkv.values()):
        raise NotImplementedError("head_groups of DTensors, whose heads may be split: give local tensors, x.to_local()")
    parts = {name: x.tensor_split(groups, dim) for name, x in qkv.items()}
    tensors = {name: _split(name, x, groups, heads) for name, x in others.items()}
    for number in range(groups):
        mask_mod: MaskMod | None = options["mask_mod"]
        if mask_mod is not None and number:
            mask_mod = _FromHead(mask_mod, number * heads // groups)
        yield Group(
            {name: each[number] for name, each in parts.items()}, {name: each[number] for name, each in tensors.items()}, mask_mod
        )


def _split(name: str, x: Tensor | None, groups: int, heads: int) -> tuple[Tensor | None, ...]:
    """What has no heads goes to all groups."""
    if x is None:
        return (None,) * groups
    if name == "softmax_aux":  # [n] would be taken for [heads] in a group of n heads
        return (x if x.shape[0] == heads else x.expand(heads, -1)).tensor_split(groups, 0)
    dim = {"alibi_slopes": -1, "bias": -3, "mask": -3}.get(name)
    if dim is None or x.ndim < -dim or x.shape[dim] != heads:
        return (x,) * groups
    return x.tensor_split(groups, dim)


def joined(results: Iterable[tuple[Tensor, Tensor]], qkv_format: str) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of all heads; the LSE is ``[batch, heads, seq]``, of packed tokens ``[heads, tokens]``."""
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, qkv_format.index("h")), torch.cat(lses, -2)
