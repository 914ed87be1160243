"""One rank of the tests of transformers models, run by tests/integrations/test_transformers.py under torch.distributed.run.

Loss, logits and every gradient of the sharded model must be those of "eager" attention on the whole batch in one process. So must
they be of a loss in chunks, made of what the base model returns, which is what the whole model got of it.
"""

import copy
import inspect
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import tiny_transformers as tiny
import torch
import torch.distributed as dist
import transformers
from effort import ALL, of_the_day
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from transformers import masking_utils

from ring_attn import cross_entropy, sync_gradients, total_loss
from ring_attn.integrations.transformers import ContextParallel, context_parallel
from ring_attn.integrations.transformers.batch.sharding import MARK
from ring_attn.packed.ring import PlacedRing
from ring_attn.training.early_sums import early_sums
from torch_bridge.backends import compiled

TOLERANCE = 2e-6
OLDER = int(transformers.__version__.split(".")[0]) < 5


class Case(NamedTuple):
    make: Callable[[], Any]
    batch: dict[str, Tensor]
    layout: str = "zigzag"
    placed: bool = False


def images() -> dict[str, Tensor]:
    """Two images of four tokens each, over the ends of shards."""
    types = torch.zeros(2, tiny.LENGTH, dtype=torch.int64)
    types[0, 5:9] = types[0, 13:17] = types[1, 20:24] = 1
    return {**tiny.batch(), "token_type_ids": types}


def masked(padding: str) -> dict[str, Tensor]:
    """A batch of a masked language model: labels on a few tokens, where they are."""
    batch = tiny.batch(padding)
    return {**batch, "labels": batch["labels"].masked_fill(torch.arange(tiny.LENGTH) % 3 != 0, -100)}


def translation() -> dict[str, Tensor]:
    source, target = tiny.batch("right"), tiny.tokens(19, seed=1)
    labels = target.masked_fill(torch.arange(19) > torch.tensor([[18], [12]]), -100)
    return {"input_ids": source["input_ids"], "attention_mask": source["attention_mask"], "labels": labels}


def speech() -> dict[str, Tensor]:
    features = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0))
    return {"input_features": features, "labels": tiny.tokens(19)}


def sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 3000, generator=torch.Generator().manual_seed(0)), "labels": tiny.tokens(19)}


def prefix() -> dict[str, Tensor]:
    """Of PaliGemma: the first tokens see each other."""
    return {**tiny.batch("right"), "token_type_ids": (torch.arange(tiny.LENGTH) > 8).long().expand(2, -1)}


def padded_with_ones(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """RoBERTa's padding."""
    return {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 1)}


