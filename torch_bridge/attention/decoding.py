"""Decoding on a GPU: the library's Triton kernels, launched by Triton on torch's own stream, and one collective of torch's.

A step of generation is a few microseconds of work a layer, so what counts is what the host does. Here nothing crosses to JAX and
nothing waits, and torch can capture the step in a CUDA graph. What is computed, checked and compared between the ranks is what
``strategy="decode"`` is anywhere; gradients are JAX's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from jax_core.kernels.triton.constants import input_precision, padded_dim
from jax_core.operands import GIVEN, Operands
from jax_core.request.dispatch import KERNELS, STRATEGIES
from jax_core.strategies.contract import RingSpec
from torch_bridge.attention.empty import per_head
from torch_bridge.attention.peer_memory import PeerMemory, follow_the_last, peer_memory
from torch_bridge.backends import capture
from torch_bridge.backends.compiled import CompiledProgram
from torch_bridge.backends.operation import Results, TensorSpec
from torch_bridge.failures.events import recorded
from torch_bridge.failures.watchdog import watch
from torch_bridge.mesh.protocol import Tensors
from torch_bridge.mesh.rings import ProcessRing

if TYPE_CHECKING:
    from jax_core.kernels.triton.decode_kernels import DecodeConstants

_PROGRAMS = 264  # that a launch should have: two for each multiprocessor of an H100 or H200
_WIDEST = 256  # head dim
_SHORTEST_PART = 256  # keys; shorter ones would take longer to join than to read
_BLOCK = 32768  # bytes of a block of keys and values, of which a program holds three
_NAMES = Operands._fields[:GIVEN]
_IDS = ("q_segment_ids", "kv_segment_ids", "q_position_ids", "kv_position_ids")
_TAKEN = {"query", "key", "value", "softmax_aux", "alibi_slopes", *_IDS}


def decoding_of(program: object) -> "Decoding | None":
    """The same request on torch's stream; None where that has no kernels for it."""
    if not isinstance(program, CompiledProgram):
        return None
    spec: RingSpec = program.local.spec  # type: ignore[attr-defined]  # of an attention
    if spec.strategy is not STRATEGIES["decode"] or not launches(spec.kernel, program.request.device):
        return None
    return Decoding(program, spec) if _computes(spec, program.request.specs) else None


def launches(kernel: object, device: torch.device) -> bool:
    """Whether torch launches kernels in the place of JAX's one."""
    return kernel is KERNELS["triton"] and device.type == "cuda"


def _computes(spec: RingSpec, specs: Sequence[TensorSpec | None]) -> bool:
    """No mask function, ids of 32 bits and for as many entries on both sides, float32 at most."""
    present = {name: each for name, each in zip(_NAMES, specs, strict=False) if each is not None}
    narrow = all(each.dtype == torch.int32 for name, each in present.items() if name in _IDS)
    alike = all(_rows(present.get(f"q_{name}")) == _rows(present.get(f"kv_{name}")) for name in ("segment_ids", "position_ids"))
    plain = present.keys() <= _TAKEN and not spec.problem.scores.predicates
    return (
        narrow and alike and plain and spec.problem.dtype != "float64" and max(spec.problem.dim, spec.problem.value_dim) <= _WIDEST
    )


@dataclass(eq=False)
class Decoding:
    """``program``: JAX's for the same, which checks it and has its backward."""

    program: CompiledProgram
    spec: RingSpec
    operators: None = None

    def forward(self, operands: Tensors) -> Results:
        """Within a capture nothing is compared and nothing is watched: who captures has made the call once, and watches the graph.
        Raises RuntimeError for a call that is made for the first time there."""
        ring, device = self.program.ring, self.program.request.device
        if capture.is_captured(device):
            if not self.program.checked:
                raise RuntimeError(capture.FIRST_CALL)
            return self._attend(ring, operands)
        self.program.check(operands)
        _ = self._peers  # which waits for all ranks the first time, and so comes before the call
        follow_the_last(device)
        with watch(ring, "forward", self.program.call) as call:
            results = self._attend(ring, operands)
            call.event = recorded(device)
        return results

    def backward(self, operands: Tensors, results: Tensors, cotangents: Tensors, wanted: Sequence[int]) -> list[Tensor]:
        return self.program.backward(operands, results, cotangents, wanted)

    def _attend(self, ring: ProcessRing, operands: Tensors) -> Results:
        present = {name: x.contiguous() for name, x in zip(_NAMES, operands, strict=False) if x is not None}
        query, (out, lse) = present["query"], self.program.request.results
        heads = query.shape[2]
        with torch.cuda.device_of(query):
            parts = self._parts(present)
            if (peers := self._peers) is not None:
                _join(parts, lse.shape, None, (peers.parts(parts.shape[1:]),), ring.rank)
                parts = peers.gathered(parts.shape[1:])
            else:
                for group in reversed(ring.groups) if ring.size > 1 else ():
                    parts = _gathered(_joined(parts, lse.shape), group)
            results = query.new_empty(out.shape), query.new_empty(lse.shape, dtype=lse.dtype)
            sinks = present.get("softmax_aux")
            logarithms = None if sinks is None else per_head(sinks.float(), heads).logsumexp(-1)
            _join(parts, lse.shape, logarithms, results)
        return results

    def _parts(self, present: dict[str, Tensor]) -> Tensor:
        """``[parts, rows, value_dim + 1]``, float32: of each part of this rank's keys the output and its LSE."""
        from jax_core.kernels.triton.decode_kernels import decode_kernel

        query, const = present["query"], self._constants
        batch, queries, heads, _ = query.shape
        parts = query.new_empty(const.parts, batch * queries * heads, const.value_dim + 1, dtype=torch.float32)
        arrays = [present.get(name, query) for name in ("query", "key", "value", *_IDS, "alibi_slopes")]
        grid = const.parts, const.kv_heads * const.row_blocks, batch
        decode_kernel[grid](*arrays, parts, const=const, **settings_of(const))
        return parts

    @cached_property
    def _peers(self) -> PeerMemory | None:
        batch, heads, queries = self.program.request.results[1].shape
        numbers = batch * queries * heads * (self.spec.problem.value_dim + 1)
        return peer_memory(self.program.ring, numbers, self.program.request.device)

    @cached_property
    def _constants(self) -> "DecodeConstants":
        return constants_of(self.spec, self.program.request.specs)


