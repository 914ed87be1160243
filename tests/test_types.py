"""What a type checker tells a user of the library: real signatures, not Any."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SNIPPET = """
import jax
import torch
from ring_attn import RingAttention, ring_attention, shard_batch
import jax_core

reveal_type(jax_core.ring_attention)
reveal_type(jax_core.RingAttentionConfig)
reveal_type(ring_attention)
reveal_type(RingAttention)
reveal_type(RingAttention.forward)
reveal_type(shard_batch)

def attend(q: torch.Tensor) -> None:
    reveal_type(ring_attention(q, q, q))
    reveal_type(ring_attention(q, q, q, return_lse=True))
    ring_attention(q, q, q, causal="yes")
    ring_attention(q, q, q, casual=True)
    RingAttention("wide", 4)

def attend_in_jax(q: jax.Array) -> None:
    reveal_type(jax_core.ring_attention(q, q, q))
    reveal_type(jax_core.ring_attention(q, q, q, return_lse=True))
    jax_core.ring_attention(q, q, q, causal="yes")
    jax_core.ring_attention(q, q, q, casual=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What mypy says, by the line of the snippet."""
    pytest.importorskip("mypy", reason="mypy is not installed: make test brings it")
    folder = tmp_path_factory.mktemp("user")
    (folder / "user.py").write_text(SNIPPET, encoding="utf-8")
    settings = folder / "mypy.ini"
    settings.write_text(f"[mypy]\nmypy_path = {ROOT}\nfollow_imports = silent\ncheck_untyped_defs = True\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(folder / "cache"), "user.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode in (0, 1), done.stderr
    lines = SNIPPET.splitlines()
    said = re.findall(r"^user\.py:(\d+): \w+: (.*)$", done.stdout, re.MULTILINE)
    return {lines[int(number) - 1].strip(): text for number, text in reversed(said)}


def revealed(answers: dict[str, str], expression: str) -> str:
    return answers[f"reveal_type({expression})"]


def kind(signature: str, name: str) -> str:
    """The type of a parameter, or of an option in a TypedDict, in a signature as mypy prints it."""
    start = re.search(rf"\b{name}'?\??: ", signature)
    assert start, f"{name} is not in {signature}"
    depth, end = 0, start.end()
    while depth or signature[end] not in ",)}":
        depth += (signature[end] in "([{") - (signature[end] in ")]}")
        end += 1
    return signature[start.end() : end].removesuffix(" =")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "arrays", "array"),
    [
        ("ring_attention", "q k v bias mask sinks q_segment_ids kv_segment_ids", "torch._tensor.Tensor"),
        ("RingAttention.forward", "query key value key_padding_mask attn_mask", "torch._tensor.Tensor"),
        ("shard_batch", "input_ids labels", "torch._tensor.Tensor"),
        (
            "jax_core.ring_attention",
            "query key value softmax_aux bias mask q_segment_ids kv_segment_ids",
            "jax._src.basearray.Array",
        ),
    ],
)
def test_arrays_have_their_type(answers: dict[str, str], function: str, arrays: str, array: str):
    for name in arrays.split():
        assert kind(revealed(answers, function), name).startswith(array), name


@pytest.mark.slow
def test_options_have_their_type(answers: dict[str, str]):
    for function in ("ring_attention", "RingAttention", "jax_core.ring_attention"):
        signature = revealed(answers, function)
        assert kind(signature, "causal") == "bool"
        assert re.fullmatch(r"str \| jax_core.masks.layout.Arrangement", kind(signature, "layout"))
        assert kind(signature, "sliding_window").startswith("int | tuple[int | None, int | None]")
        assert "RingAttentionConfig" in kind(signature, "cfg")
    assert "-> ring_attn.module.attention.RingAttention" in revealed(answers, "RingAttention")
    assert "fwd_params: jax_core.config.FwdParams =" in revealed(answers, "jax_core.RingAttentionConfig")


@pytest.mark.slow
@pytest.mark.parametrize(("call", "array"), [("ring_attention", "torch._tensor.Tensor"), ("jax_core.ring_attention", "jax.*Array")])
def test_results_are_arrays(answers: dict[str, str], call: str, array: str):
    """And a pair of them with the LSE."""
    assert re.fullmatch(f'Revealed type is "{array}"', revealed(answers, f"{call}(q, q, q)"))
    assert re.fullmatch(f'Revealed type is "tuple.{array}, {array}.*"', revealed(answers, f"{call}(q, q, q, return_lse=True)"))


@pytest.mark.slow
@pytest.mark.parametrize("call", ["ring_attention", "jax_core.ring_attention"])
def test_mistakes_are_seen(answers: dict[str, str], call: str):
    wrong_type = answers[f'{call}(q, q, q, causal="yes")']
    assert re.search(r'incompatible type "str"; expected "bool"|No overload variant .*"str"', wrong_type)
    unknown = answers[f"{call}(q, q, q, casual=True)"]
    assert re.search(r'keyword argument "casual"|No overload variant', unknown)
    assert 'incompatible type "str"; expected "int"' in answers['RingAttention("wide", 4)']
