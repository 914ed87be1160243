"""Attention test cases, their inputs, and how to run one: on a ring of CPU devices, or through the oracle.

Inputs are whole sequences in natural order, made by NumPy from the case's name and rounded to the case's dtype, so that every
implementation starts from the same numbers. `ring_results` converts them to the layout's order, calls
`jax_core.ring_attention`, differentiates, and converts everything back.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jax_core
from jax_core.masks.layout import inverse_permutation, permutation
from jax_core.testing.oracle import reference_attention

DIFFERENTIABLE = ("query", "key", "value", "softmax_aux", "bias", "alibi_slopes")
# Which axis of an argument runs along the sequence, and on which side. Arguments not listed here are the same on every rank.
SEQUENCE_AXIS = {
    "query": (1, "q"),
    "key": (1, "kv"),
    "value": (1, "kv"),
    "bias": (2, "q"),
    "mask": (2, "q"),
    "q_segment_ids": (1, "q"),
    "kv_segment_ids": (1, "kv"),
    "q_position_ids": (-1, "q"),
    "kv_position_ids": (-1, "kv"),
    "out": (1, "q"),
    "lse": (2, "q"),
}
SPEC_ORDER = ("query", "key", "value", "softmax_aux", "bias", "q_segment_ids", "kv_segment_ids")
QUICK_COMPILE = {"xla_backend_optimization_level": 0}  # makes small programs that run once a third faster
MODES = ("shard_map", "mesh", "mesh and specs", "alone")

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One call of ring_attention. `queries` and `keys` are lengths per shard; `arrays` makes the optional array arguments."""

    name: str
    ring: int = 1
    axes: tuple[int, ...] = ()  # the lengths of the ring's mesh axes, if they are several
    layout: str = "contiguous"
    queries: int = 24
    keys: int | None = None
    batch: int = 2
    heads: int = 4
    kv_heads: int = 4
    dim: int = 8
    value_dim: int | None = None
    dtype: str = "float32"
    block: int | None = 16
    mode: str = "shard_map"
    spread: float = 1.0  # of the query's entries; a large one makes the softmax sharp
    lse_cotangent: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # options that must not change the result
    arrays: Mapping[str, Callable[[np.random.Generator, "Case"], np.ndarray]] = field(default_factory=dict)
    slow: bool = False
    quick_compile: bool = True

    @property
    def whole_queries(self) -> int:
        return self.ring * self.queries

    @property
    def whole_keys(self) -> int:
        return self.ring * (self.queries if self.keys is None else self.keys)

    def length(self, side: str) -> int:
        return self.whole_queries if side == "q" else self.whole_keys


def over(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """Runs a test with each case of a wide table."""
    marks = {False: [pytest.mark.wide], True: [pytest.mark.wide, pytest.mark.slow]}
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks[case.slow]) for case in cases])


# ---------------------------------------------------------------------------------------------------------------- inputs


def make_inputs(case: Case) -> Arrays:
    """The array arguments, whole and in natural order; floats in the case's dtype (sinks and slopes in float32 or wider)."""
    rng = np.random.default_rng(crc32(case.name.encode()))
    value_dim = case.dim if case.value_dim is None else case.value_dim
    inputs = {
        "query": case.spread * rng.standard_normal((case.batch, case.whole_queries, case.heads, case.dim)),
        "key": rng.standard_normal((case.batch, case.whole_keys, case.kv_heads, case.dim)),
        "value": rng.standard_normal((case.batch, case.whole_keys, case.kv_heads, value_dim)),
    }
    inputs |= {name: make(rng, case) for name, make in case.arrays.items()}
    return {name: rounded(array, input_dtype(case, name)) for name, array in inputs.items()}


def input_dtype(case: Case, name: str) -> np.dtype:
    parameters = name in ("softmax_aux", "alibi_slopes") and case.dtype != "float64"
    return np.dtype("float32" if parameters else jnp.dtype(case.dtype))


def rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return array.astype(dtype) if array.dtype == np.float64 else array


