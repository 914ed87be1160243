"""What layers with a state send, in the compiled programs: a halo of ``width - 1`` inputs a piece, and ``M`` and ``E`` a piece."""

import re
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import computations
from jax.sharding import Mesh
from state_cases import BATCH, CASES, CHANNELS, HEADS, KEY, KEY_HEADS, LENGTH, VALUE, ids_of, inputs

import jax_core
from jax_core.recurrence.operators import Recurrence

SIZE = 4
ITEM = {"u32": 4, "u16": 2}


def sent(name: str, dtype, layout: str, documents: str = "none", backward: bool = True, **settings) -> dict[str, int]:
    """Bytes by the kind of collective, by all ranks together, of a forward and, if so, its backward."""
    case, ids = CASES[name], ids_of(documents)
    settings = case.settings | ({"strategy": "prefix"} if case.chunked else {}) | settings
    operands, _ = inputs(case)
    operands = {name: jnp.asarray(x, dtype) for name, x in operands.items()}
    mesh = Mesh(np.array(jax.devices()[:SIZE]), "ring")

    def loss(operands):
        function = partial(getattr(jax_core, case.function), **settings, mesh=mesh, layout=layout, segment_ids=ids)
        return function(*map(operands.get, case.shapes)).astype(jnp.float32).sum()

    # Pinned to where they are used: what the test's arrays travel before and after is not the layer's.
    place = jax.NamedSharding(mesh, jax.P(None, "ring"))
    places = {name: place if x.shape[1:2] == (LENGTH,) else jax.NamedSharding(mesh, jax.P()) for name, x in operands.items()}
    program = jax.jit(jax.grad(loss) if backward else loss, in_shardings=(places,)).lower(operands).compile().as_text()
    found: dict[str, int] = {}
    for op in (op for ops in computations(program).values() for op in ops):
        if op.kind.startswith("collective-permute"):
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", op.text)[1].count("{")
            found["permute"] = found.get("permute", 0) + pairs * size_of(op.types)
        elif op.kind.startswith("all-gather"):
            found["gather"] = found.get("gather", 0) + size_of(op.types)  # each rank's part to one other
        elif op.kind.startswith("all-to-all"):
            # A rank's blocks are all of its operands or, as a tuple, of its results; its own stays.
            types = re.findall(r"\w+\[[\d,]*\]", op.types)
            found["swap"] = found.get("swap", 0) + SIZE * sum(map(size_of, types)) * (SIZE - 1) // SIZE
        elif op.kind.startswith("reduce-scatter"):
            raise AssertionError(op.text)
    return found


def size_of(types: str) -> int:
    kind, shape = re.match(r"(\w+)\[([\d,]*)\]", types).groups()
    return ITEM[kind] * prod(map(int, filter(None, shape.split(","))))


# Pieces that go to another rank: not the last of the sequence, nor what a rank keeps.
HALOS = {"contiguous": SIZE - 1, "zigzag": 2 * SIZE - 2}
PIECES = {"contiguous": SIZE, "zigzag": 2 * SIZE}


@pytest.mark.parametrize("layout", HALOS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_halo(layout, dtype):
    """There with the forward, and back with the backward."""
    inputs = HALOS[layout] * BATCH * 3 * CHANNELS
    assert sent("conv", dtype, layout) == {"permute": 2 * inputs * jnp.dtype(dtype).itemsize}


def test_tails_of_documents():
    """To all ranks, as padding may lie between; with their ids and the first of each piece, which one program sends once."""
    inputs, ids = (PIECES["zigzag"] * BATCH * 4 * numbers for numbers in (3 * CHANNELS, 3 + 1))
    assert sent("conv", "float32", "zigzag", "cuts", backward=False) == {"gather": inputs + ids}
    assert sent("conv", "float32", "zigzag", "cuts") == {"gather": 2 * inputs + ids}


@pytest.mark.parametrize("layout", PIECES)
@pytest.mark.parametrize(("name", "m"), [("delta", KEY * KEY), ("kda", KEY * KEY), ("ssd", 1), ("retention", 1), ("gla", KEY)])
def test_a_prefix(name, m, layout):
    """In float32, whatever the operands' dtype."""
    maps = PIECES[layout] * BATCH * HEADS * (m + KEY * VALUE) * 4
    assert sent(name, "bfloat16", layout) == {"gather": 2 * maps}


def test_a_prefix_of_documents():
    """The last id of each piece is sent too."""
    maps = PIECES["zigzag"] * BATCH * (HEADS * (1 + KEY * VALUE) + 1) * 4
    assert sent("ssd", "float32", "zigzag", "cuts", backward=False) == {"gather": maps}


def tokens(case, dtype) -> tuple[int, int]:
    """Bytes of the operands that have tokens, each key head twice, as 4 ranks share 2; and of y."""
    shapes = [shape for shape in case.shapes.values() if shape and shape[:2] == (BATCH, LENGTH)]
    numbers = [prod(shape) * (SIZE // KEY_HEADS if shape[2:] == (KEY_HEADS, KEY) else 1) for shape in shapes]
    item = jnp.dtype(dtype).itemsize
    return sum(numbers) * item, BATCH * LENGTH * HEADS * VALUE * item


@pytest.mark.parametrize(("name", "dtype", "layout"), [("delta", "bfloat16", "zigzag"), ("ssd", "float32", "contiguous")])
def test_an_exchange_of_heads(name, dtype, layout):
    """Operands there and y back; in the backward operands and dy there, and the operands' cotangents back."""
    operands, y = tokens(CASES[name], dtype)
    assert sent(name, dtype, layout, strategy="ulysses") == {"swap": (3 * operands + 2 * y) * (SIZE - 1) // SIZE}


def test_an_exchange_of_heads_and_documents():
    """Each rank sends its ids to all."""
    operands, y = tokens(CASES["ssd"], "float32")
    ids = SIZE * BATCH * LENGTH * 4
    assert sent("ssd", "float32", "zigzag", "cuts", backward=False, strategy="ulysses") == {
        "swap": (operands + y + ids) * (SIZE - 1) // SIZE
    }


@pytest.mark.parametrize(
    ("length", "size", "layout", "taken"),
    [
        *((3, 11, "contiguous", "ulysses"), (4, 11, "contiguous", "prefix"), (5, 11, "contiguous", "prefix")),
        *((6, 11, "zigzag", "ulysses"), (8, 11, "zigzag", "prefix")),
        (1000, 11, "striped", "ulysses"),
        (1, 2, "contiguous", "prefix"),  # which do not share 11 heads
        (4, 1, "contiguous", "prefix"),
    ],
)
def test_auto_sends_less(length, size, layout, taken):
    """Of 11 heads of one number: 2 x 2 numbers a head and piece to each other rank, or 11 a head and token, of which 1/11 stays."""
    x = jax.ShapeDtypeStruct((2, length, 11, 1), jnp.float32)
    layer = Recurrence(operator="linear_attention")
    operands = x, x, x, None
    assert layer.on_ring(operands, layer.sizes(operands, None, None), layout, size).strategy == taken
