"""Each lever of ``context_parallel`` that takes less memory, and all of them, under FSDP2 on rings of two and four: loss and
gradients are those of one process, with the same bits where nothing is reordered; forwards of attention, bytes kept, bytes moved
and collectives are counted."""

import pytest
import tiny_transformers as tiny
import torch
import transformers
from launch import torchrun

from ring_attn.integrations.transformers import calls, context_parallel
from ring_attn.integrations.transformers.model import head_groups

pytestmark = pytest.mark.slow
CASES = ("head_groups", "offload", "offload_inputs", "again", "loss_chunk", "mlp_tile", "all")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.costly)])
def test_every_lever_over_a_ring_with_fsdp(size):
    printed = torchrun("levers_worker.py", size, PYTHONWARNINGS="ignore")
    for name in CASES:
        assert printed.count(f"{name}: right") == size, printed


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="of the newest version's models")
@pytest.mark.parametrize("name", ["gpt-oss", "gemma 3"])
def test_every_lever_with_sinks_windows_and_packed_rows(name):
    found = []
    levers = dict(loss_chunk=4, mlp_tile=5, head_groups=2, checkpoint="offload", offload_inputs=True)
    for options in ({}, levers):
        torch.manual_seed(0)
        model = tiny.CAUSAL[name]().train()
        model.activation_checkpointing_enable()
        cp = context_parallel(model, "local", **options)
        loss = model(**cp.shard(tiny.packed(11, 9, 7))).loss
        loss.backward()
        found.append([loss.detach(), *(x.grad for x in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="of the newest version's models")
def test_as_many_groups_of_heads_as_memory_asks_for(monkeypatch):
    def run(**options: object) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = tiny.CAUSAL["llama"]().train()
        cp = context_parallel(model, "local", **options)
        called.clear()
        loss = model(**cp.shard(tiny.packed(11, 9, 7))).loss
        loss.backward()
        return [loss.detach(), *(x.grad for x in model.parameters())]

    called: list[int] = []
    asked: list[tuple[object, ...]] = []
    made = calls.Call.__init__
    monkeypatch.setattr(calls.Call, "__init__", lambda *given: called.append(given[5]) or made(*given))
    plain = run()
    assert called == [1]
    monkeypatch.setattr(head_groups, "memory_of", lambda _: 80 * 10**9)
    with monkeypatch.context() as patch:
        patch.setattr(head_groups, "fewest_groups", lambda *given: asked.append(given) or 2)
        torch.testing.assert_close(run(head_groups="auto"), plain, rtol=1e-4, atol=1e-6)
    assert called == [2]
    ((shapes, setting, count, memory, heads),) = asked
    assert (shapes.kv_heads, heads, memory, setting.gpus, setting.sharded) == (2, 2, 80 * 10**9, 1, False)
    assert 27 <= count < 32
    for enough in (2**50, 1):  # where none fit, none are computed apart for nothing
        monkeypatch.setattr(head_groups, "memory_of", lambda _, enough=enough: enough)
        run(head_groups="auto")
        assert called == [1]
    with pytest.raises(ValueError, match="head_groups must be a positive int"):
        run(head_groups="most")
    model = tiny.CAUSAL["llama"]()
    model.config.kv_lora_rank = 8
    with pytest.raises(NotImplementedError, match="kv_lora_rank"):
        context_parallel(model, "local", head_groups="auto")
