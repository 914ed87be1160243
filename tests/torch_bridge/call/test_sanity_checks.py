"""Calls that are valid but probably not meant are noticed."""

import json
import warnings

import pytest
import torch
from launch import torchrun

from ring_attn import DoubtWarning, ring_attention
from ring_attn.sharding import marks
from torch_bridge.call import sanity_checks
from torch_bridge.mesh import rings


@pytest.mark.slow
def test_mistakes_with_a_model_of_ones_own_are_told():
    printed = torchrun("mistakes_worker.py", 2)
    assert printed.count("mistakes worker: all right") == 2, printed


@pytest.mark.parametrize("qkv_format", ["bshd", "bhsd"])
def test_swapped_dims_are_doubted_once(qkv_format):
    q = torch.randn(1, 2, 256, 8) if qkv_format == "bshd" else torch.randn(1, 256, 2, 8)
    with pytest.warns(DoubtWarning, match="2 positions and 256 heads; if it is the other way round"):
        ring_attention(q, q, q, qkv_format=qkv_format)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ring_attention(q, q, q, qkv_format=qkv_format)
        other = q.transpose(1, 2)
        ring_attention(other, other, other, qkv_format=qkv_format)


def test_heads_are_doubted_where_shards_were_as_many(monkeypatch):
    """And where nothing was as long as the positions, whatever else the shapes may be."""
    monkeypatch.setattr(sanity_checks, "_sharded", {((0, 1), 48): {"zigzag"}})
    sanity_checks.warn_once.cache_clear()

    def doubted(query, key):
        shapes = (torch.empty(1, *each, 8) for each in (query, key))
        try:
            sanity_checks.suspect_swapped_dims(*shapes, "bshd")
        except DoubtWarning:
            return True
        return False

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert doubted((8, 48), (2, 48))
        for right in ((48, 48), (48, 48)), ((48, 8), (48, 2)), ((1, 48), (96, 48)), ((49, 48), (49, 48)), ((8, 24), (2, 24)):
            assert not doubted(*right)


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_several_processes_without_a_process_group_are_refused(variable, monkeypatch):
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ValueError, match=f'init_process_group first, or pass mesh="local".*|{variable}'):
        rings.resolve()
    assert rings.resolve("local").size == 1
    monkeypatch.setenv(variable, "1")
    assert rings.resolve().size == 1


def test_a_fingerprint_tells_values_and_ignores_what_is_the_same_everywhere():
    x = torch.randn(2, 200, 3, 4)
    assert sanity_checks.fingerprint(x) == sanity_checks.fingerprint(x.clone()) != sanity_checks.fingerprint(x + 1)
    assert sanity_checks.fingerprint(x[:, :1].expand(-1, 200, -1, -1)) == sanity_checks.fingerprint(x[:, :0]) == ""
    assert sanity_checks.fingerprint(x.to(torch.bfloat16))


def test_different_batches_are_certain_where_none_is_in_common(monkeypatch):
    ring = rings.ProcessRing((0, 1), 0)
    own = sanity_checks.Holding(layout="zigzag", sharded=["striped"], values="", batches=[[1, 2]])

    def check(*batches, layout=""):
        held = [json.dumps({**own, "layout": layout, "batches": each}) for each in batches]
        monkeypatch.setattr(sanity_checks, "exchange", lambda *_: held)
        sanity_checks.note_batch(ring, torch.tensor([1, 2]))
        sanity_checks.check_shards(ring, layout, torch.ones(1, 4, 1, 2))

    for right in ([[1, 2]], [[3, 4], [1, 2]]), ([[1, 2]], []), ([], []):
        check(*right)
    with pytest.raises(ValueError, match="have sharded different batches") as caught:
        check([[1, 2]], [[1, 3]])
    assert caught.value._ring_knows
    with pytest.warns(DoubtWarning, match="were taken as striped"):
        check([], [], layout="zigzag")


def test_a_mark_is_on_views_and_in_files(tmp_path):
    x, shard = torch.randn(2, 6, 3, 4), marks.Shard((0, 1), "zigzag", 1, 12)
    marks.mark_shard(x, shard)
    torch.save(x, tmp_path / "x.pt")
    for same in (x, x[:], torch.load(tmp_path / "x.pt", weights_only=True)):
        assert marks.shard_of(same) == shard
    assert marks.shard_of(x.transpose(1, 2)).dim == 2 and marks.shard_of(x[0]).dim == 0
    for unclear in (x + 0, x.clone(), x[:, :4], x[:, 0], x.flatten(1, 2)):
        assert marks.shard_of(unclear) is None
    marks.mark_shard(x)
    assert marks.shard_of(x) == shard and marks.is_shard(x) and not marks.is_shard(x.clone())
