"""``context_parallel(mlp_tile=)``: MLPs and experts in tiles of tokens, in models of many kinds, against the model as it is."""

from typing import Any

import pytest
import tiny_transformers as tiny
import torch
import transformers
from torch import Tensor, nn

from ring_attn.integrations.accelerate import RingParallelism
from ring_attn.integrations.transformers import context, context_parallel
from ring_attn.memory import Levers
from ring_attn.training.tiles import Tiles

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="of the newest version's models")
TILE = 5
DENSE = ("llama", "gemma 3")
EXPERTS = ("llama 4", "mixtral", "qwen 2 moe", "qwen 3 moe", "deepseek 3", "gpt-oss")
MODELS = {**{name: tiny.CAUSAL[name] for name in (*DENSE, *EXPERTS)}, "gpt2": tiny.gpt2}


def made(name: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, context_parallel(model, "local", buckets=0, **options)


def stepped(name: str, checkpointing: bool, **options: Any) -> tuple[Tensor, list[Tensor], list[str]]:
    model, cp = made(name, **options)
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(**cp.shard(tiny.batch())).loss
    loss.backward()
    tiled = [name for name, x in model.named_modules() if isinstance(vars(x).get("forward"), Tiles)]
    return loss.detach(), [x.grad for x in model.parameters() if x.grad is not None], tiled


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # the name in older versions
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_without_tiles(name):
    """Of mixtures of experts the routers' loss, too."""
    for checkpointing in (False, True) if name in ("llama", "mixtral") else (False,):
        loss, gradients, none = stepped(name, checkpointing)
        own_loss, own, tiled = stepped(name, checkpointing, mlp_tile=TILE)
        assert len(tiled) >= 2 and not none and any("norm" in x for x in tiled) == (name != "gpt2"), tiled
        torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own, gradients, rtol=1e-4, atol=1e-6)


def test_the_widest_tensor_is_that_of_a_tile():
    model, cp = made("llama", mlp_tile=TILE)
    rows = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda module, given, out: rows.append(out.shape[:-1].numel()))
    batch = cp.shard(tiny.batch())
    model(**batch).loss.backward()
    assert max(rows) == TILE
    rows.clear()
    cp.remove()
    assert "forward" not in vars(model.model.layers[0].mlp)
    model(**tiny.batch()).loss.backward()
    assert rows == [2 * tiny.LENGTH]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler looks at each input's
def test_norms_are_in_tiles_of_as_many_numbers():
    """A norm of heads has a row for each head. torch's own norms stay as they are, and so do those in a graph of torch.compile."""
    model, cp = made("qwen 3 moe", mlp_tile=TILE)
    layer, width = model.model.layers[0], model.config.hidden_size
    for norm, dim in ((layer.input_layernorm, width), (layer.self_attn.q_norm, model.config.head_dim), (model.model.norm, width)):
        assert cp._tiles[norm].rows(torch.empty(99, dim)) == TILE * (width // dim)
    assert not any(isinstance(x, nn.LayerNorm) for x in made("gpt2", mlp_tile=TILE)[1]._tiles)
    batch = cp.shard(tiny.batch())
    loss = model(**batch).loss
    for each in model.model.layers:
        each.self_attn.compile(backend="eager")
    torch.testing.assert_close(model(**batch).loss, loss)


def test_norms_that_cannot_be_in_tiles_stay_as_they_are(monkeypatch):
    """Cohere's of heads has weights for each head, so its rows are no tokens. One without weights is in tiles."""

    class Weightless(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype)

    Weightless.__name__ = "WeightlessNorm"
    sizes = {name: size for name, size in tiny.SIZES.items() if name != "head_dim"}

    def cohere():
        model = transformers.CohereForCausalLM(transformers.CohereConfig(**sizes, use_qk_norm=True))
        model.model.norm = Weightless()
        return model

    monkeypatch.setitem(MODELS, "cohere", cohere)
    loss, gradients, _ = stepped("cohere", False)
    own_loss, own, _ = stepped("cohere", False, mlp_tile=TILE)
    torch.testing.assert_close(own_loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(own, gradients, rtol=1e-4, atol=1e-6)
    model, cp = made("cohere", mlp_tile=TILE)
    model(**cp.shard(tiny.batch()))
    assert {type(x).__name__ for x, tile in cp._tiles.items() if tile._left} == {"CohereLayerNorm"}
    assert not cp._tiles[model.model.norm]._left and cp._tiles[model.model.norm]._tried


def test_generation_and_verification(monkeypatch):
    """What is verified has the levers, but for the loss in chunks, which makes no logits to compare."""
    model, cp = made("llama", mlp_tile=TILE, head_groups=2, loss_chunk=7)
    assert model.generate(tiny.tokens(9), max_new_tokens=2, do_sample=False).shape == (2, 11)
    twins = []

    def verify(cp, batch, loss, make, of=context.verify):
        return of(cp, batch, loss, lambda twin: twins.append(make(twin)) or twins[-1])

    monkeypatch.setattr(context, "verify", verify)
    assert cp.verify(tiny.batch()).ok
    assert {twin.levers for twin in twins} == {Levers(mlp_tile=TILE, head_groups=2)}


def test_router_logits_that_are_recorded_in_a_tile_are_refused():
    """Llama 4's experts know their tokens by the order of all of them, so the whole block is in tiles, and its router with it."""
    model, cp = made("llama 4", mlp_tile=TILE)
    batch = cp.shard(tiny.batch())
    model(**batch)
    with pytest.raises(NotImplementedError, match="output_router_logits: transformers records what Llama4Router returns"):
        model(**batch, output_router_logits=True)


def test_what_cannot_be_in_tiles_is_refused():
    for wrong in (0, True, 2.0):
        with pytest.raises(ValueError, match="mlp_tile must be a positive int"):
            made("llama", mlp_tile=wrong)
        with pytest.raises(ValueError, match="mlp_tile must be a positive int"):
            RingParallelism(nn.Linear(2, 2), mlp_tile=wrong)
    with pytest.raises(ValueError, match="mlp_tile needs a ring"):
        RingParallelism(nn.Linear(2, 2), mlp_tile=4)
    with pytest.raises(NotImplementedError, match="layers of BertForMaskedLM hold no module that is known as their MLP"):
        context_parallel(tiny.bert(), "local", mlp_tile=TILE)
    for part in ("layers.0", "layers.0.mlp"):
        model, cp = made("llama", mlp_tile=TILE)
        model.model.get_submodule(part).compile()
        with pytest.raises(NotImplementedError, match=rf"mlp_tile: model\.{part} is compiled"):
            model(**cp.shard(tiny.batch()))

    class Neighbours(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + x.mean(dim=1, keepdim=True))

    model, cp = made("llama", mlp_tile=TILE)
    model.model.layers[1].mlp.down_proj = Neighbours(48, 32)
    with pytest.raises(
        NotImplementedError, match="LlamaMLP cannot be computed in tiles: what it makes of a token depends on other"
    ):
        model(**cp.shard(tiny.batch()))
