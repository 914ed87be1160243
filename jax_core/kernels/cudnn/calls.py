"""cuDNN's fused attention through JAX's private calls. What may change between versions of JAX is in this file.

Shapes as in the contract. Every query sees every key; with ``causal`` query ``i`` sees keys ``j <= i``, of these the nearest
``window`` if given.
"""

from functools import cache, partial
from typing import Required, TypedDict

import jax
import jax.numpy as jnp
from jax import Array

from jax_core.internals import cudnn_attention
from jax_core.kernels.contract import no_gpu
from jax_core.varying import vary, varying_axes


class Settings(TypedDict, total=False):
    """Of a call; ``scale`` is always given."""

    scale: Required[float]
    causal: bool
    window: int | None


def forward(q: Array, k: Array, v: Array, *, scale: float, causal: bool = False, window: int | None = None) -> tuple[Array, Array]:
    """``out`` in the dtype of ``q``, and ``lse``, float32, natural logarithm."""
    bind = cudnn_attention()._dot_product_attention_fwd_p_wrapper.bind
    out, lse = bind(q, k, v, *_left_out(q), **_settings(scale, causal, window), is_training=True)  # is_training: with the LSE
    return vary((out, lse), varying_axes(q, k, v))


def backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array,
    lse: Array,
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
) -> tuple[Array, ...]:
    """``dq, dk, dv`` in the dtype of ``q``. ``out`` and ``lse`` may cover more keys than these: the share of these is exact."""
    bind = cudnn_attention()._dot_product_attention_bwd_p_wrapper.bind
    grads = bind(q, k, v, *_left_out(q), lse, out, dout, **_settings(scale, causal, window))
    return vary(tuple(grads), varying_axes(q, k, v, out, dout, lse))


def _left_out(q: Array) -> list[Array]:
    """Placeholders for bias, sequence lengths, offsets of packed sequences and page tables."""
    return [jnp.zeros(0, q.dtype)] * 7


def _settings(scale: float, causal: bool, window: int | None) -> dict[str, object]:
    private = cudnn_attention()
    return dict(
        scale=scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),  # no bias, no bias gradient
        mask_type=private.MaskType.CAUSAL if causal else private.MaskType.NO_MASK,
        layout=private.AttentionLayout.BTNH.value,
        sliding_window_length=window,
    )


def missing(backend: str, capability: int) -> str | None:
    """Why cuDNN's attention cannot be called there, in words, or None."""
    if reason := no_gpu(backend, capability):
        return f"cuDNN needs an NVIDIA GPU, and {reason}"
    if changed():
        return changed()
    if not version():
        return "JAX finds no cuDNN"
    if capability < 80:
        return f"cuDNN's fused attention needs compute capability 8.0, this GPU has {capability / 10}"
    oldest = 91100 if capability == 103 else 91002  # 9.10.0 and 9.10.1 have bugs that NVIDIA's own front end refuses
    if version() < oldest:
        return f"the cuDNN kernel needs cuDNN {_dotted(oldest)}, this is {_dotted(version())}"
    return None


@cache
def changed() -> str | None:
    """How JAX's calls differ from what this file expects, or None. They are tried on shapes, which starts no backend."""
    q, k = (jax.ShapeDtypeStruct((2, 16, heads, 8), jnp.bfloat16) for heads in (4, 2))
    lse = jax.ShapeDtypeStruct((2, 4, 16), jnp.float32)
    try:
        settings: Settings = dict(scale=1.0, causal=True, window=8)
        got = jax.eval_shape(partial(forward, **settings), q, k, k)
        got += jax.eval_shape(partial(backward, **settings), q, k, k, q, q, lse)
    except Exception as error:  # whatever a changed function may raise
        return _other_calls(f"{type(error).__name__}: {error}")
    results = [(x.shape, x.dtype) for x in got]
    expected = [(x.shape, x.dtype) for x in (q, lse, q, k, k)]
    return None if results == expected else _other_calls(f"results {results}")


def _other_calls(how: str) -> str:
    return f"the cuDNN kernel was written for other versions of JAX than {jax.__version__} ({how})"


@cache
def version() -> int:
    """The version of the loaded cuDNN, as 91900 for 9.19.0; 0 if there is none."""
    try:
        return cudnn_attention().check_cudnn_version()
    except RuntimeError:
        return 0


def _dotted(number: int) -> str:
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