def make_cotangents(case: Case) -> Arrays:
    rng = np.random.default_rng(crc32(case.name.encode()) + 1)
    value_dim = case.dim if case.value_dim is None else case.value_dim
    lse_dtype = np.float64 if case.dtype == "float64" else np.float32
    out = rng.standard_normal((case.batch, case.whole_queries, case.heads, value_dim)).astype(jnp.dtype(case.dtype))
    lse = rng.standard_normal((case.batch, case.heads, case.whole_queries)).astype(lse_dtype)
    return {"out": out, "lse": lse if case.lse_cotangent else np.zeros_like(lse)}


def normal(*shape: int | str, spread: float = 1.0) -> Callable[[np.random.Generator, Case], np.ndarray]:
    """Normally distributed numbers; a shape may name the case's sizes: B, H, T (all queries), S (all keys)."""

    def make(rng: np.random.Generator, case: Case) -> np.ndarray:
        return spread * rng.standard_normal(_shape(shape, case))

    return make


def positive(*shape: int | str) -> Callable[[np.random.Generator, Case], np.ndarray]:
    def make(rng: np.random.Generator, case: Case) -> np.ndarray:
        return rng.uniform(0.05, 0.5, _shape(shape, case))

    return make


def booleans(*shape: int | str, density: float = 0.7) -> Callable[[np.random.Generator, Case], np.ndarray]:
    def make(rng: np.random.Generator, case: Case) -> np.ndarray:
        return rng.random(_shape(shape, case)) < density

    return make


def _shape(shape: tuple[int | str, ...], case: Case) -> tuple[int, ...]:
    named = {"B": case.batch, "H": case.heads, "T": case.whole_queries, "S": case.whole_keys}
    return tuple(named[size] if isinstance(size, str) else size for size in shape)


def segments(side: str, count: int = 3, padding: float = 0.0) -> Callable[[np.random.Generator, Case], np.ndarray]:
    """[B, length]: `count` segments of random lengths in order; the last `padding` share of the sequence is padding (-1)."""

    def make(rng: np.random.Generator, case: Case) -> np.ndarray:
        length = case.length(side)
        ids = np.sort(rng.integers(0, count, (case.batch, length)), axis=1).astype(np.int32)
        ids[:, length - int(padding * length) :] = -1
        return ids

    return make


def positions(side: str, kind: str) -> Callable[[np.random.Generator, Case], np.ndarray]:
    """Position ids: "shuffled" or "restarting" [B, length]; "shifted" (by 7) and "late" (all past every key) [length]."""

    def make(rng: np.random.Generator, case: Case) -> np.ndarray:
        natural = np.arange(case.length(side), dtype=np.int32)
        made = {
            "shuffled": lambda: np.stack([rng.permutation(natural) for _ in range(case.batch)]),
            "restarting": lambda: np.stack([natural % (11 + 6 * b) for b in range(case.batch)]),
            "shifted": lambda: natural + 7,
            "late": lambda: natural + 1000,
        }
        return made[kind]()

    return make


def seed(low: int = 7, high: int = 11) -> Callable[[np.random.Generator, Case], np.ndarray]:
    return lambda rng, case: np.array([low, high], np.uint32)


