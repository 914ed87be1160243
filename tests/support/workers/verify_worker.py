"""Two ranks verify tiny models on a ring, right ones and ones with a fault that has been somebody's; run by test_mistakes.py."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import tiny_hybrids
import tiny_transformers as tiny
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ring_attn.integrations.transformers import context, context_parallel
from ring_attn.integrations.transformers.batch import loss as losses
from ring_attn.integrations.transformers.batch import sharding as batches
from ring_attn.integrations.transformers.layers import attention
from ring_attn.integrations.transformers.layers.states import FIRST_RELEASE
from ring_attn.ring import Ring
from ring_attn.verification.entry import verify
from tests.support.healthy import gloo_world


def verified(make: Callable[[], Any], batch: dict[str, Tensor], loss: Any = None, place_documents: bool = False) -> Any:
    torch.manual_seed(0)
    cp = context_parallel(make(), place_documents=place_documents)
    verdict = cp.verify(batch, loss=loss)
    cp.remove()
    return verdict


def check_right_models_are_not_accused(rank: int) -> None:
    causal = tiny.CAUSAL
    right = {
        "llama, left": (causal["llama"], tiny.batch("left")),
        "llama, packed": (causal["llama"], tiny.packed(10, 5, 12)),
        "gemma 3, right": (causal["gemma 3"], tiny.batch("right")),
        "gpt-oss": (causal["gpt-oss"], tiny.batch()),
        "gpt-oss, packed": (causal["gpt-oss"], tiny.packed(10, 17)),
        "qwen 3 moe": (causal["qwen 3 moe"], tiny.batch()),
        "modernbert": (tiny.modernbert, tiny.batch("right")),
    }
    if tuple(map(int, FIRST_RELEASE.split("."))) <= tuple(map(int, transformers.__version__.split(".")[:2])):
        right["qwen 3.5, a hybrid, packed"] = (tiny_hybrids.FAMILIES["qwen 3.5"], tiny.packed(10, 5, 12))
        right["bamba, a hybrid, right"] = (tiny_hybrids.FAMILIES["bamba"], tiny.batch("right"))
    for name, (make, batch) in right.items():
        verdict = verified(make, batch, place_documents=name == "llama, packed")
        assert verdict.ok, f"{name}: {verdict}"
        if rank == 0:
            print(f"{name}: {verdict}", flush=True)


class InAnyOrder(nn.Module):
    """Calls a part of its own as Gemma 4 its rotary embedding: in the order of a set, which is another in each process."""

    def __init__(self, norm: nn.Module, rank: int) -> None:
        super().__init__()
        self.norm, self.part, self.rank = norm, nn.Identity(), rank

    def forward(self, x: Tensor) -> Tensor:
        for width in (8, 4) if self.rank == 0 else (4, 8):
            self.part(x[..., :width])
        return self.norm(x)


def check_modules_that_ranks_call_in_another_order(rank: int) -> None:
    def make() -> Any:
        model = tiny.CAUSAL["llama"]()
        model.model.norm = InAnyOrder(model.model.norm, rank)
        return model

    assert verified(make, tiny.batch()).ok


def check_large_models_are_tried_with_fewer_layers() -> None:
    cp = context_parallel(tiny.CAUSAL["gemma 3"]())
    random = torch.get_rng_state()
    with patch("ring_attn.integrations.transformers.verify.verification.LARGEST", 0):
        assert "with 2 of its 2 layers, random weights" in str(cp.verify(tiny.batch()))
    assert torch.equal(torch.get_rng_state(), random)
    cp.remove()


class Convolved(nn.Module):
    """The user's own convolution beside attention: it sees this rank's tokens."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.mixer = norm, nn.Conv1d(32, 32, 3, padding=2, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.mixer(x.mT)[..., : x.shape[1]].mT


def convolved() -> Any:
    model = tiny.CAUSAL["llama"]()
    model.model.layers[1].post_attention_layernorm = Convolved(model.model.layers[1].post_attention_layernorm)
    return model


@contextmanager
def attended(**changed: Any) -> Iterator[None]:
    """Attention with other options, or other gradients of its keys."""
    right, gradient = Ring.attention, changed.pop("gradient", None)

    def wrong(self: Ring, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if gradient is not None and k.requires_grad:
            k = k.clone()
            k.register_hook(gradient)
        return right(self, q, k, v, **options | changed)

    with patch.object(Ring, "attention", wrong):
        yield


@contextmanager
def contiguous() -> Iterator[None]:
    """Zigzag shards given to a contiguous operator."""
    right = attention._ring_mask

    def wrong(call: Any, *others: Any) -> Any:
        mask = right(call, *others)
        mask.ring = Ring(call.ring.mesh, layout="contiguous")
        return mask

    with patch.object(attention, "_ring_mask", wrong):
        yield


def check_a_loop_of_a_sharded_model() -> None:
    """By ``ring_attn.verify``, in which the ring of a ContextParallel has one process too."""

    def step() -> Any:
        torch.manual_seed(0)
        model = tiny.CAUSAL["llama"]()
        cp, optimizer = context_parallel(model), torch.optim.AdamW(model.parameters(), 1e-3)
        for _ in range(2):
            model(**cp.shard(tiny.batch())).loss.backward()
            cp.reduce_gradients()
            optimizer.step()
            optimizer.zero_grad()
        cp.remove()
        return model

    verdict = verify(step=step, ring=Ring(layout="zigzag"))
    assert verdict.ok, verdict
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "cp"))
    cp = context_parallel(tiny.CAUSAL["llama"](), mesh, mesh_dim="cp")
    assert "nothing is sharded" in str(cp.verify(tiny.batch()))
    cp.remove()


