"""Settings: what they refuse, and how they are completed."""

import pytest

from jax_core.config import BACKENDS, PLATFORMS, BwdParams, FwdParams, RingAttentionConfig, checked_platform


def test_what_is_given_stands_and_the_rest_is_completed():
    given = FwdParams(q_blocksize=32, num_warps=4)
    defaults = FwdParams(q_blocksize=64, kv_blocksize=128, num_stages=2)
    assert given.completed(defaults) == FwdParams(32, 128, 2, 4)
    assert FwdParams().completed(defaults) == defaults
    assert BwdParams(kv_blocksize=8).completed(BwdParams(q_blocksize=64)) == BwdParams(64, 8)


@pytest.mark.parametrize("kind", [FwdParams, BwdParams])
@pytest.mark.parametrize("name", ["q_blocksize", "kv_blocksize", "num_stages", "num_warps"])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "64"])
def test_parameters_are_positive_ints(kind: type[FwdParams], name: str, value: object):
    with pytest.raises(ValueError, match=f"{kind.__name__}.{name} must be a positive int or None, got {value!r}"):
        kind(**{name: value})


def test_equal_settings_are_one_key():
    """Programs are looked up by their settings."""
    first, second = (RingAttentionConfig(FwdParams(64), BwdParams(32), platform="xla") for _ in range(2))
    assert first == second and hash(first) == hash(second)
    assert FwdParams(64) != BwdParams(64)
    with pytest.raises(AttributeError):
        first.platform = "triton"  # type: ignore[misc]


def test_what_a_config_refuses():
    with pytest.raises(ValueError, match="fwd_params must be FwdParams and bwd_params BwdParams, got int and BwdParams"):
        RingAttentionConfig(fwd_params=64)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got FwdParams and FwdParams"):
        RingAttentionConfig(bwd_params=FwdParams())  # type: ignore[arg-type]
    for platform in PLATFORMS:
        assert RingAttentionConfig(platform=platform).platform == checked_platform(platform)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"platform must be one of .*xla.* got 'abacus'"):
        RingAttentionConfig(platform="abacus")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"backend must be one of {', '.join(BACKENDS)}; got 'abacus'"):
        RingAttentionConfig(backend="abacus")  # type: ignore[arg-type]


def test_cudnn_is_another_name_of_cuda():
    assert RingAttentionConfig(platform="cudnn") == RingAttentionConfig(platform="cuda")
