"""transformers' models in bfloat16 on a ring of all GPUs, against "eager" in float32 on one: logits and gradients.

    torchrun --standalone --nproc-per-node 2 tests/gpu/models_worker.py [--models ...] [--tokens ...] [--ways ...] [--kernels]

"levers" is all at once that saves memory: attention and the inputs of layers kept in host memory, heads in groups, the MLP in tiles
and the loss in chunks.

Packed documents are compared with the same documents one by one, whatever a model's own mask makes of them; but transformers counts
Llama 4's chunks along the row, so there with the row. Errors are root mean squares, relative to float32's; exit status 1 where one
is larger than twice that of "eager" in bfloat16. Experts are chosen by bfloat16's rounding on both sides, so a few tokens go
elsewhere on each.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.harness.team import Team, tidy
from ring_attn import Ring
from ring_attn.integrations.transformers import context_parallel
from ring_attn.integrations.transformers.layers.kernels import Operators, operator_for
from ring_attn.sharding.reduction import of_rank_0

VOCABULARY, WINDOW = 512, 300
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=2**17,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MLA = dict(
    head_dim=32, num_key_value_heads=8, q_lora_rank=64, kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64
)
CHUNKS = dict(attention_chunk_size=WINDOW, no_rope_layers=[1, 0], layer_types=["chunked_attention", "full_attention"])
STATES = dict(head_dim=None, layer_types=["linear_attention", "full_attention"])
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("", {}),
    "Mistral": ("", dict(sliding_window=WINDOW)),
    "Gemma3": ("Text", LAYERS),
    "GptOss": ("", dict(**LAYERS, num_local_experts=4, num_experts_per_tok=2)),
    "Llama4": ("Text", dict(**CHUNKS, intermediate_size_mlp=512, num_local_experts=2)),
    "DeepseekV3": ("", dict(**MLA, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=128)),
    "Qwen3Moe": ("", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128)),
    "OlmoHybrid": (
        "",
        dict(**STATES, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64, linear_value_head_dim=64),
    ),
    "Bamba": ("", dict(head_dim=None, attn_layer_indices=[1], mamba_n_heads=16, mamba_d_head=64, mamba_d_state=64)),
}
WAYS = ("plain", "left", "packed", "fsdp2", "levers", "decoded")
NEW = 8  # tokens that are decoded
WITH_LEVERS = ("Llama", "Qwen3Moe")
OPERATORS = {"OlmoHybrid": "gated_delta_rule", "Bamba": "ssd"}
LEVERS = dict(checkpoint="offload", offload_inputs=True, head_groups=2, mlp_tile=300, loss_chunk=300)


class Found(NamedTuple):
    """Logits of all real tokens, ``[tokens, vocabulary]``, and the gradients by name, all in float32."""

    logits: Tensor
    gradients: dict[str, Tensor]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="*", type=int, default=[1024, 6144])
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--kernels", action="store_true", help="fla's and mamba_ssm's compute a rank's tokens, and must be there")
    options = parser.parse_args()
    with_plain_operators(options.models)
    transformers.logging.set_verbosity_error()
    team, wrong = Team(), 0
    if options.kernels and not all(operator_for(OPERATORS[name], None, kernels_for(team)) for name in options.models):
        team.say("no kernels")
        return 1
    team.say(f"{team.device}, {team.size} processes, torch {torch.__version__}, transformers {transformers.__version__}")
    for name in options.models:
        for tokens in options.tokens:
            for way in options.ways:
                if way == "levers" and name not in WITH_LEVERS:
                    continue
                operators = None if options.kernels else {}
                wrong += not (decoded if way == "decoded" else compare)(team, name, tokens, way, operators)
                tidy()
    team.close()
    return 1 if wrong else 0


def with_plain_operators(models: list[str]) -> None:
    """transformers looks for others once, as a family's file is loaded. fla's refuse their backward on Hopper with some versions of
    Triton."""
    for package in (peers := ("fla", "mamba_ssm")):
        sys.modules[package] = None  # type: ignore[assignment]
    for name in models:
        getattr(transformers, f"{name}ForCausalLM")
    for package in peers:
        del sys.modules[package]


def kernels_for(team: Team) -> Tensor:
    """What they are for: 16 bits on this device."""
    return torch.empty(0, dtype=torch.bfloat16, device=team.device)


def compare(team: Team, name: str, tokens: int, way: str, operators: Operators | None) -> bool:
    batch = {key: x.to(team.device) for key, x in batch_of(way, tokens).items()}
    exact = alone(made(name, team.device), batch)
    usual = alone(made(name, team.device).bfloat16(), batch)
    own = on_the_ring(made(name, team.device).bfloat16(), batch, way, operators)
    errors = [(apart(own.logits, exact.logits), apart(usual.logits, exact.logits))]
    errors.append((together(own, exact), together(usual, exact)))
    fine = team.agreed(all(have <= 2 * eager for have, eager in errors))
    shown = "  ".join(
        f"{kind} {have:.1e} ({eager:.1e})" for kind, (have, eager) in zip(("logits", "gradients"), errors, strict=True)
    )
    team.say(f"{name:12} {tokens:6} {way:8} {'' if fine else 'WRONG '}{shown}")
    return fine


@torch.no_grad()
def decoded(team: Team, name: str, tokens: int, way: str, operators: Operators | None) -> bool:
    """Logits of the last tokens, decoded one by one after a prompt on the ring, whose second row is padded on the left; and what
    ``generate`` says, the same on all ranks."""
    batch = {key: x.to(team.device) for key, x in batch_of("left", tokens).items() if key != "labels"}
    exact, usual = (model(**batch, use_cache=False).logits[:, -NEW:].float() for model in both(name, team.device))
    model = made(name, team.device).bfloat16().eval()
    cp = context_parallel(model, operators=operators)
    cache, logits = cp.cache(tokens + NEW), []
    model(**cp.shard({key: x[:, :-NEW] for key, x in batch.items()}), **{cp.plan.cache_name: cache})
    for number in range(NEW):
        seen = tokens - NEW + number
        given = {key: x[:, seen, None] if key == "input_ids" else x[:, : seen + 1] for key, x in batch.items()}
        logits.append(model(**given, **{cp.plan.cache_name: cache}).logits)
    have, eager = apart(torch.cat(logits, 1).float(), exact), apart(usual, exact)
    settings = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    said = model.generate(**batch, **settings, **{cp.plan.cache_name: cp.cache(tokens + NEW)})
    same = torch.equal(said, of_rank_0(said.clone(), cp.ring.processes, "what was said"))
    fine = team.agreed(have <= 2 * eager and same and said.shape == (2, tokens + NEW))
    team.say(f"{name:12} {tokens:6} {way:8} {'' if fine else 'WRONG '}logits {have:.1e} ({eager:.1e})")
    return fine


def both(name: str, device: torch.device) -> Iterator[Any]:
    """The model in float32, and in bfloat16."""
    yield made(name, device).eval()
    yield made(name, device).eval().bfloat16()


def made(name: str, device: torch.device) -> Any:
    """With "eager" attention, the same on every rank."""
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    given = {key: value for key, value in {**SIZES, **settings}.items() if value is not None}
    config = getattr(transformers, f"{name}{kind}Config")(**given, attn_implementation="eager")
    return getattr(transformers, f"{name}ForCausalLM")(config).to(device).train()


def batch_of(way: str, tokens: int) -> dict[str, Tensor]:
    rows = 1 if way == "packed" else 2
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(1))
    if way == "left":
        mask = torch.ones_like(ids)
        mask[1, : tokens // 5] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if way == "packed":
        lengths = (tokens // 2, tokens // 8, tokens - tokens // 2 - tokens // 8)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}
    return {"input_ids": ids, "labels": ids}


def alone(model: Any, batch: dict[str, Tensor]) -> Found:
    """On this GPU by itself, documents one by one."""
    count, logits = predicted(batch["labels"]), []
    for document in documents(model, batch):
        outputs = model(**document, use_cache=False)
        (outputs.loss * predicted(document["labels"]) / count).backward()
        logits.append(outputs.logits.detach())
    return found(model, torch.cat(logits, 1), batch)


def documents(model: Any, batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    if "position_ids" not in batch or model.config.model_type.startswith("llama4"):
        yield batch
        return
    starts = [*(batch["position_ids"][0] == 0).nonzero()[:, 0].tolist(), batch["input_ids"].shape[1]]
    for start, end in pairwise(starts):
        yield {name: x[:, start:end] for name, x in batch.items()}


def predicted(labels: Tensor) -> int:
    return int((labels[:, 1:] != -100).sum())


def on_the_ring(model: Any, batch: dict[str, Tensor], way: str, operators: Operators | None) -> Found:
    ring = Ring(layout="zigzag")
    if way == "levers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    cp = context_parallel(model, layout=ring.layout, operators=operators, **(LEVERS if way == "levers" else {}))
    if way == "fsdp2":
        mesh = init_device_mesh(batch["input_ids"].device.type, (ring.size,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    shard = cp.shard(batch)
    outputs = model(**shard)
    (outputs.loss * (ring.size if way == "fsdp2" else 1)).backward()  # FSDP takes the mean over the ranks
    if way != "fsdp2":
        cp.reduce_gradients()
    logits = outputs.logits
    if logits is None:  # they never were, as a whole
        with torch.no_grad():
            logits = model(**{name: x for name, x in shard.items() if "labels" not in name}).logits
    return found(model, cp.ring.unshard(logits.detach(), length=batch["input_ids"].shape[1]), batch)


def found(model: Any, logits: Tensor, batch: dict[str, Tensor]) -> Found:
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    return Found(logits[real].float(), {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})


def whole(gradient: Tensor) -> Tensor:
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).float()


def apart(have: Tensor, want: Tensor) -> float:
    return ((have.float() - want.float()).norm() / want.float().norm()).item()


def together(have: Found, want: Found) -> float:
    """Of all gradients as one vector."""
    assert have.gradients.keys() == want.gradients.keys(), have.gradients.keys() ^ want.gradients.keys()
    flat: Callable[[Found], Tensor] = lambda found: torch.cat([x.flatten() for x in found.gradients.values()])  # noqa: E731
    return apart(flat(have), flat(want))


if __name__ == "__main__":
    sys.exit(main())
