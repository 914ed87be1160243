"""A tiny model trained for 20 steps by transformers' Trainer, by TRL and by a loop with accelerate, in one process or over a ring.

Started as it is for one process, or under torch.distributed.run. Writes what it measured to the file named by the first argument:
for each of the cases named by the others the losses and gradient norms of all steps, and the loss on other data.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from ring_attn.integrations.accelerate import RingParallelism

STEPS = 20
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
RING = min(RANKS, 2)  # four ranks are two rings with batches of their own
ACCUMULATED = 4 // (RANKS // RING)  # of four batches for each step, those of one ring
VOCABULARY = 64
SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
RATE, MAX_NORM = 0.3, 1.0  # some of the steps are clipped


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **SIZES))


def tiny_mistral() -> MistralForCausalLM:
    """With a window, which torch's context parallelism refuses."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(vocab_size=VOCABULARY, max_position_embeddings=256, sliding_window=8, **SIZES))


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"<{i}>": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<0>")), pad_token="<0>", eos_token="<1>")


def documents(count: int, seed: int = 1) -> Dataset:
    """Token sequences of 5 to 29 tokens. A prompt of a third has no labels, so shards and batches differ in their number."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 30, (count,), generator=generator).tolist()
    rows = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return Dataset.from_dict({"input_ids": rows, "labels": [[-100] * (len(row) // 3) + row[len(row) // 3 :] for row in rows]})


def collator() -> DataCollatorForSeq2Seq:
    """Pads to 15 or 30 tokens, which no layout can split as they are: few lengths, each of which is a program to compile."""
    return DataCollatorForSeq2Seq(tokenizer(), pad_to_multiple_of=15)


def arguments(folder: str, **more: Any) -> dict[str, Any]:
    return dict(
        output_dir=folder,
        max_steps=STEPS,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        optim="sgd",  # the gradients' scale shows, which Adam would hide
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_NORM,
        **more,
    )


def measured(trainer: Trainer) -> dict[str, Any]:
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "loss": [entry["loss"] for entry in logs],
        "norm": [entry["grad_norm"] for entry in logs],
        "eval": trainer.evaluate()["eval_loss"],
    }


def trained(folder: str) -> dict[str, Any]:
    """Padded batches of 3, and what is saved of the model at the end."""
    model = tiny_mistral()
    more = dict(per_device_train_batch_size=3, gradient_accumulation_steps=ACCUMULATED, per_device_eval_batch_size=4)
    levers: dict[str, Any] = dict(loss_chunk=7, mlp_tile=5, head_groups=2) if RING > 1 else {}
    parallel = RingParallelism(model, RING, dp_shard_size=RANKS // RING, **levers)
    args = TrainingArguments(**arguments(folder, **more), parallelism_config=parallel)
    data = dict(train_dataset=documents(STEPS * 4 * 3), eval_dataset=documents(10, seed=2))
    trainer = Trainer(model, args, data_collator=collator(), **data)
    measurements = measured(trainer)
    ids = torch.tensor([data["eval_dataset"][0]["input_ids"]])
    measurements["generated"] = model.generate(ids, max_new_tokens=4, do_sample=False).tolist()
    trainer.save_model(folder)
    if trainer.is_world_process_zero():  # the one that saves
        with torch.no_grad():
            measurements["reloaded"] = MistralForCausalLM.from_pretrained(folder)(ids, labels=ids).loss.item()
    return measurements


def packed(folder: str) -> dict[str, Any]:
    model = tiny_llama()
    more = dict(per_device_train_batch_size=1, packing=True, max_length=50, gradient_checkpointing=True, bf16=False)
    args = SFTConfig(**arguments(folder, **more), parallelism_config=RingParallelism(model))
    data = dict(train_dataset=documents(80), eval_dataset=documents(10, seed=2))
    return measured(SFTTrainer(model, args, processing_class=tokenizer(), **data))


def tiny_hybrid() -> OlmoHybridForCausalLM:
    torch.manual_seed(0)
    heads = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=8)
    kinds = ["linear_attention", "full_attention"]
    return OlmoHybridForCausalLM(OlmoHybridConfig(vocab_size=VOCABULARY, pad_token_id=0, layer_types=kinds, **heads, **SIZES))


def hybrid(folder: str) -> dict[str, Any]:
    """Layers with a state, computed again in the backward."""
    model = tiny_hybrid()
    args = TrainingArguments(
        **arguments(folder, per_device_train_batch_size=3, gradient_checkpointing=True), parallelism_config=RingParallelism(model)
    )
    data = dict(train_dataset=documents(STEPS * 3), eval_dataset=documents(10, seed=2))
    return measured(Trainer(model, args, data_collator=collator(), **data))


class LowRank(nn.Module):
    """As LoRA's: factors of low rank beside frozen weights, the second zero at first."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down, self.up = nn.Linear(frozen.in_features, 4, bias=False), nn.Linear(4, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


