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
