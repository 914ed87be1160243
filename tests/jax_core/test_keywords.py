"""Arguments under another library's name: the error tells this library's."""

import inspect

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import jax_core
from jax_core.api.names import OTHERS
from jax_core.keywords import NO_OTHERS, SAME, explains
from ring_attn import RingAttention, ring_attention, sync_gradients, unshard
from ring_attn.arguments.names import OF_FORWARD, OF_FUNCTION, OF_MODULE

X = torch.zeros(1, 4, 2, 8)
A = jnp.zeros((1, 4, 2, 8))


@pytest.mark.parametrize(
    ("function", "others"),
    [
        (jax_core.ring_attention, OTHERS),
        (ring_attention, OF_FUNCTION),
        (RingAttention.__init__, OF_MODULE),
        (RingAttention.forward, OF_FORWARD),
    ],
)
def test_no_own_argument_is_explained_and_advice_names_own_ones(function, others):
    names = set(inspect.signature(function).parameters)
    assert not names & set(others)
    assert all(words in names or words.startswith(("which ", "of which ")) for words in others.values())


def test_all_of_jax_nns_and_sdpas_names_are_known():
    """What an argument of theirs is, ours takes or explains."""

    def known(function, others):
        own = set(inspect.signature(function).parameters)
        return own | set(others) | {name for group in SAME if own & set(group) for name in group}

    ours = known(jax_core.ring_attention, OTHERS)
    assert set(inspect.signature(jax.nn.dot_product_attention).parameters) <= ours
    sdpa = {"query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
    assert all(f"{name}" in scaled_dot_product_attention.__doc__ for name in sdpa)
    assert sdpa <= ours
    assert sdpa <= known(ring_attention, OF_FUNCTION)


def test_a_name_has_one_meaning():
    names = [name for group in SAME for name in group]
    assert len(names) == len(set(names)) and all(len(group) > 1 for group in SAME)
    for function in (jax_core.ring_attention, ring_attention, RingAttention.__init__, RingAttention.forward):
        assert all(len(set(group) & set(inspect.signature(function).parameters)) <= 1 for group in SAME)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ring_attention(X, X, X, is_causal=True), "unexpected keyword argument 'is_causal', which is called causal here"),
        (lambda: ring_attention(X, X, X, attn_mask=X), "mask here where it is bool, and bias where it is float"),
        (lambda: ring_attention(query=X, key=X, value=X), "'query', which is called q here; got an unexpected .*'key'.* k here"),
        (lambda: ring_attention(X, X, X, window_size=(3, 0), softmax_scale=1.0), "called sliding_window here.*called scale here"),
        (lambda: ring_attention(X, X, X, slidng_window=3), "'slidng_window'. Did you mean 'sliding_window'"),
        (lambda: ring_attention(X, X, X, colour=3), r"^ring_attention\(\) got an unexpected keyword argument 'colour'$"),
        (lambda: ring_attention(X, X), "missing 1 required positional argument: 'v'"),
        (
            lambda: RingAttention(8, 2, is_causal=True),
            r"RingAttention.__init__\(\) got .* 'is_causal', which is called causal here",
        ),
        (lambda: RingAttention(8, 2)(X[0], X[0], X[0], mask=None), "called attn_mask here, where True means may not attend"),
        (lambda: jax_core.ring_attention(A, A, A, is_causal=True), "which is called causal here"),
        (lambda: jax_core.ring_attention(A, A, A, key_value_seq_lengths=jnp.array([3])), "negative ids are padding"),
        (lambda: jax_core.ring_attention(A, A, A, local_window_size=(2, 0)), "called sliding_window here"),
        (lambda: jax_core.ring_attention(A, A, A, implementation="cudnn"), "called platform here"),
        (lambda: unshard(X, "local", dims=1), r"unshard\(\) got an unexpected keyword argument 'dims'. Did you mean 'dim'"),
        (lambda: sync_gradients([], reduce=1), r"sync_gradients\(\) got an unexpected keyword argument 'reduce'$"),
        (lambda: jax_core.ring_attention(A, A, A, casual=True), "Did you mean 'causal'"),
    ],
)
def test_the_error_says_what_it_is_called_here(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_errors_of_the_function_itself_pass():
    def attend(given, wanted=None):
        raise TypeError(given)

    call = explains({"desired": "wanted"})(attend)
    anything = explains({"desired": "wanted"})(lambda **options: attend("its own"))
    with pytest.raises(TypeError, match=r"^its own$"):
        anything(desired=1)
    assert inspect.signature(call) == inspect.signature(attend) and call.__name__ == "attend"
    with pytest.raises(TypeError, match=r"^its own$"):
        call("its own", wanted=1)
    with pytest.raises(TypeError, match="called wanted here"):
        call("its own", desired=1)


def test_torch_compile_reads_it():
    function = explains(NO_OTHERS)(lambda x, scale=1.0: x * scale)
    compiled = torch.compile(lambda x: function(x, scale=2.0), backend="eager", fullgraph=True)
    assert torch.equal(compiled(X + 1), X + 2)