class LazyMask:
    """A mask of two global position ranges, as `mask_builder` returns it: computed only where it is sliced."""

    def __init__(self, lengths: tuple[int, int], rule: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
        self.lengths, self.rule = lengths, rule

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        q_pos, k_pos = (np.arange(length)[part] for length, part in zip(self.lengths, index, strict=True))
        return self.rule(q_pos[:, None], k_pos[None, :])


# ---------------------------------------------------------------------------------------------------------------- results


def oracle_results(case: Case, inputs: Arrays, cotangents: Arrays, dtype: str = "float64") -> Arrays:
    """out, lse and the gradient of every differentiable input, in float64 arrays, computed in ``dtype``; once in a process for what
    several kernels, layouts and rings are compared with."""
    digest = sha256()
    for name, array in (*inputs.items(), *cotangents.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    key = (dtype, tuple(sorted(case.options.items())), digest.digest())
    if key not in _ORACLE:
        _ORACLE[key] = _of_the_oracle(case.options, inputs, cotangents, dtype)
    return dict(_ORACLE[key])


_ORACLE: dict[Any, Arrays] = {}


def _of_the_oracle(options: Mapping[str, Any], inputs: Arrays, cotangents: Arrays, dtype: str) -> Arrays:
    with jax.enable_x64(True):
        parameters, rest = _split({name: _widened(array, dtype) for name, array in inputs.items()})

        @partial(jax.jit, compiler_options=QUICK_COMPILE)
        def run(parameters: Any, rest: Any, cotangents: Any) -> Any:
            def attend(parameters: Any) -> Any:
                return tuple(reference_attention(**parameters, **rest, **options, dtype=dtype))

            results, transpose = jax.vjp(attend, parameters)
            return results, transpose(cotangents)[0]

        results = run(parameters, rest, tuple(_widened(cotangents[name], dtype) for name in ("out", "lse")))
    return _named(*results)


def _widened(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def _split(arrays: Arrays) -> tuple[Arrays, Arrays]:
    parameters = {name: array for name, array in arrays.items() if name in DIFFERENTIABLE}
    return parameters, {name: array for name, array in arrays.items() if name not in DIFFERENTIABLE}


def _named(results: Any, gradients: Any) -> Arrays:
    everything = {"out": results[0], "lse": results[1]} | {f"d_{name}": array for name, array in gradients.items()}
    return {name: np.asarray(array).astype(np.float64) for name, array in everything.items()}


@contextmanager
def quick_compiles(quick: bool = True) -> Iterator[None]:
    """Disables most XLA optimisations, for small programs that run once; or enables them again, where they are disabled."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quick)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def ring_mesh(size: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), ("ring",))


def _mesh(case: Case) -> Mesh:
    return Mesh(np.array(jax.devices()[: case.ring]).reshape(case.axes or (case.ring,)), axis_names(case))


def axis_names(case: Case) -> tuple[str, ...]:
    return tuple(f"axis{i}" for i in range(len(case.axes))) or ("ring",)


def ring_results(case: Case, inputs: Arrays, cotangents: Arrays, check_vma: bool = True) -> Arrays:
    """The same results as `oracle_results`, from `jax_core.ring_attention` in the case's dtype, ring, layout and mode."""
    with jax.enable_x64(case.dtype == "float64"), quick_compiles(case.quick_compile):
        parameters, rest = _split(to_layout(case, inputs))
        attend = sharded_attention(case, inputs, check_vma)

        @jax.jit
        def run(parameters: Any, rest: Any, cotangents: Any) -> Any:
            results, transpose = jax.vjp(lambda parameters: attend(parameters, rest), parameters)
            return results, transpose(cotangents)[0]

        moved = to_layout(case, cotangents)
        results, gradients = run(parameters, rest, (moved["out"], moved["lse"]))
        check_dtypes(case, parameters, results, gradients)
        return from_layout(case, _named(results, gradients))


def check_dtypes(case: Case, parameters: Any, results: Any, gradients: Any) -> None:
    assert results[0].dtype == jnp.dtype(case.dtype)
    assert results[1].dtype == (jnp.float64 if case.dtype == "float64" else jnp.float32)
    assert {name: array.dtype for name, array in gradients.items()} == {name: array.dtype for name, array in parameters.items()}


def ring_output(case: Case, inputs: Arrays) -> np.ndarray:
    """The output alone, in natural order: the forward of `ring_results`, at half the cost."""
    parameters, rest = _split(to_layout(case, inputs))
    out = jax.jit(sharded_attention(case, inputs), compiler_options=QUICK_COMPILE)(parameters, rest)[0]
    return from_layout(case, {"out": np.asarray(out)})["out"]


def sharded_attention(case: Case, inputs: Arrays, check_vma: bool = True) -> Callable[[Any, Any], Any]:
    """A function of (differentiable arrays, other arrays) to (out, lse), all of them global and in the layout's order."""
    settings = {**case.options, **case.settings} | {"layout": case.layout, "return_lse": True}
    if case.block is not None:
        settings["cfg"] = small_blocks(case.block)

    def attend(parameters: Any, rest: Any, **more: Any) -> Any:
        return tuple(jax_core.ring_attention(**parameters, **rest, **settings, **more))

    if case.mode == "alone":
        return attend
    axes = axis_names(case)
    where = axes if len(axes) > 1 else axes[0]
    mesh, specs = _mesh(case), {name: spec(name, array.ndim, where) for name, array in inputs.items()}
    out_specs = (spec("out", 4, where), spec("lse", 3, where))
    if case.mode == "mesh":
        return lambda parameters, rest: attend(parameters, rest, mesh=mesh, axis_name=where)
    if case.mode == "mesh and specs":
        more = {"in_specs": tuple(map(specs.get, SPEC_ORDER)), "out_specs": out_specs}
        return lambda parameters, rest: attend(parameters, rest, mesh=mesh, axis_name=where, **more)
    return jax.shard_map(
        lambda parameters, rest: attend(parameters, rest, axis_name=where),
        mesh=mesh,
        in_specs=_split(specs),  # type: ignore[arg-type]
        out_specs=out_specs,
        check_vma=check_vma,
    )


def small_blocks(size: int) -> Any:
    forward, backward = (kind(q_blocksize=size, kv_blocksize=size) for kind in (jax_core.FwdParams, jax_core.BwdParams))
    return jax_core.RingAttentionConfig(fwd_params=forward, bwd_params=backward)


def uneven_blocks() -> Any:
    forward, backward = jax_core.FwdParams(q_blocksize=8, kv_blocksize=11), jax_core.BwdParams(q_blocksize=13, kv_blocksize=6)
    return jax_core.RingAttentionConfig(fwd_params=forward, bwd_params=backward)


def spec(name: str, ndim: int, axes: str | tuple[str, ...] = "ring") -> P:
    if name not in SEQUENCE_AXIS:
        return P()
    axis = SEQUENCE_AXIS[name][0] % ndim
    return P(*(None,) * axis, axes)


def to_layout(case: Case, arrays: Arrays) -> Arrays:
    return _reordered(case, arrays, permutation)


def from_layout(case: Case, arrays: Arrays) -> Arrays:
    return _reordered(case, arrays, inverse_permutation)


def _reordered(case: Case, arrays: Arrays, order: Callable[[str, int, int], list[int]]) -> Arrays:
    def reorder(name: str, array: np.ndarray) -> np.ndarray:
        if name.removeprefix("d_") not in SEQUENCE_AXIS:
            return array
        axis, side = SEQUENCE_AXIS[name.removeprefix("d_")]
        return np.take(array, order(case.layout, case.ring, case.length(side)), axis=axis)

    return {name: reorder(name, array) for name, array in arrays.items()}


# ----------------------------------------------------------------------------------------------------------------- cases


def every_third_pair(batch: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    """A mask_mod that reads all four of its arguments and hides some rows completely."""
    return ((q_pos * 5 + k_pos * 3 + head + batch) % 3 != 0) & (q_pos % 7 != 4)


def banded_per_head(q_len: int, kv_len: int, num_heads: int, head_idx: int, num_reps: int) -> LazyMask:
    """A mask_builder whose band widens with the head and the group, and is empty below row 3."""
    assert num_heads % num_reps == 0
    width = 4 + 3 * head_idx + num_reps
    return LazyMask((q_len, kv_len), lambda q, k: (abs(q - k) < width) & (q >= 3))


def _window(*sides: int | None) -> dict[str, Any]:
    return {"sliding_window": sides if len(sides) == 2 else sides[0]}


CAUSAL = {"causal": True}
DROPOUT = {"dropout_prob": 0.3}
SEED = {"dropout_seed": seed()}
SINKS = {"softmax_aux": normal("H")}
MANY_SINKS = {"softmax_aux": normal("H", 2)}
BIAS = {"bias": normal("B", "H", "T", "S")}
BIAS_OF_HEADS = {"bias": normal(1, "H", "T", "S")}
SLOPES = {"alibi_slopes": positive("H")}
SLOPES_OF_ALL = {"alibi_slopes": positive("B", "H")}
PACKED = {"q_segment_ids": segments("q", padding=0.2)}
PACKED_KEYS = {"kv_segment_ids": segments("kv")}
PACKED_BOTH = {"q_segment_ids": segments("q", 4, 0.1), "kv_segment_ids": segments("kv", 3, 0.3)}
SHUFFLED = {"q_position_ids": positions("q", "shuffled")}
SHUFFLED_KEYS = {"kv_position_ids": positions("kv", "shuffled")}
SHUFFLED_BOTH = SHUFFLED | SHUFFLED_KEYS
SHIFTED = {"q_position_ids": positions("q", "shifted")} | SHUFFLED_KEYS
RESTARTING = {"q_position_ids": positions("q", "restarting")}
LATE = {"q_position_ids": positions("q", "late"), "kv_position_ids": positions("kv", "shifted")}
LAST_QUERY = {"q_position_ids": lambda rng, case: np.array([44]), "kv_position_ids": lambda rng, case: np.arange(45)}
MASK = {"mask": booleans("B", "H", "T", "S")}
MASK_OF_ALL = {"mask": booleans("B", 1, "T", "S", density=0.9)}
FUNCTION = {"mask_mod": every_third_pair}
BUILDER = {"mask_builder": banded_per_head}
MIXED = {"options": CAUSAL | DROPOUT | {"sliding_window": 40}, "arrays": PACKED | SINKS | BIAS | SEED | SLOPES}

_slowly = partial(Case, slow=True)

# Each feature alone, on one of the three layouts and ring sizes 1, 2 and 4; then those that interact. Not every feature on every
# layout: the layouts differ only in positions and in the columns of bias and mask, the ring sizes in the number of steps.
# fmt: off
FEATURE_CASES = (
    _slowly("whole sequence on one device", mode="alone", queries=37),
    _slowly("bidirectional", ring=4, queries=37, batch=1),
    _slowly("bidirectional zigzag", ring=2, layout="zigzag", queries=50, batch=1),
    Case("causal contiguous", ring=4, options=CAUSAL),
    Case("causal zigzag", ring=4, layout="zigzag", queries=26, options=CAUSAL),
    _slowly("causal striped", ring=2, layout="striped", queries=37, options=CAUSAL),
    _slowly("causal striped over four", ring=4, layout="striped", queries=17, options=CAUSAL),
    _slowly("causal zigzag over eight", ring=8, layout="zigzag", queries=10, block=4, options=CAUSAL),
    _slowly("default blocks", ring=2, block=None, options=CAUSAL),
    _slowly("blocks of many sizes", ring=2, queries=29, block=None, options=CAUSAL, settings={"cfg": uneven_blocks()}),
    _slowly("ring of three", ring=3, layout="zigzag", queries=14, kv_heads=2, options=CAUSAL),
    _slowly("window over eight", ring=8, queries=8, batch=1, options=_window(5)),
    _slowly("blocks of one", ring=2, queries=5, block=1, options=CAUSAL),
    _slowly("window of an int", ring=4, queries=20, options=_window(9)),
    Case("window cut by causal", ring=4, layout="zigzag", queries=20, options=CAUSAL | _window(9)),
    _slowly("window of two sides", ring=2, layout="striped", options=_window(11, 3)),
    _slowly("window to the left", ring=4, options=_window(30, -1)),
    _slowly("window to the right", ring=2, layout="zigzag", options=_window(None, 5)),
    _slowly("window of the key itself", ring=2, options=_window(0)),
    _slowly("window longer than a shard", ring=4, queries=10, options=CAUSAL | _window(23)),
    _slowly("chunks", ring=4, queries=18, options={"chunk_size": 28}),
    Case("chunks striped", ring=2, layout="striped", options={"chunk_size": 11}),
    _slowly("chunks zigzag", ring=4, layout="zigzag", queries=14, options={"chunk_size": 16} | _window(5)),
    _slowly("soft cap", ring=2, spread=5.0, options=CAUSAL | {"logits_soft_cap": 2.5}),
    _slowly("scale", ring=2, options={"softmax_scale": 0.11}),
    _slowly("scale of zero", mode="alone", options={"softmax_scale": 0.0}),
    _slowly("negative scale", ring=2, options={"softmax_scale": -0.4}),
    _slowly("sharp softmax", ring=4, layout="zigzag", spread=60.0, options=CAUSAL),
    _slowly("grouped heads", ring=2, kv_heads=2, options=CAUSAL),
    _slowly("one key head", ring=4, layout="zigzag", heads=3, kv_heads=1),
    _slowly("wide values", ring=2, kv_heads=2, value_dim=13, options=CAUSAL),
    _slowly("narrow values", ring=2, layout="striped", value_dim=3, dim=11),
    _slowly("more keys", ring=2, layout="zigzag", queries=18, keys=38, options=CAUSAL),
    _slowly("fewer keys", ring=4, layout="striped", queries=30, keys=7, options=CAUSAL),
    _slowly("one query", mode="alone", queries=1, keys=45, options=CAUSAL, arrays=LAST_QUERY),
    _slowly("window over more keys", ring=4, queries=9, keys=25, options=_window(3, 40)),
    _slowly("packed with padding", ring=4, layout="zigzag", queries=20, arrays=PACKED),
    _slowly("packed striped", ring=2, layout="striped", options=CAUSAL, arrays=PACKED_KEYS),
    _slowly("segments of both sides", ring=2, queries=18, keys=31, arrays=PACKED_BOTH),
    Case("positions beyond neighbours", ring=4, queries=14, options=CAUSAL | _window(10), arrays=SHUFFLED),
    _slowly("positions per sequence", ring=2, layout="zigzag", options=CAUSAL, arrays=SHUFFLED),
    _slowly("positions of both sides", ring=4, queries=13, keys=22, options=CAUSAL | _window(12), arrays=SHIFTED),
    _slowly("positions past the window", ring=2, options=CAUSAL | _window(30), arrays=LATE),
    _slowly("positions and chunks", ring=4, queries=15, options={"chunk_size": 7}, arrays=SHUFFLED_KEYS),
    _slowly("bias", ring=2, layout="zigzag", arrays=BIAS),
    _slowly("bias of every head", ring=4, queries=13, arrays=BIAS_OF_HEADS),
    _slowly("bias of every sequence", ring=2, layout="striped", kv_heads=2, arrays={"bias": normal("B", 1, "T", "S")}),
    _slowly("one bias", ring=4, layout="striped", queries=19, options=CAUSAL, arrays={"bias": normal(1, 1, "T", "S")}),
    _slowly("bias over more keys", ring=2, layout="zigzag", queries=14, keys=26, arrays=BIAS),
    _slowly("slopes", ring=4, layout="zigzag", queries=20, options=CAUSAL, arrays=SLOPES),
    _slowly("slopes per sequence", ring=2, layout="striped", arrays=SLOPES_OF_ALL),
    Case("a sink per head", ring=2, layout="striped", options=CAUSAL, arrays=SINKS),
    _slowly("shared sinks", ring=2, arrays={"softmax_aux": normal(3)}),
    _slowly("one shared sink", ring=4, arrays={"softmax_aux": normal(1)}, queries=14),
    _slowly("sinks per head", ring=4, layout="zigzag", kv_heads=2, queries=12, options=CAUSAL, arrays=MANY_SINKS),
    _slowly("as many sinks as heads", mode="alone", arrays={"softmax_aux": normal("H", "H")}),
    _slowly("mask", ring=2, layout="striped", arrays=MASK),
    _slowly("one mask", ring=4, layout="zigzag", queries=14, arrays={"mask": booleans(1, 1, "T", "S")}),
    _slowly("sparse mask", ring=2, kv_heads=2, arrays={"mask": booleans("B", 1, "T", "S", density=0.02)}),
    _slowly("mask of nothing", ring=2, arrays={"mask": booleans(1, 1, "T", "S", density=0.0)}),
    _slowly("mask function", ring=2, layout="zigzag", kv_heads=2, options=FUNCTION),
    _slowly("mask function striped", ring=4, layout="striped", queries=13, options=CAUSAL | FUNCTION),
    _slowly("mask builder over 140", ring=2, layout="zigzag", queries=70, batch=1, kv_heads=2, options=BUILDER),
    _slowly("mask builder", ring=4, layout="striped", queries=15, options=CAUSAL | BUILDER),
    _slowly("dropout", ring=2, layout="zigzag", options=DROPOUT, arrays=SEED),
    _slowly("dropout over four", ring=4, layout="striped", queries=15, kv_heads=2, options=DROPOUT | CAUSAL, arrays=SEED),
    _slowly("output alone", ring=2, layout="zigzag", lse_cotangent=False, options=CAUSAL),
    _slowly("fused backward", ring=2, options=CAUSAL, settings={"fused_backward": True, "platform": "xla"}),
)
PAIR_CASES = (
    _slowly("window and segments", ring=4, layout="zigzag", queries=20, options=CAUSAL | _window(13), arrays=PACKED),
    _slowly("segments, positions restart", ring=2, layout="striped", options=CAUSAL, arrays=PACKED | RESTARTING),
    _slowly("sinks and dropout", ring=2, layout="striped", options=DROPOUT | CAUSAL, arrays=SEED | SINKS),
    _slowly("sinks over empty rows", ring=4, queries=14, options=_window(4, -1), arrays=PACKED | MANY_SINKS),
    _slowly("soft cap and bias", ring=2, layout="striped", options={"logits_soft_cap": 1.5}, arrays=BIAS | SLOPES),
    _slowly("bias and dropout", ring=2, layout="zigzag", kv_heads=2, options=DROPOUT, arrays=SEED | BIAS_OF_HEADS),
    _slowly("bias and window", ring=4, layout="zigzag", queries=16, options=CAUSAL | _window(7), arrays=BIAS),
    _slowly("slopes by position ids", ring=2, layout="zigzag", arrays=SLOPES | SHUFFLED),
    _slowly("mask function by position ids", ring=2, options=FUNCTION, arrays=SHUFFLED),
    _slowly("mask and builder by index", ring=2, layout="striped", options=BUILDER, arrays=SHUFFLED | MASK),
    _slowly("chunks and segments", ring=4, layout="striped", queries=16, options={"chunk_size": 12}, arrays=PACKED),
    _slowly("grouped sinks", ring=4, layout="zigzag", queries=12, heads=6, kv_heads=2, value_dim=5, options=CAUSAL, arrays=SINKS),
)
MODE_CASES = (
    _slowly("mesh", ring=2, mode="mesh", options=CAUSAL),
    _slowly("mesh with everything", ring=4, quick_compile=False, mode="mesh", layout="zigzag", queries=18, kv_heads=2, **MIXED),
    Case("mesh and specs", ring=2, mode="mesh and specs", layout="striped", options=CAUSAL, arrays=PACKED | SINKS | BIAS),
    _slowly("alone with everything", mode="alone", queries=41, kv_heads=2, **MIXED),
    _slowly("ring of one", ring=1, layout="zigzag", queries=42, kv_heads=2, **MIXED),
)
# fmt: on
EVERYTHING = Case(
    "everything",
    ring=4,
    layout="zigzag",
    queries=18,
    keys=22,
    kv_heads=2,
    value_dim=5,
    options=CAUSAL | DROPOUT | FUNCTION | BUILDER | _window(50) | {"logits_soft_cap": 3.0},
    arrays=BIAS | SEED | MANY_SINKS | SLOPES_OF_ALL | MASK_OF_ALL | PACKED_BOTH | SHUFFLED_BOTH,
)
DTYPE_CASES = tuple(
    Case(f"{dtype} {name}", dtype=dtype, kv_heads=2, slow=slow or name == "causal", quick_compile=False, **settings)
    for dtype, slow in (("float64", True), ("bfloat16", False), ("float16", True))
    for name, settings in (
        ("causal", {"ring": 4, "layout": "zigzag", "queries": 18, "options": CAUSAL}),
        ("with everything", {"ring": 2, "layout": "striped", "queries": 21, **MIXED}),
    )
)
CASES = (*FEATURE_CASES, *PAIR_CASES, *MODE_CASES, EVERYTHING, *DTYPE_CASES)
