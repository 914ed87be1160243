"""Documents told by ``cu_seqlens [documents + 1]``: where each begins and the last one ends, in a sequence of tokens."""

import torch
from torch import Tensor


def documents_of(index: Tensor, ends: Tensor) -> Tensor:
    """The number of the document of each place ``index [tokens]``, by ``ends [documents + 1]``; that of padding is the number of
    documents. int32 ``[tokens]``."""
    return torch.searchsorted(ends, index.to(ends.dtype), right=True, out_int32=True) - 1


def or_padding(document: Tensor, ends: Tensor) -> Tensor:
    """These numbers, but -1 for padding."""
    return document.masked_fill(document == len(ends) - 1, -1)


def check_cumulative(
    name: str, ends: Tensor, total: int, device: torch.device, longest: int | None = None, padding: bool = True
) -> None:
    """ValueError unless ``ends`` is a ``cu_seqlens [documents + 1]`` of ``total`` tokens, of which the last may be ``padding``. On
    a GPU the values are checked when the device gets there, so that the host need not wait."""
    if not isinstance(ends, Tensor) or ends.ndim != 1 or not len(ends) or ends.is_floating_point() or ends.dtype == torch.bool:
        raise ValueError(f"{name} must be a tensor of ints [documents + 1], got {ends!r}")
    if ends.device != device:
        raise ValueError(f"{name} must be on the device of q, {device}, got {ends.device}")
    lengths = ends.diff()
    good = (ends[0] == 0) & (ends[-1] <= total if padding else ends[-1] == total) & (lengths >= 0).all()
    if longest is not None:
        good = good & (lengths <= longest).all()
    must = f"{name} must ascend from 0 to {'at most ' if padding else ''}the {total} tokens of the whole sequence"
    must += "" if padding else " where padding=False says that all are in documents"
    must += "" if longest is None else f", in steps of at most {name.replace('cu_', 'max_').replace('seqlens', 'seqlen')}={longest}"
    require(good, must, ends)


def require(good: Tensor, must: str, *got: object) -> None:
    """ValueError unless ``good``, one bool. On a GPU an assertion of the device, so that the host need not wait."""
    if good.device.type == "cuda" or torch.compiler.is_compiling():
        torch._assert_async(good, must)
    elif not bool(good):
        raise ValueError(f"{must}; got {', '.join(str(x.tolist() if isinstance(x, Tensor) else x) for x in got)}")
