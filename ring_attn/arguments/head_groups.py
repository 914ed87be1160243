"""A call whose heads are computed a group at a time: the memory that a call needs is then that of a group."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jax_core.masks.layout import Index
from jax_core.operands import GIVEN, Operands
from jax_core.options import MaskMod, Options, Visible
from ring_attn.arguments.checks import check_tensors
from ring_attn.arguments.formats import check_format


@dataclass(frozen=True)
class _FromHead:
    """``mask_mod`` of a group, whose heads count from ``first``. Equal ones share their programs."""

    mask_mod: MaskMod
    first: int

    def __call__(self, batch: Index, head: Index, q_pos: Index, k_pos: Index) -> Visible:
        return self.mask_mod(batch, head + self.first, q_pos, k_pos)


def check_head_groups(groups: object) -> None:
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(
            f"head_groups must be a positive int, in how many groups of K/V heads attention is computed; got {groups!r}"
        )


def grouped(
    groups: int, names: Mapping[str, str], operands: Operands[Tensor], qkv_format: str, options: Options
) -> Iterator[tuple[Operands[Tensor], Options]]:
    """The operands of each group of heads, and options that count heads from its first. ValueError where the K/V heads do not
    divide, NotImplementedError for what counts heads and cannot be told of the first."""
    check_head_groups(groups)
    check_format(qkv_format)
    check_tensors(operands, names, len(qkv_format))
    dim = qkv_format.index("h")
    heads, kv_heads = operands.query.shape[dim], operands.key.shape[dim]
    if kv_heads % groups or heads % kv_heads:
        raise ValueError(f"head_groups must divide the K/V heads, {kv_heads} of {heads} heads here; got {groups}")
    for name in ("dropout_prob", "mask_builder"):
        if getattr(options, name):
            raise NotImplementedError(
                f"{names.get(name, name)} with head_groups: what it makes depends on the number of a head; leave one of them out"
            )
    if any(hasattr(x, "full_tensor") for x in operands.qkv):
        raise NotImplementedError("head_groups of DTensors, whose heads may be split: give local tensors, x.to_local()")
    parts: list[tuple[Tensor | None, ...]] = [x.tensor_split(groups, dim) for x in operands.qkv]
    parts += [_split(name, x, groups, heads) for name, x in zip(Operands._fields[3:GIVEN], operands.given[3:], strict=True)]
    for number, tensors in enumerate(zip(*parts, strict=True)):
        of_group = options
        if options.mask_mod is not None and number:
            of_group = replace(options, mask_mod=_FromHead(options.mask_mod, number * heads // groups))
        yield Operands(*tensors), of_group


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


def joined(results: Sequence[tuple[Tensor, Tensor]], qkv_format: str) -> tuple[Tensor, Tensor]:
    """``(out, lse)`` of all heads; the LSE is ``[batch, heads, seq]``, of packed tokens ``[heads, tokens]``."""
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, qkv_format.index("h")), torch.cat(lses, -2)
