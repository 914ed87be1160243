"""In Triton's interpreter a kernel may touch the memory of its arguments alone: anything else, which a GPU reads in silence or
answers with an illegal access at some later call, is an error here, with the first element that lies outside."""

import numpy as np
from triton.runtime import interpreter

# What it does, and which of its arguments are the pointers and the mask.
ACCESSES = {"create_masked_load": ("reads", 0, 1), "create_masked_store": ("writes", 0, 2), "create_atomic_rmw": ("adds", 1, 3)}
_arguments = np.zeros((0, 2), np.uint64)  # from where to where, in the order of addresses


def watch() -> None:
    """From here on, in all kernels that the interpreter runs."""
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    prepared = executor._init_args_hst

    def prepare(self, arguments, named):
        global _arguments
        found = prepared(self, arguments, named)
        spans = [span(x) for x in (*found[0], *found[1].values()) if hasattr(x, "data_ptr") and x.numel()]
        _arguments = np.array(sorted(spans), np.uint64).reshape(-1, 2)
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
    if not addresses.size:
        return
    size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
    which = np.searchsorted(_arguments[:, 0], addresses, side="right") - 1
    ends = np.maximum.accumulate([0, *_arguments[:, 1]], dtype=np.uint64)[which + 1]  # some lie within others
    outside = addresses + np.uint64(size) > ends
    if outside.any():
        first = int(addresses[outside][0])
        spans = sorted(
            (max(int(start) - first, first - int(end), 0), first - int(start), int(end - start)) for start, end in _arguments
        )
        near = f"byte {spans[0][1]} of {spans[0][2]} of the nearest" if spans else "there are none"
        raise IndexError(f"a kernel {verb} outside its arguments: {near}; of {addresses.size} elements {int(outside.sum())}")
