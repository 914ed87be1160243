"""A call from torch as data: the request, without the tensors' values, and the tensors as operands in a fixed order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from jax_core.request.choice import SHARED_QUERIES
from jax_core.request.options import Options, Placement
from jax_core.request.spec import make_spec
from jax_core.strategies.contract import Operands, RingSpec
from torch_bridge.job.mesh import MeshDim, MeshLike
from torch_bridge.job.ring import Ring, Tensors

ARRAYS = Operands._fields[: Operands._fields.index("rank")]  # the operands that torch passes, in this order
QKV = (0, 1, 2)  # the indices of query, key and value
VALUE = 2

Where = tuple[MeshLike, MeshDim]  # mesh and mesh dimension
Forms = tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]  # what a Request's forms are made of


class Form(NamedTuple):
    """Shape and dtype of a tensor: all that checking and compiling need to know."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Request:
    """One attention call on this process's tensors. Equal requests share one program.

    ``forms``: those of the operands in the order of ``ARRAYS``, None for an absent one, then of each array of a mask function.
    ``options``: without ``mask_mod``, which is one of its ``predicates``.
    """

    ring: Ring
    options: Options
    forms: tuple[Form | None, ...]
    device: torch.device

    @property
    def results(self) -> tuple[Form, Form]:
        """The forms of ``out`` and ``lse``."""
        return results(self.forms[0], self.forms[2])

    @property
    def layout_in_use(self) -> str:
        """The layout; empty where position ids say all that it would, and where keys lie in any order."""
        given = {name for name, form in zip(ARRAYS, self.forms, strict=False) if form is not None}
        by_ids = "q_position_ids" in given and not given & {"bias", "mask"}
        return "" if by_ids or self.shared_queries else str(self.options.layout)

    @property
    def shared_queries(self) -> bool:
        """Whether the queries are the same on all ranks."""
        return self.options.strategy in SHARED_QUERIES

    @property
    def empty(self) -> bool:
        """Whether there is no query-key pair: a batch or a sequence of length 0."""
        return any(form is not None and 0 in form.shape[:2] for form in self.forms[:3])

    def operands(self, arrays: Sequence[Any], built: tuple[tuple[Any, ...], ...] = ()) -> Operands:
        """``arrays``, given in the order of ``forms``, as operands. ``built``: the arrays of a mask builder, which come last."""
        named: dict[str, Any] = dict(zip(ARRAYS, arrays, strict=False))
        lifted = (tuple(arrays[len(ARRAYS) :]),) if self.options.predicates else ()  # a mask function may have no arrays
        return Operands(**named, predicate_arrays=lifted + built)

    def __str__(self) -> str:
        """A description that is equal on all ranks if the requests are."""
        operands = [f"{name} {list(form.shape)} {form.dtype}" for name, form in zip(ARRAYS, self.forms, strict=False) if form]
        # Rings of the same ranks may differ in shape, and so in what they send; of one dimension they have none.
        shape = f" on {self.ring}" if len(getattr(self.ring, "sizes", ())) > 1 else ""
        return f"{', '.join(operands)} with {in_words(self.options)}{shape}"


def results(query: Any, value: Any) -> tuple[Form, Form]:
    """The forms of ``out`` and ``lse``; of ``query`` and ``value`` only shape and dtype are read."""
    batch, length, heads, _ = query.shape
    lse_dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return Form((batch, length, heads, value.shape[-1]), query.dtype), Form((batch, heads, length), lse_dtype)


def in_words(options: Options) -> str:
    """The options that differ from the defaults."""
    settings = {name: value for name, value in vars(options).items() if value != getattr(Options, name)}
    settings |= {name: str(value) for name, value in settings.items() if name == "layout"}
    settings |= {name: getattr(value, "__qualname__", "given") for name, value in settings.items() if callable(value)}
    settings |= {"predicates": [str(predicate.token) for predicate in options.predicates]} if options.predicates else {}
    return str(settings)


@dataclass(frozen=True, eq=False)
class LocalAttention:
    """A checked request as functions of this rank's JAX arrays, given in the order of the request's forms."""

    request: Request
    spec: RingSpec
    built: tuple[tuple[np.ndarray, ...], ...]  # the arrays of a mask builder: constants of the program

    def forward(self, *operands: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        return self.spec.strategy.forward(self.spec, self.request.operands(operands, self.built))

    def backward(self, wanted: Sequence[int], *arrays: Any) -> list[Any]:
        """``arrays``: the operands, ``out``, ``lse`` and their cotangents, of which the second may be None."""
        *operands, out, lse, dout, dlse = arrays
        given = self.request.operands(operands, self.built)
        gradients = self.spec.strategy.backward(self.spec, given, out, lse, dout, dlse)
        return [gradients[number] for number in wanted]


def specify(request: Request, place: Placement) -> LocalAttention:
    """Checks the request by its shapes and dtypes (ValueError, NotImplementedError)."""
    spec, completed = make_spec(request.options, request.operands(request.forms[: len(ARRAYS)]), place)
    built = completed.predicate_arrays[len(request.options.predicates) :]
    # NumPy arrays belong to no device.
    return LocalAttention(request, spec, tuple(tuple(np.asarray(array) for array in arrays) for arrays in built))


def forms_of(arrays: Tensors) -> Forms:
    return tuple(None if x is None else (tuple(x.shape), x.dtype) for x in arrays)


def words_of_seed(seed: int, device: torch.device | str) -> torch.Tensor:
    """The 64-bit seed as two int32 words, low word first, written on ``device``."""
    low = (seed + 2**31) % 2**32 - 2**31
    high = (seed // 2**32 + 2**31) % 2**32 - 2**31
    words = torch.full((2,), low, dtype=torch.int32, device=device)
    words[1:] = high  # no view of one int64: compiled by torch 2.11 that gives the low word twice
    return words
