"""Calls that are valid but probably not meant are noticed."""

import json
import warnings

import pytest
import torch
from launch import torchrun

from ring_attn import ring_attention
from torch_bridge.job import mesh, sanity_checks


@pytest.mark.slow
def test_what_a_ring_holds_is_compared_when_a_program_is_new():
    lines = torchrun("mistakes_worker.py", 2, "warn").splitlines()
    expected = {
        "no process group": "mesh=None needs a process group: torchrun started 2 processes",
        "all hold the same": "every rank of the ring holds the same values",
        "all hold ones": "nothing",
        "each its own": "nothing",
        "one ring": "nothing",
        "zigzag as contiguous": "the sequence was sharded as striped but attention was called with layout='contiguous'",
        "two layouts": "in different layouts: ring rank 0: striped; ring rank 1: striped, zigzag",
    }
    for name, text in expected.items():
        first, second = (sum(f"{name}, {turn}: " in line and text in line for line in lines) for turn in ("first", "second"))
        again = 2 if text == "nothing" or name == "no process group" else 0
        assert (first, second) == (2, again), (name, lines)


@pytest.mark.slow
def test_strict_makes_them_errors_on_all_ranks():
    printed = torchrun("mistakes_worker.py", 2, "strict", RING_ATTN_STRICT="1")
    assert printed.count("ERROR every rank of the ring holds the same values") == 4, printed
    assert printed.count("ERROR the sequence was sharded as striped") == 4, printed
    assert printed.count("ERROR the ranks of this ring took their shards in different layouts") == 4, printed


@pytest.mark.parametrize("qkv_format", ["bshd", "bhsd"])
def test_swapped_dims_are_doubted_once(qkv_format, monkeypatch):
    q = torch.randn(1, 2, 256, 8) if qkv_format == "bshd" else torch.randn(1, 256, 2, 8)
    with pytest.warns(RuntimeWarning, match="2 positions and 256 heads; if it is the other way round"):
        ring_attention(q, q, q, qkv_format=qkv_format)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ring_attention(q, q, q, qkv_format=qkv_format)
        other = q.transpose(1, 2)
        ring_attention(other, other, other, qkv_format=qkv_format)
    monkeypatch.setenv("RING_ATTN_STRICT", "1")
    with pytest.raises(ValueError, match="RING_ATTN_STRICT"):
        ring_attention(q, q, q, qkv_format=qkv_format)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_several_processes_without_a_process_group_are_refused(variable, monkeypatch):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ValueError, match=f'init_process_group first, or pass mesh="local".*|{variable}'):
        mesh.resolve()
    assert mesh.resolve("local").size == 1
    monkeypatch.setenv(variable, "1")
    assert mesh.resolve().size == 1


def test_a_fingerprint_tells_values_and_ignores_what_is_the_same_everywhere():
    x = torch.randn(2, 200, 3, 4)
    assert sanity_checks.fingerprint(x) == sanity_checks.fingerprint(x.clone()) != sanity_checks.fingerprint(x + 1)
    assert sanity_checks.fingerprint(x[:, :1].expand(-1, 200, -1, -1)) == sanity_checks.fingerprint(x[:, :0]) == ""
    assert sanity_checks.fingerprint(x.to(torch.bfloat16))


def test_strictness_of_one_rank_holds_for_all(monkeypatch):
    """The others would wait in the call that it raises from."""
    ring = mesh.Ring((0, 1), 0)
    other = sanity_checks.Holding(strict=True, layout="zigzag", sharded=["striped"], values="")
    own = {**other, "strict": False}
    monkeypatch.setattr(sanity_checks, "exchange", lambda *_: [json.dumps(own), json.dumps(other)])
    with pytest.raises(ValueError, match="was sharded as striped") as caught:
        sanity_checks.check_shards(ring, "zigzag", torch.ones(1, 4, 1, 2))
    assert caught.value._ring_knows
    monkeypatch.setattr(sanity_checks, "exchange", lambda *_: [json.dumps({**rank, "layout": ""}) for rank in (own, other)])
    sanity_checks.check_shards(ring, "", torch.ones(1, 4, 1, 2))  # position ids say what the layout would
