"""In Triton's interpreter a kernel may touch the memory of its arguments alone: anything else, which a GPU reads in silence or
answers with an illegal access at some later call, is an error here, with the first element that lies outside."""

import numpy as np
from triton.runtime import interpreter

# What it does, and which of its arguments are the pointers and the mask.
ACCESSES = {"create_masked_load": ("reads", 0, 1), "create_masked_store": ("writes", 0, 2), "create_atomic_rmw": ("adds", 1, 3)}
# From where to where the arguments lie, in the order of addresses; and where all up to each end, for some lie in others.
_spans, _ends = np.zeros((1, 2), np.uint64), np.zeros(1, np.uint64)


def watch() -> None:
    """From here on, in all kernels that the interpreter runs."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    prepared = executor._init_args_hst

    def prepare(self, arguments, named):
        global _spans, _ends
        found = prepared(self, arguments, named)
        spans = [span(x) for x in (*found[0], *found[1].values()) if hasattr(x, "data_ptr") and x.numel()]
        _spans = np.array([(0, 0), *sorted(spans)], np.uint64)
        _ends = np.maximum.accumulate(_spans[:, 1])
        return found

    executor._init_args_hst = prepare
    for name, places in ACCESSES.items():
        setattr(builder, name, watched(getattr(builder, name), *places))


def span(tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def watched(access, verb, pointers, mask):
    def checked(self, *arguments):
        check(arguments[pointers], arguments[mask], verb)
        return access(self, *arguments)

    return checked


def check(pointers, mask, verb) -> None:
    addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)].astype(np.uint64)
    size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
    outside = addresses + np.uint64(size) > _ends[np.searchsorted(_spans[:, 0], addresses, side="right") - 1]
    if outside.any():
        first = int(addresses[outside][0])
        start, end = min(_spans.tolist(), key=lambda span: max(span[0] - first, first - span[1]))
        near = f"byte {first - start} of {end - start} of the nearest"
        raise IndexError(f"a kernel {verb} outside its arguments: {near}; of {addresses.size} elements {int(outside.sum())}")
