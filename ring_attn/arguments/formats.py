"""The orders of dimensions in which queries, keys and values may come."""

from torch import Tensor

from jax_core.operands import Operands

_SWAPPED = {"bhsd": (1, 2), "sbhd": (0, 1)}
_FORMATS = ("bshd", *_SWAPPED, "thd")


def check_format(qkv_format: str) -> None:
    if qkv_format not in _FORMATS:
        raise ValueError(f"qkv_format must be one of {', '.join(_FORMATS)}; got {qkv_format!r}")


def batch_first(operands: Operands[Tensor], qkv_format: str) -> Operands[Tensor]:
    """With queries, keys and values ``[batch, seq, heads, dim]``; packed tokens are a batch of one."""
    q, k, v = operands.qkv
    if qkv_format == "thd":
        return operands.with_qkv(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
    if qkv_format not in _SWAPPED:
        return operands
    swapped = _SWAPPED[qkv_format]
    return operands.with_qkv(q.transpose(*swapped), k.transpose(*swapped), v.transpose(*swapped))


def as_given(out: Tensor, lse: Tensor, qkv_format: str) -> tuple[Tensor, Tensor]:
    """The results in the format of the inputs."""
    if qkv_format == "thd":
        return out.squeeze(0), lse.squeeze(0)
    return out.transpose(*_SWAPPED[qkv_format]) if qkv_format in _SWAPPED else out, lse