class OneByOne(SFTTrainer):
    """In one process transformers refuses packed rows of such models, without kernels for GPUs: here each document is by itself."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: torch.Tensor | None = None
    ) -> Any:
        ids, labels, positions = (inputs[name][0] for name in ("input_ids", "labels", "position_ids"))
        lengths = torch.diff((positions == 0).nonzero()[:, 0], append=torch.tensor([len(ids)])).tolist()
        documents = zip(ids.split(lengths), labels.split(lengths), strict=True)
        logits = [(model(input_ids=words[None]).logits[0], answers) for words, answers in documents]
        sums = [functional.cross_entropy(found[:-1], answers[1:], reduction="sum") for found, answers in logits if len(answers) > 1]
        count = (labels[positions != 0] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = torch.stack(sums).sum() / count
        return (loss, {"loss": loss}) if return_outputs else loss


def hybrid_sft(folder: str) -> dict[str, Any]:
    """Packed rows and low-rank factors in the layers with a state and in attention; all else is frozen. Few steps, since
    each new length compiles."""
    model = tiny_hybrid().requires_grad_(False)
    for part in [part for layer in model.model.layers for part in layer.children()]:
        for name, child in [*part.named_children()]:
            if isinstance(child, nn.Linear):
                setattr(part, name, LowRank(child))
    more = dict(per_device_train_batch_size=1, packing=True, max_length=50, gradient_checkpointing=True, bf16=False)
    args = SFTConfig(**{**arguments(folder, **more), "max_steps": 5}, parallelism_config=RingParallelism(model))
    data = dict(train_dataset=documents(20), eval_dataset=documents(4, seed=2))
    return measured((SFTTrainer if RANKS > 1 else OneByOne)(model, args, processing_class=tokenizer(), **data))


class Stream(IterableDataset):
    """The same documents, read one after the other."""

    def __init__(self, rows: Dataset) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def looped(folder: str, dataset: Callable[[Dataset], Any] = lambda rows: rows) -> dict[str, Any]:
    model = tiny_llama()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=RingParallelism(model, layout="striped"))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loader = DataLoader(dataset(documents(2 * STEPS * 3)), batch_size=3, collate_fn=collator())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return {"loss": losses, "norm": norms}


def refused(expected: type[Exception], words: str, call: Callable[[], object]) -> str:
    """A measurement for the test: whether the call raises what it should."""
    try:
        call()
    except expected as error:
        return "refused" if words in str(error) else f"{type(error).__name__}: {error}"
    return "ran"


def refusals(folder: str) -> dict[str, Any]:
    model = tiny_llama()
    rank = int(os.environ["RANK"])
    parallel = RingParallelism(model)

    def trainer(metrics: Callable[..., Any] | None = None, **more: Any) -> Trainer:
        args = TrainingArguments(**arguments(folder, **more), parallelism_config=parallel)
        data = dict(train_dataset=documents(20), eval_dataset=documents(4), data_collator=collator())
        return Trainer(model, args, compute_metrics=metrics, **data)

    def dispatched() -> None:
        dealing = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True), parallelism_config=parallel
        )
        dealing.prepare(DataLoader(Stream(documents(4)), batch_size=2, collate_fn=collator()))

    smoothing = trainer(label_smoothing_factor=0.1)
    metrics = trainer(metrics=lambda predictions: {})
    ids = torch.randint(VOCABULARY, (1, 10), generator=torch.Generator().manual_seed(rank))
    return {
        "label smoothing": refused(NotImplementedError, "has no labels", smoothing.train),
        "metrics of logits": refused(NotImplementedError, "prediction_loss_only=True", metrics.evaluate),
        "predictions": refused(NotImplementedError, "prediction_loss_only=True", lambda: metrics.predict(documents(4))),
        "losses": [
            trainer(metrics=None).evaluate()["eval_loss"],
            trainer(metrics=lambda predictions: {}, prediction_loss_only=True).evaluate()["eval_loss"],
        ],
        "logits": refused(NotImplementedError, "are sharded", lambda: model(ids.zero_(), labels=ids.zero_()).logits.argmax(-1)),
        "different batches": refused(ValueError, "different batches", lambda: model(ids + rank, labels=ids)),
        "batches that are dealt out": refused(ValueError, "all ranks of a ring need the whole", dispatched),
        "a second ring": refused(ValueError, "already", lambda: RingParallelism(model).build_device_mesh("cpu")),
    }


def streamed(folder: str) -> dict[str, Any]:
    return looped(folder, Stream)


CASES = {
    "trained": trained,
    "packed": packed,
    "hybrid": hybrid,
    "hybrid_sft": hybrid_sft,
    "looped": looped,
    "streamed": streamed,
    "refusals": refusals,
}


def main() -> None:
    out, *names = sys.argv[1:]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            results[name] = CASES[name](folder)
            AcceleratorState._reset_state()  # it keeps the first mesh of a process for all that follow
            GradientState._reset_state()
    if os.environ.get("RANK", "0") == "0":
        with open(out, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
