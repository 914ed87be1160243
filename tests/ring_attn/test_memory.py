"""``ring_attn.memory.plan``: what it reads of a model, which levers it names, and what the command prints. That the formula is
near what was measured: tests/test_fits.py."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ring_attn.command import main
from ring_attn.memory import Levers, Setting, Shapes, peak, plan
from ring_attn.memory.formula import GIB
from ring_attn.memory.numbers import count, gigabytes
from ring_attn.memory.planning import fewest_groups, room
from ring_attn.memory.shapes import KNOWN, shapes_of

QWEN = {
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


def test_the_same_sizes_however_they_are_given(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN), encoding="utf-8")
    config = SimpleNamespace(**QWEN)
    nested = SimpleNamespace(get_text_config=lambda: config)
    for given in (QWEN, config, nested, {"text_config": QWEN}, tmp_path, str(tmp_path / "config.json"), "Qwen/Qwen3-8B"):
        assert shapes_of(given)[1] == KNOWN["Qwen3-8B"]


def test_what_a_configuration_leaves_out():
    short = {name: value for name, value in QWEN.items() if name not in ("num_key_value_heads", "head_dim", "tie_word_embeddings")}
    _, found = shapes_of(short)
    assert (found.kv_heads, found.dim, found.tied) == (32, 128, False)
    with pytest.raises(ValueError, match="must have num_attention_heads or n_head, and has none"):
        plan({name: value for name, value in QWEN.items() if name != "num_attention_heads"}, 2**17, 8)
    with pytest.raises(NotImplementedError, match="kv_lora_rank"):
        plan({**QWEN, "kv_lora_rank": 512}, 2**17, 8)


def test_experts():
    """Qwen3-30B-A3B's by its configuration: 30.5 billion parameters."""
    sizes = {"num_hidden_layers": 48, "hidden_size": 2048, "num_key_value_heads": 4}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
    _, found = shapes_of({**QWEN, **sizes, **experts})
    assert round(found.parameters / 1e9, 1) == 30.5
    assert found.width == 8 * 768


def test_each_lever_takes_less_of_the_gpu():
    shapes = KNOWN["Qwen3-8B"]
    for lever in (
        {"loss_chunk": 1024},
        {"checkpoint": "offload"},
        {"checkpoint": None},
        {"offload_inputs": True},
        {"loss_chunk": 1024, "mlp_tile": 4096},
        {"loss_chunk": 1024, "mlp_tile": 4096, "head_groups": 2},
    ):
        *before, (name, value) = lever.items()
        less, more = (peak(shapes, Setting(8, levers=Levers(**dict(each))), 2**17) for each in (lever.items(), before))
        assert less.device < more.device, (name, value)
        moved = {"checkpoint": (2 * 4096 + 4 * 32), "offload_inputs": 2 * 4096}.get(name, 0) if value in ("offload", True) else 0
        assert less.host - more.host == 36 * 2**17 * moved


def test_the_cheapest_levers_that_fit():
    """Every one of them is needed, and the dearer ones only where the cheaper are not enough."""
    assert plan("Qwen3-8B", 2**17, 8).levers == {}
    for tokens in (2**18, 2**19, 2**20):
        found = plan("Qwen3-8B", tokens, 8)
        assert found.ok and found.peak.device <= room(80)
        for name in found.levers:
            rest = {other: value for other, value in found.levers.items() if other != name}
            assert peak(KNOWN["Qwen3-8B"], Setting(8, levers=Levers(**rest)), tokens // 8).device > room(80), (tokens, name)
    assert not plan("Qwen3-8B", 2**20, 2).ok
    assert "does not fit" in str(plan("Qwen3-8B", 2**20, 2))
    needed = plan("Qwen3-8B", 2**20, 8).peak.host / GIB
    assert plan("Qwen3-8B", 2**20, 8, host=needed + 1).levers["checkpoint"] == "offload"
    short = plan("Qwen3-8B", 2**20, 8, host=needed - 1)
    assert short.levers["checkpoint"] is None and short.peak.host < (needed - 1) * GIB
    assert not plan("Qwen3-8B", 2**20, 8, host=1).ok


def test_a_ring_of_some_of_the_gpus():
    found, alone = plan("Qwen3-8B", 2**18, 16, ring=4), plan("Qwen3-8B", 2**18, 4)
    assert found.rows[0].peak.held == alone.rows[0].peak.held
    assert found.rows[0].peak.states < alone.rows[0].peak.states
    mesh = SimpleNamespace(size=lambda: 16)
    assert plan("Qwen3-8B", 2**18, mesh, ring=4).rows == found.rows
    with pytest.raises(ValueError, match="the ring must divide the 8 GPUs, got 3"):
        plan("Qwen3-8B", 2**18, 8, ring=3)
    with pytest.raises(ValueError, match="must be positive"):
        plan("Qwen3-8B", 0, 8)
    with pytest.raises(ValueError, match="gpus must be a number, a DeviceMesh or a Ring"):
        plan("Qwen3-8B", 2**18, "eight")


def test_head_groups_divide_the_heads():
    """Rows whose groups no K/V head can make are left out."""
    names = [row.name for row in plan(replace(KNOWN["Qwen3-8B"], kv_heads=2), 2**20, 8).rows]
    assert "head_groups=2" in names and "head_groups=4" not in names


def test_numbers_as_people_write_them():
    assert [count(x) for x in ("131072", "128k", "1M", "1_000", "1.5k")] == [131072, 131072, 2**20, 1000, 1536]
    assert [gigabytes(x) for x in ("80", "80G", "141GB", "80GiB", "1.5T")] == [80, 80, 141, 80, 1536]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ring_attn", "plan", *arguments])
    return main()


def test_the_command(tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, "--model", "Qwen3-8B", "--tokens", "1M", "--gpus", "8", "--memory", "80G") == 0
    printed = capsys.readouterr().out
    assert "1,048,576 tokens on 8 GPUs of 80 GB, 131,072 on each" in printed and "predicted" in printed
    assert str(plan("Qwen3-8B", 2**20, 8, 80)) == printed.rstrip("\n")
    assert run(monkeypatch, "--model", "Qwen3-8B", "--tokens", "1M", "--gpus", "2") == 1
    capsys.readouterr()
    assert run(monkeypatch, "--model", str(tmp_path), "--tokens", "1M", "--gpus", "8") == 2
    said = capsys.readouterr()
    assert "nothing is downloaded" in said.err and not said.out
    with pytest.raises(SystemExit):
        run(monkeypatch, "--model", "Qwen3-8B", "--tokens", "many", "--gpus", "8")


def test_shapes_by_themselves():
    assert plan(Shapes(2, 64, 128, 4, 2, 16, 100), 2**14, 1).ok


def test_the_fewest_groups_that_fit():
    shapes, setting, tokens = KNOWN["Qwen3-8B"], Setting(8), 131072
    needed = {groups: peak(shapes, replace(setting, levers=Levers(head_groups=groups)), tokens).device for groups in (1, 2, 4, 8)}
    assert needed[1] > needed[2] > needed[4] > needed[8]
    for groups, device in needed.items():
        assert fewest_groups(shapes, setting, tokens, device / 0.9 + 1, 8) == groups
    assert fewest_groups(shapes, setting, tokens, needed[8] / 0.9 + 1, 6) == 1
    assert fewest_groups(shapes, setting, tokens, needed[2] / 0.9 + 1, 6) == 2
    assert fewest_groups(shapes, setting, tokens, 1, 8) == 1
    assert peak(shapes, replace(setting, levers=Levers(head_groups="auto")), tokens).device == needed[1]
