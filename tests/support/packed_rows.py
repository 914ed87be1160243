"""Packed rows whose documents are told as such, computed by a kernel: what flash-attn-4's rectangles are tried with."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from attention_cases import CAUSAL, ring_mesh
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_core.masks.layout import permutation
from jax_core.operands import Operands
from jax_core.options import ALONE, Options, Placement
from jax_core.request.spec import make_spec
from jax_core.strategies.pairs.rows import as_kernel_takes_them
from ring_attn.packed.placement import Placement as Placed
from ring_attn.packed.placement import place


class Packed(NamedTuple):
    """``bounds``: of the documents of each batch entry, in the whole sequence. ``placed``: by ``shard_packed``'s rule."""

    bounds: Sequence[Sequence[int]]
    ring: int = 1
    layout: str = "contiguous"
    length: int = 128
    kv_heads: int = 1
    options: Mapping[str, Any] = CAUSAL
    dim: int = 72
    placed: bool = False

    @property
    def options_as_told(self) -> dict[str, Any]:
        """With what the table does not say itself."""
        told = {"shared_eighths": self.placement.shared_eighths(self.length)} if self.placed else {}
        return {**self.options, **told}

    @property
    def placement(self) -> Placed:
        return place(np.diff(self.bounds[0]).tolist(), self.ring, self.length)

    @property
    def order(self) -> list[int]:
        return permutation(self.layout, self.ring, self.ring * self.length)

    @property
    def ids(self) -> np.ndarray:
        places, table = np.arange(self.ring * self.length), np.asarray(self.bounds)[:, :, None]
        ids = (table <= places).sum(1) - 1
        return np.where((ids >= 0) & (places < table[:, -1]), ids, -1).astype(np.int32)

    @property
    def piece_table(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The table, and the ids that say the same, in the layout's order."""
        if not self.placed:
            ids = self.ids[:, self.order]
            return np.asarray(self.bounds, np.int32), dict(q_segment_ids=ids, kv_segment_ids=ids)
        placement = self.placement
        ids, positions = np.full((2, self.ring, self.length), -1, np.int32)
        for rank, pieces in enumerate(placement.pieces):
            rows = [(placement.numbers[x.document], place) for x in pieces for place in range(x.start, x.stop)]
            ids[rank, : len(rows)], positions[rank, : len(rows)] = np.array(rows).T
        assert placement.table is not None
        ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
        return placement.table, dict(q_segment_ids=ids, kv_segment_ids=ids, q_position_ids=positions, kv_position_ids=positions)


TWO_ROWS = (0, 70, 71, 300, 301, 512, 512, 512), (3, 128, 256, 384, 400, 401, 402, 480)
CASES = {
    "alone": Packed([[0, 5, 60, 61, 128]]),
    "alone, padded, own heads, two rows": Packed([[0, 9, 9, 77, 77], [4, 40, 64, 65, 127]], kv_heads=2),
    "alone, all visible": Packed([[0, 31, 32, 96]], options={}),
    "alone, window, soft cap": Packed([[0, 50, 128]], options=CAUSAL | {"sliding_window": 20, "logits_soft_cap": 2.0}),
    "alone, deterministic": Packed([[0, 50, 128]], options=CAUSAL | {"deterministic": True}),
    "alone, no padding, two rows": Packed([[0, 50, 128], [0, 128, 128]], options=CAUSAL | {"padding": False}),
    "zigzag of two, no padding": Packed([[0, 30, 131, 256]], ring=2, layout="zigzag", options=CAUSAL | {"padding": False}),
    "contiguous of four": Packed(TWO_ROWS[:1], ring=4),
    "contiguous of four, own heads, two rows": Packed(TWO_ROWS, ring=4, kv_heads=2),
    "zigzag of four": Packed(TWO_ROWS, ring=4, layout="zigzag", options=CAUSAL | {"deterministic": True}),
    "zigzag of two, one row, own heads": Packed([[7, 30, 31, 200, 250]], ring=2, layout="zigzag", kv_heads=2),
    "zigzag of two, one document": Packed([[0, 256, 256]], ring=2, layout="zigzag"),
    "zigzag of four, padding after most": Packed([[0, 20, 40, 90]], ring=4, layout="zigzag"),
    "placed on one": Packed([[0, 5, 60, 61, 120]], placed=True),
    "placed on two, one cut": Packed([[0, 150, 170, 201, 210, 247]], ring=2, placed=True),
    "placed on two, own heads": Packed([[0, 200, 230, 250]], ring=2, layout="zigzag", kv_heads=2, placed=True),
    "placed on four, three cut": Packed(
        [[0, 190, 370, 400, 401, 440, 500]], 4, placed=True, options=CAUSAL | {"deterministic": True}
    ),
    "placed on four, no padding": Packed([[0, 128, 192, 256, 448, 512]], 4, placed=True, options=CAUSAL | {"padding": False}),
    "placed on two, one did not fit": Packed([[0, 120, 240, 256]], ring=2, placed=True),
    "placed on two, none cut": Packed([[0, 150, 252, 321, 455]], ring=2, length=256, placed=True),
    "placed on two, a part sent, own heads": Packed(
        [[0, 45, 228, 248, 268, 340, 350, 369, 432, 479]], ring=2, length=256, kv_heads=2, placed=True
    ),
    "placed on four, a part sent": Packed(
        [[0, 78, 136, 173, 278, 320, 330, 367, 569, 665, 789, 874]], ring=4, length=256, placed=True
    ),
}


def computed(packed: Packed, platform: str, dtype: str = "float32", by_table: bool | None = None, strategy: str = "ring") -> tuple:
    """Out, LSE, and the gradients of query, key and value, of whole sequences in the layout's order. ``by_table``: the documents
    are told so, not as segment ids; by default where the kernel takes them."""
    function, arrays = call_of(packed, platform, dtype, by_table, strategy)
    return function(*arrays)


def call_of(
    packed: Packed, platform: str, dtype: str = "float32", by_table: bool | None = None, strategy: str = "ring"
) -> tuple[Any, tuple]:
    """The jitted function of that, and its arguments. A strategy of two axes gets two."""
    by_table = platform == "cute" if by_table is None else by_table
    sizes = [(len(packed.bounds), packed.ring * packed.length, heads, packed.dim) for heads in (2, *[packed.kv_heads] * 2, 2)]
    random = map(np.random.default_rng(0).normal, [0.0] * 4, [1.0] * 4, sizes)
    q, k, v, dout = (jnp.asarray(x, jnp.bfloat16).astype(dtype) for x in random)
    options = Options(platform=platform, strategy=strategy, layout=packed.layout, lse_gradient=False, **packed.options_as_told)
    mesh = packed_mesh(packed.ring, strategy)
    (table, ids), rows = packed.piece_table, P(None, mesh.axis_names)

    def local(q, k, v, dout, ids, table):
        told = dict(documents=table) if by_table else ids
        axes = mesh.axis_names if len(mesh.axis_names) > 1 else "ring"
        ring = Placement(axes, packed.ring, mesh.devices.shape) if packed.ring > 1 else ALONE
        spec, operands = make_spec(options, Operands(q, k, v, **told), ring)
        assert spec.by_document == (platform == "cute" and (strategy == "ring" or not packed.placed))
        operands = as_kernel_takes_them(spec, operands)
        out, lse = spec.strategy.forward(spec, operands)
        gradients = spec.strategy.backward(spec, operands, out, lse, dout)
        return out, jnp.swapaxes(lse, 1, 2), *gradients[:3]

    if packed.ring == 1:
        return jax.jit(local), (q, k, v, dout, ids, table)
    specs = (rows,) * 5 + (P(),)
    function = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows))
    return function, (q, k, v, dout, ids, table)


def packed_mesh(size: int, strategy: str) -> Mesh:
    if strategy not in ("ulysses_ring", "ring_ulysses"):
        return ring_mesh(size)
    return Mesh(np.array(jax.devices()[:size]).reshape(2, -1), ("major", "minor"))