def undocumented(*_: Any) -> tuple[None, bool]:
    """A reading of a batch in which nothing tells documents."""
    return None, False


def qwen3_vl() -> Any:
    """Its ``use_cache`` hides in ``**kwargs``, and its positions have four rows, of which the first is the text's."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {name: x for name, x in tiny.SIZES.items() if name != "attn_implementation"} | {"rope_parameters": rope}
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=32, deepstack_visual_indexes=[0])
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, attn_implementation="eager")
    return transformers.Qwen3VLForConditionalGeneration(config)


def check_what_tells_documents_is_read_anew() -> None:
    """And not by what shards the batch: whatever that does not see."""
    packed = tiny.packed(10, 5, 12)
    rows = {**packed, "position_ids": packed["position_ids"].expand(4, 1, -1)}
    for make, batch in ((tiny.CAUSAL["llama"], packed), (qwen3_vl, rows)):
        with patch.object(batches, "documents_of", undocumented):
            verdict = verified(make, batch)
        assert not verdict.ok and "see each other" in str(verdict), verdict
    ones = {**packed, "attention_mask": torch.ones_like(packed["input_ids"])}
    for make, batch in ((tiny.CAUSAL["llama"], ones), (qwen3_vl, {name: x for name, x in rows.items() if name != "position_ids"})):
        verdict = verified(make, batch)
        assert verdict.ok, verdict


def check_features_are_reached() -> None:
    """A soft cap of 50 by random weights: a score of one that is begun with is 0.01."""
    config = transformers.Gemma2Config(**tiny.SIZES, sliding_window=tiny.WINDOW, attn_logit_softcapping=50.0)

    def gemma2() -> Any:
        return transformers.Gemma2ForCausalLM(config)

    with patch("ring_attn.integrations.transformers.verify.verification.LARGEST", 0):
        verdict = verified(gemma2, tiny.batch())
        assert verdict.ok and "to reach the soft cap" in str(verdict), verdict
        with attended(softcap=None):
            verdict = verified(gemma2, tiny.batch())
        assert not verdict.ok and "self_attn" in str(verdict), verdict


def unshifted(plan: Any, given: dict[str, Any]) -> Any:
    given.pop("shift_labels", None)
    return given.pop("labels", None)


def local_positions(sequence: Any, positions: Any) -> Tensor:
    return torch.arange(sequence.local).expand(sequence.batch, -1)


def check_faults_are_found(rank: int, size: int) -> None:
    llama, plain, packed = tiny.CAUSAL["llama"], tiny.batch(), tiny.packed(10, 5, 12)
    whole_loss = losses.loss_of

    def twice_normalised(*arguments: Any) -> Tensor:
        return whole_loss(*arguments) / size

    def own_mean(outputs: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten()) / size

    on_llama: dict[str, tuple[Any, str]] = {
        "keys of another step in the backward": (attended(gradient=lambda g: g.roll(1, 1)), "the backward is not"),
        "no gradient of the keys": (attended(gradient=torch.zeros_like), "the backward is not"),
        "zigzag shards as contiguous": (contiguous(), "layers.0.self_attn.o_proj"),
        "not causal": (attended(causal=False), "layers.0.self_attn.o_proj"),
        "another scale": (attended(scale=1.0), "layers.0.self_attn.o_proj"),
        "normalised twice": (patch.object(context, "loss_of", twice_normalised), "normalised"),
        "unshifted labels": (patch.object(batches, "_labels", unshifted), "not shifted"),
        "positions of the rank": (patch.object(batches, "_positions", local_positions), "rotary_emb"),
        "gradients not summed": (patch.object(context, "sync_gradients", lambda *_, **__: None), "were not summed"),
    }
    faults: dict[str, tuple[Any, Any, dict[str, Tensor], Any, str]] = {
        name: (fault, llama, plain, None, words) for name, (fault, words) in on_llama.items()
    }
    no_documents = attended(q_segment_ids=None, kv_segment_ids=None)
    a_little = attended(scale=8**-0.5 * 1.02)
    faults["a scale that is off by little"] = (a_little, llama, plain, None, "the forward differs by less")
    faults["documents see each other"] = (no_documents, llama, packed, None, "see each other")
    mixer = "layers.1.post_attention_layernorm.mixer"
    faults["a convolution of one's own"] = (nullcontext(), convolved, plain, None, mixer)
    faults["the mean of one's own labels"] = (nullcontext(), llama, tiny.batch("right"), own_mean, "normalised")
    for name, (fault, make, batch, loss, words) in faults.items():
        with fault:
            verdict = verified(make, batch, loss)
        assert not verdict.ok and words in str(verdict), f"{name}: {verdict}"
        if rank == 0:
            print(f"{name}: {verdict}", flush=True)


def main() -> None:
    transformers.logging.set_verbosity_error()
    with gloo_world("verify") as (rank, size):
        begun = time.monotonic()
        check_right_models_are_not_accused(rank)
        check_modules_that_ranks_call_in_another_order(rank)
        check_large_models_are_tried_with_fewer_layers()
        check_a_loop_of_a_sharded_model()
        check_what_tells_documents_is_read_anew()
        check_features_are_reached()
        check_faults_are_found(rank, size)
        print(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