def embeddings(batch: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    batch = tiny.batch("right") if batch is None else batch
    del batch["input_ids"]
    return {**batch, "inputs_embeds": torch.randn(2, tiny.LENGTH, 32, generator=torch.Generator().manual_seed(1))}


def flash() -> dict[str, Tensor]:
    """As DataCollatorWithFlattening makes it with all its additions."""
    packed = tiny.packed(10, 5, 12)
    ends = torch.tensor([0, 10, 15, 27], dtype=torch.int32)
    lengths = {"max_length_q": 12, "max_length_k": 12}
    return {
        **packed,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "seq_idx": torch.tensor([[0] * 10 + [1] * 5 + [2] * 12]),
        **lengths,
    }


def cases(size: int) -> dict[str, Case]:
    """Shared out between rings of two and of four."""
    family = tiny.CAUSAL
    if size == 2:
        return {
            "llama": Case(family["llama"], tiny.batch()),
            "llama, left": Case(family["llama"], tiny.batch("left")),
            "llama, contiguous, right": Case(family["llama"], tiny.batch("right"), "contiguous"),
            "llama, embeddings": Case(family["llama"], embeddings()),
            "llama 3": Case(family["llama 3"], tiny.batch()),
            "llama 4, left": Case(family["llama 4"], tiny.batch("left")),
            "llama 4, packed": Case(family["llama 4"], tiny.packed(10, 17)),
            "mistral": Case(family["mistral"], tiny.batch()),
            "llama, placed": Case(family["llama"], flash(), placed=True),
            "llama 4, placed": Case(family["llama 4"], tiny.packed(10, 17), placed=True),
            "gemma 3, placed": Case(family["gemma 3"], tiny.packed(9, 3, 15), placed=True),
            "qwen 2 moe, placed": Case(family["qwen 2 moe"], {**tiny.packed(17, 10), "output_router_logits": True}, placed=True),
            "mistral, not to be placed": Case(family["mistral"], tiny.batch("right"), placed=True),
            "gemma 2, left": Case(family["gemma 2"], tiny.batch("left")),
            "gemma 2, low cap, left": Case(family["gemma 2, low cap"], tiny.batch("left")),
            "gemma 3, images": Case(tiny.gemma3_with_images, images()),
            "gpt-oss": Case(family["gpt-oss"], tiny.batch("left")),
            "qwen 2 moe": Case(family["qwen 2 moe"], tiny.batch()),
            "qwen 3": Case(family["qwen 3"], tiny.batch()),
            "deepseek 3": Case(family["deepseek 3"], tiny.batch()),
            "phi 3, contiguous": Case(family["phi 3"], tiny.batch(), "contiguous"),
            "olmo 2": Case(family["olmo 2"], tiny.batch()),
            "mixtral, right": Case(family["mixtral"], tiny.batch("right")),
            "modernbert": Case(tiny.modernbert, masked("right")),
            "t5": Case(tiny.t5, translation()),
            "gemma 4, left": Case(tiny.gemma4, tiny.batch("left")),
            "llava, text": Case(tiny.llava, tiny.batch("right")),
            "paligemma, text": Case(tiny.paligemma, prefix()),
            "mllama, text": Case(tiny.mllama, tiny.batch("left")),
            "qwen 3 vl, packed": Case(tiny.qwen3_vl, tiny.with_coordinates(tiny.packed(10, 17))),
            "gpt 2, token types": Case(tiny.gpt2, {**tiny.packed(27), "token_type_ids": images()["token_type_ids"][:1]}),
            "roberta": Case(tiny.roberta, padded_with_ones(masked("left"))),
            "roberta, embeddings": Case(tiny.roberta, embeddings(masked("right"))),
            "bart": Case(tiny.seq2seq("BartForConditionalGeneration", "Bart"), translation()),
            "bart, decoder": Case(tiny.seq2seq("BartForCausalLM", "Bart"), tiny.batch("right")),
            "marian": Case(tiny.seq2seq("MarianMTModel", "Marian"), translation(), "contiguous"),
            "m2m": Case(tiny.seq2seq("M2M100ForConditionalGeneration", "M2M100"), translation()),
            "switch": Case(tiny.switch, translation()),
            "moonshine": Case(tiny.moonshine, sound()),
        }
    return {
        "llama, right": Case(family["llama"], tiny.batch("right")),
        "llama, contiguous, left": Case(family["llama"], tiny.batch("left"), "contiguous"),
        "llama, packed": Case(family["llama"], flash()),
        "llama 4": Case(family["llama 4"], tiny.batch(), "contiguous"),
        "mistral, packed": Case(family["mistral"], tiny.packed(10, 5, 12)),
        "mistral, placed": Case(family["mistral"], tiny.packed(10, 5, 12), placed=True),
        "qwen 3 moe, placed": Case(family["qwen 3 moe"], tiny.packed(3, 3, 18, 3), placed=True),
        "gemma 3, left": Case(family["gemma 3"], tiny.batch("left")),
        "qwen 2": Case(family["qwen 2"], tiny.batch()),
        "qwen 3 moe": Case(family["qwen 3 moe"], tiny.batch()),
        "cohere 2": Case(family["cohere 2"], tiny.batch()),
        "phi": Case(family["phi"], tiny.batch()),
        "olmo 3": Case(family["olmo 3"], tiny.batch()),
        "bert": Case(tiny.bert, {**masked("right"), "token_type_ids": images()["token_type_ids"]}, "contiguous"),
        "whisper": Case(tiny.whisper, speech()),
    }


def available(case: Case) -> Any:
    """The model, or None where this version of transformers lacks it or its way to attention, or sees no documents in positions."""
    if "position_ids" in case.batch and not hasattr(masking_utils, "find_packed_sequence_indices"):
        return None
    if case.make is tiny.moonshine and OLDER:  # shifts labels that the decoder's inputs are shifted against already
        return None
    try:
        torch.manual_seed(0)
        return case.make().train()
    except AttributeError:
        return None
    except ValueError as error:  # older versions of Phi 3 know no "rope_type"
        if "rope_scaling" not in str(error):
            raise
        return None


def compare(name: str, model: Any, case: Case) -> str:
    reference = copy.deepcopy(model)
    # With a cache transformers looks for no documents; models of images and text take the argument among others.
    takes_it = "use_cache" in inspect.signature(reference.forward).parameters or "position_ids" in case.batch
    uncached = {"use_cache": False} if takes_it else {}
    expected = reference(**case.batch, **uncached)
    expected.loss.backward()
    cp = context_parallel(model, layout=case.layout, place_documents=case.placed)
    kept: list[Any] = []
    base = getattr(model, "model", model.base_model)
    handle = base.register_forward_hook(lambda *call: kept.append(call[-1][0]))
    sharded = cp.shard(case.batch)
    placed = isinstance(sharded[MARK].sequences["decoder"].ring, PlacedRing)
    assert placed == (case.placed and "position_ids" in case.batch)
    outputs = model(**sharded)
    handle.remove()
    logits = cp.unshard(outputs.logits.detach(), sharded)
    wrong = {"loss": (outputs.loss - expected.loss).abs().item(), "logits": unlike(logits, expected.logits.detach(), case)}
    outputs.loss.backward()
    cp.reduce_gradients()
    wrong |= gradients(name, model, reference)
    if base is not model and kept:  # BartForCausalLM calls a part of its base model
        assert torch.equal(base(**cp.shard(case.batch))[0], kept[0]), f"{name}: the base model"
    if isinstance(model, transformers.LlamaForCausalLM):
        model.zero_grad()
        wrong["loss in chunks"] = (chunked(model, cp, case) - expected.loss).abs().item()
        wrong |= {f"{parameter} in chunks": off for parameter, off in gradients(name, model, reference).items()}
    worst = max(wrong, key=wrong.__getitem__)
    assert wrong[worst] < TOLERANCE and not any(x != x for x in wrong.values()), f"{name}: {worst} is {wrong[worst]} off"
    return f"{wrong[worst]:.1e} ({worst})"


def unlike(logits: Tensor, expected: Tensor, case: Case) -> float:
    """How far the logits are off where there is no padding."""
    kept = case.batch.get("attention_mask")
    off = (logits - expected).abs().amax(-1)
    if kept is not None and kept.shape == off.shape:
        off = off[kept.bool()]
    return off.max().item() / max(1.0, expected.abs().max().item())


def gradients(name: str, model: Any, reference: Any) -> dict[str, float]:
    """How far each parameter's is off."""
    off = {}
    for (parameter, own), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), f"{name}: {parameter} has a gradient on one side"
        if own.grad is not None:
            off[parameter] = (own.grad - other.grad).abs().max().item() / max(1.0, other.grad.abs().max().item())
    return off


