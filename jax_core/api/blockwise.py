"""EasyDeL's single-device blockwise attention, with its argument names, on the ring's kernels."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.lax import Precision
from jax.typing import ArrayLike, DTypeLike

from jax_core.api.differentiable import local_attention
from jax_core.config import BwdParams, FwdParams, RingAttentionConfig
from jax_core.masks.dropout import seed_words
from jax_core.operands import Operands
from jax_core.options import Options


def blockwise_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: Array | np.ndarray | None = None,
    deterministic: bool = True,
    dropout_rng: Array | None = None,
    attn_pdrop: float = 0.0,
    causal: bool = True,
    query_chunk_size: int = 2048,
    key_chunk_size: int = 2048,
    dtype: DTypeLike = jnp.float32,
    policy: Callable[..., bool] | Literal[False] | None = False,
    precision: Precision | str | None = None,
    float32_logits: bool = True,
    prevent_cse: bool = True,
    *,
    mask: Array | np.ndarray | None = None,
    init_bias: Callable[[], Array | np.ndarray] | None = None,
) -> Array:
    """Exact attention on one device, one block of scores at a time.

    Args:
        query: ``[batch, q_length, heads, dim]``; key ``[batch, k_length, kv_heads, dim]``, value
            ``[batch, k_length, kv_heads, value_dim]``. All are computed in ``dtype``.
        bias: float, broadcasts to ``[batch, heads, q_length, k_length]``. ``mask``: bool (True: may attend), likewise.
        init_bias: a function without arguments that returns the bias; called when neither ``bias`` nor ``mask`` is given.
        deterministic: True turns dropout off. dropout_rng: a JAX PRNG key, needed for dropout. attn_pdrop: dropout's probability.
        query_chunk_size, key_chunk_size: the size of a block of scores.
        dtype: of the computation and the output; sums are in float32 regardless (float64 for float64).
        policy: None or False saves query, key, value, output and LSE for the backward; a ``jax.checkpoint`` policy decides what
            else is saved or recomputed, and ``prevent_cse`` is then passed to ``jax.checkpoint`` too.
        precision: of the matrix products, a ``jax.lax.Precision``; None means the highest.
        float32_logits: False rounds ``query . key`` to ``dtype`` before the softmax.

    Returns:
        ``[batch, q_length, heads, value_dim]`` in ``dtype``.

    Raises:
        ValueError: inconsistent arguments.

    Blockwise: Liu and Abbeel 2023, arXiv:2305.19370.
    """
    dropping = not deterministic and attn_pdrop > 0
    if dropping and dropout_rng is None:
        raise ValueError("deterministic=False with attn_pdrop > 0 needs dropout_rng, a JAX PRNG key")
    if bias is None and mask is None and init_bias is not None:
        bias = init_bias()
    query, key, value = (jnp.asarray(x).astype(dtype) for x in (query, key, value))
    seed = seed_words(_key_words(dropout_rng)) if dropping else None
    operands = Operands(query, key, value, bias=bias, mask=mask, dropout_seed=seed)
    options = Options(
        causal=causal,
        dropout_prob=attn_pdrop if dropping else 0.0,
        cfg=RingAttentionConfig(FwdParams(query_chunk_size, key_chunk_size), BwdParams(query_chunk_size, key_chunk_size)),
        lse_gradient=False,
        precision=precision,
        logits_dtype=None if float32_logits else jnp.dtype(dtype).name,
    )

    def attention(operands: Operands) -> Array:
        return local_attention(options, operands)[0]

    if policy is None or policy is False:
        return attention(operands)
    return jax.checkpoint(attention, policy=policy, prevent_cse=prevent_cse)(operands)


def _key_words(key: Any) -> Array:
    """A PRNG key, legacy or typed, as two words."""
    data = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else key
    return data.reshape(-1)[-2:]
