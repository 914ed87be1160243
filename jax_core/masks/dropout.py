"""Which attention weights a dropout seed keeps: a counter-based hash of (seed, batch, head, query index, key index).

The bits depend on nothing else, so the pattern is the same for any ring size, layout or block size, and the backward recomputes
it. The hash is Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as
1, 2, 3"), used twice: ``(seed) x (batch, head) -> key`` and ``key x (query, key) -> bits``.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry_2x32(key: tuple, counter: tuple) -> tuple:
    """Threefry-2x32-20 of two uint32 words under a key of two uint32 words; arguments broadcast."""
    k0, k1 = (jnp.asarray(word, jnp.uint32) for word in key)
    x0, x1 = (jnp.asarray(word, jnp.uint32) for word in counter)
    keys = (k0, k1, k0 ^ k1 ^ jnp.uint32(_PARITY))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << rotation) | (x1 >> (32 - rotation))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def keep_mask(seed: Any, batch: ArrayLike, head: ArrayLike, q_index: ArrayLike, k_index: ArrayLike, prob: float) -> Array:
    """True where the weight is kept, which has probability ``1 - prob``.

    ``seed``: uint32 ``[2]``. The others are integer arrays that broadcast; indices are global, in sequence order.
    """
    key = threefry_2x32((seed[0], seed[1]), (batch, head))
    bits, _ = threefry_2x32(key, (q_index, k_index))
    return bits >= jnp.uint32(threshold(prob))


def threshold(prob: float) -> int:
    """The smallest uint32 for which the weight is kept."""
    return min(round(prob * 2**32), 2**32 - 1)


def seed_words(seed: ArrayLike) -> Array:
    """A Python int (its low 64 bits), a uint32 pair, or a traced integer, as the uint32 ``[2]`` of :func:`keep_mask`."""
    if isinstance(seed, (int, np.integer)):
        seed = int(seed)
        return jnp.asarray(np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32))
    seed = jnp.asarray(seed)
    if not jnp.issubdtype(seed.dtype, jnp.integer) or seed.shape not in ((), (2,)):
        raise ValueError(f"dropout_seed must be an int, an integer scalar or uint32 [2], got {seed.dtype} {seed.shape}")
    if seed.shape == (2,):
        return seed.astype(jnp.uint32)
    high = seed >> 32 if seed.dtype.itemsize == 8 else jnp.where(seed < 0, jnp.uint32(0xFFFFFFFF), jnp.uint32(0))
    return jnp.stack([seed.astype(jnp.uint32), high.astype(jnp.uint32)])
