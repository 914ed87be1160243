"""strategy="decode" against the float64 oracle: queries that all ranks hold, keys spread over the ranks in any order."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import quick_compiles, ring_mesh
from jax.sharding import PartitionSpec as P

import jax_core
from jax_core.strategies.decode import arrangement
from jax_core.testing.oracle import reference_attention

BATCH, QUERIES, KEYS, HEADS, KV_HEADS, DIM, VALUE_DIM = 2, 3, 48, 4, 2, 8, 11
PARAMETERS = ("query", "key", "value", "softmax_aux", "alibi_slopes")


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True), quick_compiles():
        yield


def odd_pairs_of_odd_heads(batch, head, q_pos, k_pos):
    return ((q_pos + k_pos + batch) % 3 != 0) | (head % 2 == 0)


@dataclass(frozen=True)
class Decoding:
    options: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()


POSITIONS = ("q_position_ids", "kv_position_ids")
SEGMENTS = ("q_segment_ids", "kv_segment_ids")
CASES = {
    "cross attention": Decoding(),
    "causal, sinks": Decoding({"causal": True}, (*POSITIONS, "softmax_aux")),
    "window, soft cap, segments": Decoding(
        {"sliding_window": (17, 0), "logits_soft_cap": 3.0}, (*POSITIONS, *SEGMENTS, "softmax_aux")
    ),
    "chunk, slopes": Decoding({"chunk_size": 13}, (*POSITIONS, "alibi_slopes")),
    "function, segments": Decoding({"causal": True, "mask_mod": odd_pairs_of_odd_heads}, (*POSITIONS, *SEGMENTS)),
}


def make_arrays(names: tuple[str, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {
        "query": rng.standard_normal((BATCH, QUERIES, HEADS, DIM)),
        "key": rng.standard_normal((BATCH, KEYS, KV_HEADS, DIM)),
        "value": rng.standard_normal((BATCH, KEYS, KV_HEADS, VALUE_DIM)),
        "softmax_aux": rng.standard_normal((HEADS, 2)),
        "alibi_slopes": rng.uniform(0.05, 0.5, (BATCH, HEADS)),
        "q_position_ids": np.array([[45, 46, 47], [30, 31, 32]], np.int32),
        "kv_position_ids": np.stack([rng.permutation(KEYS) for _ in range(BATCH)]).astype(np.int32),
        "q_segment_ids": np.array([[0, 0, 1], [1, 1, -1]], np.int32),
        "kv_segment_ids": rng.integers(-1, 2, (BATCH, KEYS)).astype(np.int32),
    }
    return {name: made[name] for name in ("query", "key", "value", *names)}


def with_gradients(attend: Callable[..., Any], arrays: dict[str, np.ndarray], copies: int = 1) -> list[np.ndarray]:
    """out, lse and the gradients; ``copies``: in how many copies ``attend`` returns its results."""
    rng = np.random.default_rng(1)
    dout = rng.standard_normal((BATCH, QUERIES, HEADS, VALUE_DIM))
    dlse = rng.standard_normal((BATCH, HEADS, QUERIES))
    parameters = {name: jnp.asarray(x) for name, x in arrays.items() if name in PARAMETERS}
    rest = {name: jnp.asarray(x) for name, x in arrays.items() if name not in PARAMETERS}

    def run(parameters, dout, dlse):
        results, transpose = jax.vjp(lambda parameters: attend(**parameters, **rest), parameters)
        return results, transpose((dout, jnp.where(jnp.isneginf(results[1]), 0, dlse)))[0]

    (out, lse), gradients = jax.jit(run)(parameters, *(np.concatenate([x / copies] * copies) for x in (dout, dlse)))
    return [np.asarray(x) for x in (out, lse, *(gradients[name] for name in PARAMETERS if name in gradients))]


def assert_equal(got: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.isneginf(one), np.isneginf(other))
        np.testing.assert_allclose(np.where(np.isneginf(one), 0, one), np.where(np.isneginf(other), 0, other), atol=1e-13)


def reference(case: Decoding, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    return with_gradients(lambda **operands: tuple(reference_attention(**operands, **case.options)), arrays)


def decoding(case: Decoding, size: int, **more: Any) -> Callable[..., Any]:
    settings = {**case.options, "strategy": "decode", "return_lse": True, "mesh": ring_mesh(size), **more}
    return lambda **operands: tuple(jax_core.ring_attention(**operands, **settings))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *(pytest.param(name, 2, marks=[pytest.mark.slow] * (name != "causal, sinks")) for name in CASES),
        ("window, soft cap, segments", 4),
        pytest.param("chunk, slopes", 4, marks=pytest.mark.slow),
        pytest.param("window, soft cap, segments", 1, marks=pytest.mark.slow),
    ],
)
def test_against_the_oracle(name: str, size: int):
    case = CASES[name]
    arrays = make_arrays(case.arrays)
    assert_equal(with_gradients(decoding(case, size), arrays), reference(case, arrays))


@pytest.mark.parametrize("name", ["window, soft cap, segments", "chunk, slopes"])
def test_keys_cut_into_parts(name: str, monkeypatch):
    """As on a GPU, where the parts of a shard are further batch entries."""
    monkeypatch.setattr(arrangement, "_parts", lambda backend, programs, length: 3)
    case = CASES[name]
    arrays = make_arrays(case.arrays)
    assert_equal(with_gradients(decoding(case, 2), arrays), reference(case, arrays))


def test_parts_fill_a_gpu_and_are_not_too_short():
    assert [arrangement._parts("gpu", 8, length) for length in (2**16, 2**12, 3 * 2**10, 300)] == [32, 16, 8, 1]
    assert arrangement._parts("gpu", 256, 2**16) == arrangement._parts("cpu", 8, 2**16) == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma: bool):
    """Each rank returns a copy of its own; what the copies' cotangents add up to is the cotangent of the result."""
    case = CASES["causal, sinks"]
    arrays = make_arrays(case.arrays)
    spread = {name: P(None, "ring") for name in ("key", "value", "kv_position_ids")}
    inside = decoding(case, 4, mesh=None, axis_name="ring")

    def attend(**operands):
        specs = {name: spread.get(name, P()) for name in operands}
        mapped = jax.shard_map(
            lambda operands: inside(**operands), mesh=ring_mesh(4), in_specs=(specs,), out_specs=P("ring"), check_vma=check_vma
        )
        return mapped(operands)

    out, lse, *gradients = with_gradients(attend, arrays, copies=4)
    assert all(np.array_equal(part, out[:BATCH]) for part in np.split(out, 4))
    assert_equal([out[:BATCH], lse[:BATCH], *gradients], reference(case, arrays))


