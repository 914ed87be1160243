from dataclasses import replace

import pytest
from tuning import problem

from jax_core.masks.static import Mask
from jax_core.tune.keys import key_of


def key(*arguments, **changed) -> str:
    return key_of("xla", problem(*arguments, **changed))


def test_a_key_can_be_read():
    windowed = key("causal left", Mask(causal=True, left=127), dim=64, value_dim=32, heads=64, kv_heads=8)
    assert windowed == "xla float32 dim 64:32 group 8 causal left 128 up to 4096"
    assert key() == "xla float32 dim 8 group 2 full up to 4096"


@pytest.mark.parametrize("asked", ["softmax_aux", "lse_gradient", "softmax_aux origin"])
def test_what_a_kernel_does_not_see_changes_nothing(asked: str):
    assert key(asked) == key()


def test_layouts_change_nothing():
    other = replace(problem(), layout="zigzag", size=4, features=frozenset({"zigzag", "float32"}))
    assert key_of("xla", other) == key()


@pytest.mark.parametrize("asked", ["bias", "mask", "softcap", "fused_backward", "something_new"])
def test_every_other_feature_has_its_own(asked: str):
    assert key(asked) != key()


@pytest.mark.parametrize("changed", [{"dtype": "bfloat16"}, {"dim": 16}, {"value_dim": 16}, {"kv_heads": 1}, {"k_length": 4097}])
def test_dtype_dims_group_and_length_have_their_own(changed):
    assert key(**changed) != key()


def test_windows_and_groups_are_rounded():
    sizes = [key("left", Mask(left=left)) for left in (127, 128, 150, 200)]
    assert sizes[0] == sizes[1] == sizes[2] != sizes[3]
    groups = [key(heads=heads, kv_heads=1) for heads in (3, 4, 5, 8, 16)]
    assert groups[0] == groups[1] != groups[2] == groups[3] == groups[4]


def test_both_sides_of_ids_are_one_feature():
    assert key("q_segment_ids kv_segment_ids").split()[6:8] == ["segments", "up"]