def chunked(model: Any, cp: ContextParallel, case: Case) -> Tensor:
    """The loss of the whole ring, from chunks of hidden states; and its gradients. Layers are run again in the backward."""
    batch = cp.shard(case.batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    hidden = model.model(**batch).last_hidden_state
    chunks = zip(hidden.split(3, dim=1), batch["labels"].split(3, dim=1), strict=True)
    shares = [cross_entropy(model.lm_head(states), labels, num_items=batch["num_items_in_batch"]) for states, labels in chunks]
    share = torch.stack(shares).sum()
    share.backward()
    cp.reduce_gradients()
    return total_loss(share, ring=cp.ring)


def soft_prompts() -> float:
    """How far off the gradient is of virtual tokens before the sequence, which PEFT's prompt tuning trains, on whole embeddings."""
    torch.manual_seed(0)
    model, batch = tiny.CAUSAL["llama"](), tiny.batch("right")
    prompts = torch.nn.Parameter(torch.randn(5, 32))

    def embedded() -> dict[str, Tensor]:
        tokens = model.get_input_embeddings()(batch["input_ids"])
        mask, labels = (functional.pad(batch[name], (5, 0), value=fill) for name, fill in (("attention_mask", 1), ("labels", -100)))
        whole = torch.cat([prompts.expand(2, -1, -1), tokens], 1)
        return {"inputs_embeds": whole, "attention_mask": mask, "labels": labels}

    (expected,) = torch.autograd.grad(model(**embedded()).loss, prompts)
    cp = context_parallel(model)
    model(**cp.shard(embedded())).loss.backward()
    sync_gradients(torch.nn.ParameterList([prompts]), ring=cp.ring)
    assert prompts.grad is not None
    return (prompts.grad - expected).abs().max().item()


def check_checkpoints() -> None:
    """Kept attention has the bits of computing it again, and computes it once."""
    forwards, gradients, run = [], [], compiled.CompiledProgram._run

    def noting(self: Any, step: str, *arguments: Any) -> Any:
        forwards.extend([step] * (step == "forward"))
        return run(self, step, *arguments)

    compiled.CompiledProgram._run = noting
    for checkpoint, times in ((None, 2), ("attention", 1)):
        torch.manual_seed(0)
        model = tiny.CAUSAL["llama"]().train()
        model.gradient_checkpointing_enable()
        cp = context_parallel(model, checkpoint=checkpoint)
        forwards.clear()
        model(**cp.shard(tiny.batch("left"))).loss.backward()
        assert len(forwards) == times * model.config.num_hidden_layers, (checkpoint, forwards)
        gradients.append([x.grad for x in model.parameters()])
        cp.remove()
    compiled.CompiledProgram._run = run
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def check_overlap() -> None:
    """Gradients that are summed in the backward have the same bits, and a model that is taken off the ring has no hooks left."""
    found: list[list[Tensor]] = []
    for overlap in (False, True):
        torch.manual_seed(0)
        model = tiny.CAUSAL["llama"]().train()
        model.gradient_checkpointing_enable()
        cp, optimizer = context_parallel(model, overlap=overlap), torch.optim.SGD(model.parameters(), 0.1)
        gradients = []
        for _ in range(5):
            optimizer.zero_grad()
            model(**cp.shard(tiny.batch("left"))).loss.backward()
            begun = [bucket for sums in early_sums(model.parameters()) for bucket in sums._begun]
            assert bool(begun) == (overlap and len(gradients) >= 3)
            cp.reduce_gradients()
            gradients.append([x.grad.clone() for x in model.parameters() if x.grad is not None])
            optimizer.step()
        found.append([x for step in gradients for x in step])
        cp.remove()
        assert not any(x._post_accumulate_grad_hooks for x in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    cp, wrapper = context_parallel(model, overlap=True), DistributedDataParallel(model)
    try:
        wrapper(**cp.shard(tiny.batch("left")))
    except ValueError as error:
        assert "DistributedDataParallel changes gradients after that" in str(error)
    else:
        raise AssertionError("DistributedDataParallel and overlap")
    cp.remove()


def main() -> None:
    transformers.logging.set_verbosity_error()
    dist.init_process_group("gloo")
    failed = []
    chosen = sys.argv[1:]
    for name, case in cases(dist.get_world_size()).items():
        if name not in chosen if chosen else not ALL and of_the_day(f"{name} {dist.get_world_size()}", 2):
            continue
        begun = time.monotonic()
        model = available(case)
        if model is None:
            continue
        try:
            words = compare(name, model, case)
        except NotImplementedError as error:
            if not OLDER:
                failed.append(f"{name}\n{traceback.format_exc()}")
            words = f"refused: {error}"  # older versions have fewer models whose attention can be replaced
        except Exception:
            failed.append(f"{name}\n{traceback.format_exc()}")
            words = "FAILED"
        if dist.get_rank() == 0:
            print(f"{name}: {words}, {time.monotonic() - begun:.1f} s", flush=True)
    if dist.get_world_size() == 2 and not chosen:
        assert soft_prompts() < TOLERANCE
    if not chosen:
        check_checkpoints()
    if chosen == ["overlap"]:
        check_overlap()
        print("overlap: all right", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    assert not failed, "\n".join(failed)


if __name__ == "__main__":
    main()