def test_one_collective_joins_the_ranks():
    case = CASES["causal, sinks"]
    program = str(jax.make_jaxpr(decoding(case, 4))(**make_arrays(case.arrays)))
    collectives = ("all_gather", "psum", "ppermute", "all_to_all", "pmax")
    assert [program.count(f"{name}[") for name in collectives] == [1, 0, 0, 0, 0]


def test_specs_of_a_mesh():
    """The queries are whole, and so is the output."""
    case, arrays = CASES["cross attention"], make_arrays(())
    specs = P(), P(None, "ring"), P(None, "ring")
    given = decoding(case, 2, in_specs=specs, out_specs=(P(), P()))
    assert_equal([np.asarray(x) for x in given(**arrays)], [np.asarray(x) for x in decoding(case, 2)(**arrays)])
    with pytest.raises(ValueError, match=r"in_specs has query as .*'ring'.* must be"):
        decoding(case, 2, in_specs=(specs[1],) * 3)(**arrays)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(layout="striped"), "does not handle striped"),
        (dict(bias=np.zeros((1, 1, QUERIES, KEYS))), "does not handle a bias"),
        (dict(dropout_prob=0.1, dropout_seed=0), "does not handle dropout"),
        (dict(causal=True), "need q_position_ids and kv_position_ids"),
        (dict(mask_builder=lambda *sizes: np.ones(sizes[:2], bool)), "goes by the index of a key"),
    ],
)
def test_what_it_refuses(more: dict[str, Any], message: str):
    with pytest.raises(NotImplementedError, match=message):
        jax_core.ring_attention(**make_arrays(()), **more, strategy="decode")
