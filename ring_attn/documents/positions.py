"""Documents told by position ids."""

from typing import NamedTuple

import torch
from torch import Tensor


class Jumps(NamedTuple):
    """Where position ids do not count on, bool ``[rows, seq]``: at ``restarts`` they go back to 0, or to where the row starts, and
    a document begins; ``others`` may be a gap in a document or another document."""

    restarts: Tensor
    others: Tensor


def jumps_of(positions: Tensor, real: Tensor) -> Jumps:
    """Of ``positions [rows, seq]``, of which those that are not ``real`` say nothing: a token counts on from the last real one if
    it is one further, or as much further as it is in the row."""
    last, index = last_real(real), torch.arange(positions.shape[1], device=positions.device)
    before = positions.gather(1, last.clamp_min(0))
    jumps = real & (last >= 0) & (positions != before + 1) & (positions != before + index - last)
    starts = real & (last < 0)  # one in a row at most
    restarts = jumps & ((positions == 0) | (positions == (positions * starts).sum(1, keepdim=True)))
    return Jumps(restarts, jumps & ~restarts)


def last_real(real: Tensor) -> Tensor:
    """int64 ``[rows, seq]``: where in its row the last real token before each token is, -1 where there is none."""
    index = torch.arange(real.shape[1], device=real.device)
    upto = torch.where(real, index, -1).cummax(1).values
    return torch.cat([upto.new_full((len(upto), 1), -1), upto[:, :-1]], 1)[:, : real.shape[1]]


def check_unambiguous(positions: Tensor, jumps: Jumps) -> None:
    """ValueError where nothing but position ids says where documents begin, and they leave it open."""
    if not bool(jumps.others.any()):
        return
    row, at = jumps.others.nonzero()[0].tolist()
    raise ValueError(
        f"position_ids must count on by one or restart at 0 (or where the row starts), but {int(positions[row, at - 1])} is "
        f"followed by {int(positions[row, at])}, which may be a gap in a document or another document (transformers' masks read it "
        "as another, its flash attention as a gap); say which by segment_ids, seq_idx or cu_seqlens"
    )


def of_text(position_ids: Tensor, axes: int | None) -> Tensor | None:
    """The text's of position ids ``[rows, seq]`` or ``[seq]``; with ``axes``, those of an image's coordinates, also of
    ``[axes (+ 1), rows, seq]``, as models of images and text take them: of ``axes + 1`` the first. Coordinates alone are None: they
    tell no documents."""
    if axes is None or position_ids.ndim <= 2:
        return position_ids
    return position_ids[0] if position_ids.ndim == 3 and position_ids.shape[0] == axes + 1 else None
