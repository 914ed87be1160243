"""Asserts that a result is about as close to the float64 oracle as a plain implementation in the same dtype."""

import jax.numpy as jnp
import numpy as np
from attention_cases import Arrays, Case, make_cotangents, make_inputs, oracle_results, ring_results


def assert_like_the_oracle(case: Case, got: Arrays, inputs: Arrays, cotangents: Arrays, more: float = 0.0) -> None:
    """The largest error against float64, and the root mean square of the errors, are at most twice those of the plain formula in
    the same dtype (computed in float32 where that is 16 bits wide, and rounded), plus a floor of a few roundings and ``more`` of
    the output's."""
    exact = oracle_results(case, inputs, cotangents)
    plain = exact if case.dtype == "float64" else oracle_results(case, inputs, cotangents, "float32")
    assert got.keys() == exact.keys()
    for name, wanted in exact.items():
        np.testing.assert_array_equal(np.isneginf(got[name]), np.isneginf(wanted), err_msg=f"-inf in {name}")
        error, plain_error = finite(got[name]) - finite(wanted), finite(rounded_result(case, name, plain[name])) - finite(wanted)
        roundings = allowed_roundings(case, name, exact["lse"])
        roundings += more * float(jnp.finfo(case.dtype).eps) if name == "out" else 0.0
        for measure in (largest, root_mean_square):
            have, allowed = measure(error), 2 * measure(plain_error) + roundings * measure(finite(wanted))
            assert have <= allowed, f"{name}: {measure.__name__} error {have:.2e}, allowed {allowed:.2e}"


def assert_ring_is_like_the_oracle(case: Case, more: float = 0.0, **options: bool) -> None:
    """The same of what the library makes of the case."""
    inputs, cotangents = make_inputs(case), make_cotangents(case)
    assert_like_the_oracle(case, ring_results(case, inputs, cotangents, **options), inputs, cotangents, more)


def allowed_roundings(case: Case, name: str, lse: np.ndarray) -> float:
    """Relative to a result's size. The backward recomputes the weights from the rounded LSE, so they inherit its rounding error,
    and uses the output rounded to 16 bits; both affect every gradient."""
    if case.dtype == "float64":
        return 64 * float(np.finfo(np.float64).eps)
    single, own = float(np.finfo(np.float32).eps), float(jnp.finfo(case.dtype).eps)
    if name in ("out", "lse"):
        return single
    return single * max(4.0, largest(finite(lse))) + (0.5 * own if own > single else 0.0)


def rounded_result(case: Case, name: str, array: np.ndarray) -> np.ndarray:
    dtype = "float32" if name == "lse" and case.dtype != "float64" else case.dtype
    return array.astype(jnp.dtype(dtype)).astype(np.float64)


def finite(array: np.ndarray) -> np.ndarray:
    """-inf replaced by 0: its positions are compared separately. Nothing else may be infinite or NaN."""
    array = np.where(np.isneginf(array), 0.0, array)
    assert np.all(np.isfinite(array)), "NaN or inf"
    return array


def largest(array: np.ndarray) -> float:
    return float(np.max(np.abs(array)))


def root_mean_square(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(array**2)))
