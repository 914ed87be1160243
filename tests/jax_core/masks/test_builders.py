"""Mask builders: what splash attention's masks become, and that any object that slices means what it says."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash

from jax_core.masks.builders import Built, build_mask
from jax_core.masks.functions import from_mask_mod
from jax_core.masks.static import Mask, make_mask, visible

SHAPE = 150, 140
KINDS = {
    "full": splash.FullMask(SHAPE),
    "causal": splash.CausalMask(SHAPE),
    "causal, shifted": splash.CausalMask(SHAPE, offset=5),
    "local": splash.LocalMask(SHAPE, (20, 3), 0),
    "local to the left": splash.LocalMask(SHAPE, (20, None), 0),
    "local, shifted": splash.LocalMask(SHAPE, (None, 30), 7),
    "chunked": splash.ChunkedCausalMask(SHAPE, 32),
    "both": splash.CausalMask(SHAPE) & splash.LocalMask(SHAPE, (9, 9), 0),
    "either": splash.CausalMask(SHAPE) | splash.LocalMask(SHAPE, (9, 9), 0),
    "chunks of two lengths": splash.ChunkedCausalMask(SHAPE, 32) & splash.ChunkedCausalMask(SHAPE, 24),
    "local to the right alone": splash.LocalMask(SHAPE, (-1, 5), 0),
    "NumPy's numbers": splash.LocalMask(SHAPE, (np.int64(3), 2), 0),
    "NumPy": splash.NumpyMask(np.random.default_rng(0).random(SHAPE) < 0.5),
}
STATIC = {
    "full": Mask(),
    "causal": make_mask(True),
    "local": make_mask(window=(20, 3)),
    "local to the left": make_mask(window=(20, None)),
    "chunked": make_mask(chunk=32),
    "NumPy's numbers": make_mask(window=(3, 2)),
    "both": make_mask(True, (9, 9)),
}


def build(masks, static: bool = True) -> Built:
    return build_mask(lambda q_len, kv_len, heads, head, reps: masks[head], *SHAPE, len(masks), 1, static)


def seen(built: Built, head: int, on_tile: bool = False):
    q, k = jnp.broadcast_arrays(jnp.arange(SHAPE[0])[:, None], jnp.arange(SHAPE[1])[None, :])
    mask = visible(built.mask, q, k)
    if built.predicate is None:
        return mask
    if on_tile:
        assert built.predicate.elementwise is not None
        return mask & built.predicate.elementwise(0, jnp.int32(head), q, k)
    return mask & jax.vmap(jax.vmap(partial(built.predicate.apply, built.arrays, 0, jnp.int32(head))))(q, k)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("static", [True, False])
def test_a_mask_means_what_it_slices_to(kind: str, static: bool):
    mask = KINDS[kind]
    built = build([mask, mask], static)
    np.testing.assert_array_equal(seen(built, 1), mask[:, :])
    assert (built.predicate is None) == (static and kind in STATIC)
    assert built.mask == (STATIC[kind] if static and kind in STATIC else Mask())
    if built.predicate is not None and kind not in ("NumPy", "local to the right alone"):
        assert built.arrays == ()
        np.testing.assert_array_equal(seen(built, 1, on_tile=True), mask[:, :])


def test_every_head_has_its_own():
    masks = [KINDS[kind] for kind in ("causal", "either", "causal", "local, shifted")]
    for heads in (masks, [*masks[:3], KINDS["NumPy"]], [masks[0], KINDS["NumPy"]]):
        built = build(heads)
        for head, mask in enumerate(heads):
            np.testing.assert_array_equal(seen(built, head), mask[:, :])


def test_a_subclass_is_sliced():
    class Odd(splash.CausalMask):
        def __getitem__(self, index):
            return super().__getitem__(index) & (np.arange(SHAPE[1])[index[1]] % 2 == 1)

    np.testing.assert_array_equal(seen(build([Odd(SHAPE)]), 0), Odd(SHAPE)[:, :])


def test_a_million_tokens_need_no_table():
    shape = 2**20, 2**20
    window = build_mask(lambda *sizes: splash.LocalMask(shape, (4096, 0), 0), *shape, 8, 1)
    assert window == Built(make_mask(window=(4096, 0)))
    several = build_mask(lambda q, k, heads, head, reps: splash.LocalMask(shape, (2**head, 0), 0), *shape, 8, 1)
    assert several.arrays == ()


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"masks of 150 x 140, got \(150, 150\)"):
        build([splash.CausalMask((150, 150))])
    with pytest.raises(ValueError, match=r"masks of 150 x 140, got \(160, 150\)"):
        build([splash.CausalMask((160, 150)), KINDS["NumPy"]])


@pytest.mark.parametrize(
    ("mask_mod", "inside"),
    [
        (lambda b, h, i, j: (j <= i) & (i // 3 != h), True),
        (lambda b, h, i, j: j <= jnp.where(i < 5, 4, i), True),
        (lambda b, h, i, j: jnp.where(h == 0, i >= j, i == j), False),
        (lambda b, h, i, j: jax.lax.cond(i > 4, lambda: j <= i, lambda: j == i), False),
        (lambda b, h, i, j: (i % 7).astype(jnp.int8) >= 3, False),
        (lambda b, h, i, j: jax.lax.fori_loop(0, i % 5, lambda _, x: x + 1, j) > 3, False),
        (lambda b, h, i, j: jnp.arange(200)[i] >= j, False),
    ],
)
def test_which_mask_functions_a_kernel_computes_itself(mask_mod, inside):
    """What Mosaic cannot compile becomes an array."""
    predicate, _ = from_mask_mod(mask_mod)
    assert (predicate.elementwise is not None) == inside