def constants_of(spec: RingSpec, specs: Sequence[TensorSpec | None]) -> "DecodeConstants":
    """What the kernel is compiled for: parts of the keys so short that the launch fills a GPU."""
    from jax_core.kernels.triton.decode_kernels import DecodeConstants

    problem, present = spec.problem, dict(zip(_NAMES, specs, strict=False))
    dim, value_dim = padded_dim(problem.dim), padded_dim(problem.value_dim)
    rows = problem.q_length * (problem.heads // problem.kv_heads)
    rows_block = min(64, padded_dim(rows))
    keys_block = min(128, 1 << (_BLOCK // ((dim + value_dim) * _itemsize(problem.dtype))).bit_length() - 1)
    programs = problem.batch * problem.kv_heads * -(-rows // rows_block)
    parts = max(1, min(_PROGRAMS // programs, problem.k_length // _SHORTEST_PART))
    return DecodeConstants(
        heads=problem.heads,
        kv_heads=problem.kv_heads,
        queries=problem.q_length,
        keys=problem.k_length,
        dim=problem.dim,
        value_dim=problem.value_dim,
        dim_block=dim,
        value_dim_block=value_dim,
        rows_block=rows_block,
        keys_block=keys_block,
        part=-(-problem.k_length // (parts * keys_block)) * keys_block,
        mask=problem.scores.mask,
        scale=problem.scores.scale,
        softcap=problem.scores.softcap,
        logits_dtype=problem.scores.logits_dtype,
        input_precision=input_precision(problem.scores),
        segments=_rows(present.get("q_segment_ids")),
        positions=_rows(present.get("q_position_ids")),
        alibi=_rows(present.get("alibi_slopes")),
    )


def settings_of(const: "DecodeConstants") -> dict[str, int]:
    """Of a launch: its warps, and the stages of its loop. Where ids say which keys are read, a block's ids come some stages before
    it does, so that five stages hold as many blocks as three do without ids."""
    return dict(num_warps=4, num_stages=5 if const.segments or const.positions else 3)


def _itemsize(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _rows(each: TensorSpec | None) -> int:
    """Of ids ``[length]`` or ``[batch|1, length]``, slopes likewise: 0 without."""
    return 0 if each is None else each.shape[0] if len(each.shape) == 2 else 1


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[rows, ...]`` of each rank: ``[ranks, rows, ...]``."""
    parts = part.new_empty(group.size(), *part.shape)
    dist.all_gather_into_tensor(parts.flatten(0, 1), part, group=group)
    return parts


def _joined(parts: Tensor, lse: tuple[int, ...]) -> Tensor:
    """``[parts, rows, value_dim + 1]`` as one part, ``[rows, value_dim + 1]``."""
    if parts.shape[0] == 1:
        return parts[0]
    whole = parts.new_empty(1, *parts.shape[1:])
    _join(parts, lse, None, (whole,))
    return whole[0]


def _join(parts: Tensor, lse: tuple[int, ...], sinks: Tensor | None, results: Results, rank: int = 0) -> None:
    """``lse``: the shape of the LSE, ``[batch, heads, queries]``. ``results``: the output and the LSE; or parts ``[ranks, rows,
    value_dim + 1]``, of which this is the one of ``rank`` and the others become 0."""
    from jax_core.kernels.triton.decode_kernels import JoinConstants, join_kernel

    count, rows, width = parts.shape
    _, heads, queries = lse
    at_once = min(64, 1 << (count - 1).bit_length())
    last = len(results) == 2
    sizes = count, at_once, queries, heads, width - 1, padded_dim(width - 1)
    const = JoinConstants(*sizes, int(sinks is not None), last, rank, 1 if last else len(results[0]))
    out, out_lse = results if last else results * 2
    join_kernel[(rows,)](parts, parts if sinks is None else sinks, out, out_lse, const=const, num_warps=4)
