"""The orders of dimensions in which queries, keys and values may come."""

from torch import Tensor

_SWAPPED = {"bhsd": (1, 2), "sbhd": (0, 1)}
_FORMATS = ("bshd", *_SWAPPED, "thd")


def check_format(qkv_format: str) -> None:
    if qkv_format not in _FORMATS:
        raise ValueError(f"qkv_format must be one of {', '.join(_FORMATS)}; got {qkv_format!r}")


def dims_of(qkv_format: str) -> int:
    return len(qkv_format)


def batch_first(x: Tensor, qkv_format: str) -> Tensor:
    """``[batch, seq, heads, dim]``; packed tokens are a batch of one."""
    if qkv_format == "thd":
        return x.unsqueeze(0)
    return x.transpose(*_SWAPPED[qkv_format]) if qkv_format in _SWAPPED else x


def as_given(out: Tensor, lse: Tensor, qkv_format: str) -> tuple[Tensor, Tensor]:
    """The results in the format of the inputs."""
    if qkv_format == "thd":
        return out.squeeze(0), lse.squeeze(0)
    return out.transpose(*_SWAPPED[qkv_format]) if qkv_format in _SWAPPED else out, lse
