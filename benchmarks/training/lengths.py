"""What changing lengths cost: steps of ever new lengths beside steps of the longest one, the programs that they compile, and the
first step of a second job.

    python -m benchmarks.training.lengths padded                # transformers' Trainer, batches padded to their longest row
    python -m benchmarks.training.lengths packed --steps 200    # random documents packed into rows, as TRL packs them

Two jobs, the first with nothing kept on disk: its lengths change. In the second all steps have the longest length, which the first
job has met too, so its first step is that of a job which finds its programs. A step's time is the slowest rank's. Compiling is what
the steps in which a program was compiled took beyond the second job's mean.
"""

import argparse
import json
import logging
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.harness import jobs
from benchmarks.harness.report import Report, default_folder
from benchmarks.harness.team import ON_GPU, Team
from benchmarks.training.models import VOCABULARY
from benchmarks.training.systems import Batch, Levers, Setting, ours

SAID = '{"seconds": '
ROWS = 2  # of a padded batch


class Programs(logging.Handler):
    """Counts what the library says that it compiles, or reads, by direction; and what this process has compiled itself."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.counts = {"forward": 0, "backward": 0}
        self.own = 0
        jax.monitoring.register_event_listener(self._event)
        logger = logging.getLogger("ring_attn")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        for what in self.counts:
            self.counts[what] += record.getMessage().startswith(f"compiled {what} in")

    def _event(self, event: str, **_: str | int) -> None:
        self.own += event.endswith("cache_misses")

    @property
    def total(self) -> int:
        return sum(self.counts.values())


class Clock:
    """Of each step its time on the slowest rank, and whether a program was compiled in it."""

    def __init__(self, team: Team) -> None:
        self.programs = Programs()
        self.seconds: list[float] = []
        self.compiled: list[bool] = []
        self._team, self._since, self._before = team, 0.0, 0

    def begin(self) -> None:
        self._team.ready()
        self._since, self._before = time.perf_counter(), self.programs.total

    def end(self) -> None:
        self._team.ready()
        self.seconds.append(self._team.slowest(time.perf_counter() - self._since))
        self.compiled.append(self.programs.total > self._before)


# --------------------------------------------------------------------------------------------------------------------- lengths


def padded_lengths(steps: int, longest: int, generator: torch.Generator) -> list[list[int]]:
    """Of the rows of each batch, random within an octave; the first batch has the longest."""
    lengths = torch.randint(longest // 2 + 1, longest + 1, (steps, ROWS), generator=generator)
    lengths[0, 0] = longest
    return lengths.tolist()


def packed_lengths(steps: int, longest: int, generator: torch.Generator) -> list[list[int]]:
    """Of the documents of each row: TRL's best fit, the longest document first, each into the fullest row that has room."""
    rows: list[list[int]] = []
    while len(rows) < steps:
        documents = torch.randint(longest // 64, longest // 2, (64,), generator=generator).sort(descending=True).values.tolist()
        packed: list[list[int]] = []
        for length in documents:
            room = [row for row in packed if sum(row) + length <= longest]
            max(room, key=sum).append(length) if room else packed.append([length])
        rows += packed[:-1]  # the last one is what is left over
    return [filled(rows[0], longest), *rows[1:steps]]


def filled(documents: list[int], longest: int) -> list[int]:
    return [*documents[:-1], documents[-1] + longest - sum(documents)]


# ----------------------------------------------------------------------------------------------------------------------- steps


def train_padded(setting: Setting, lengths: list[list[int]], clock: Clock, team: Team) -> None:
    """By transformers' Trainer, each batch padded to its longest row."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from ring_attn.integrations.accelerate import RingParallelism

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end()

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(rows)

    generator = torch.Generator().manual_seed(1)
    rows: Any = [torch.randint(VOCABULARY, (length,), generator=generator) for batch in lengths for length in batch]
    model = setting.model(init_device_mesh(team.device.type, (team.size,)))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            parallelism_config=RingParallelism(model) if team.size > 1 else None,
            per_device_train_batch_size=ROWS,
            max_steps=len(lengths),
            use_cpu=not ON_GPU,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        InOrder(model, arguments, train_dataset=rows, data_collator=padded, callbacks=[Timed()]).train()


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """A batch of rows at the left of a common length."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def train_packed(setting: Setting, lengths: list[list[int]], clock: Clock, team: Team) -> None:
    """By a loop around transformers' model, a row of documents in each step."""
    step = ours(Levers(), setting, init_device_mesh(team.device.type, (team.size,), mesh_dim_names=("cp",)))
    generator = torch.Generator().manual_seed(1)
    for documents in lengths:
        tokens = torch.randint(VOCABULARY, (1, sum(documents)), generator=generator)
        positions = torch.cat([torch.arange(length) for length in documents])[None]
        batch = Batch(tokens.to(team.device), positions.to(team.device))
        clock.begin()
        step(batch)
        clock.end()


WAYS: dict[str, tuple[Callable[..., list[list[int]]], Callable[..., None]]] = {
    "padded": (padded_lengths, train_padded),
    "packed": (packed_lengths, train_packed),
}


def longest_alone(way: str, lengths: list[list[int]], longest: int) -> list[list[int]]:
    """The same batches, each made as long as the longest."""
    return [filled(one, longest) if way == "packed" else [longest, *one[1:]] for one in lengths]


def job(options: argparse.Namespace) -> None:
    """What torchrun starts: all steps of one kind, told in a line of JSON."""
    team = Team(timeout=300)
    make, train = WAYS[options.way]
    lengths = make(options.steps, options.longest, torch.Generator().manual_seed(0))
    if options.job == "longest":
        lengths = longest_alone(options.way, lengths, options.longest)[: options.longest_steps]
    clock = Clock(team)
    train(Setting(layers=options.layers, small=options.small), lengths, clock, team)
    different = len({max(one) if options.way == "padded" else sum(one) for one in lengths})
    found = {"seconds": clock.seconds, "compiled": clock.compiled, **clock.programs.counts, "lengths": different}
    team.say(json.dumps({**found, "of all ranks": team.total(clock.programs.own)}))
    team.close()


# ---------------------------------------------------------------------------------------------------------------------- report


def run(options: argparse.Namespace, what: str, kept: str) -> dict[str, Any]:
    sizes = [
        "--steps",
        options.steps,
        "--longest",
        options.longest,
        "--longest-steps",
        options.longest_steps,
        "--layers",
        options.layers,
    ]
    arguments = [options.way, "--job", what, *map(str, sizes), *["--small"] * options.small]
    with jobs.begin(
        options.processes, "benchmarks.training.lengths", *arguments, out=subprocess.PIPE, RING_ATTN_CACHE=kept, OMP_NUM_THREADS="1"
    ) as process:
        assert process.stdout is not None
        said = [line for line in process.stdout if line.strip()]
    found = [json.loads(line) for line in said if line.startswith(SAID)]
    if not found:
        raise SystemExit(jobs.first_error(said, "nothing was said") + "\n" + "".join(said[-30:]))
    return dict(found[0])


def told(report: Report, options: argparse.Namespace, changing: dict[str, Any], longest: dict[str, Any]) -> None:
    usual = statistics.mean(longest["seconds"][1:])
    rest = [seconds for seconds, compiled in zip(changing["seconds"], changing["compiled"], strict=True) if not compiled]
    beyond = sum(changing["seconds"]) - sum(rest) - (len(changing["seconds"]) - len(rest)) * usual
    programs = changing["forward"], changing["backward"]
    figures = {"different lengths": changing["lengths"], "forwards": programs[0], "backwards": programs[1], "compiling, s": beyond}
    figures["compiled by all ranks, with JAX's own"] = changing["of all ranks"]
    report.add(case=options.way, system="changing", phase="", **{"steps, s": sum(changing["seconds"])}, **figures)
    second = {
        "step, ms": 1000 * usual,
        "first step, s": longest["seconds"][0],
        "compiled by all ranks, with JAX's own": longest["of all ranks"],
    }
    report.add(case=options.way, system="longest", phase="", **second)
    limit = 1.05 if ON_GPU else 1.3
    report.ratio(
        f"{options.way}: all steps less compiling, changing / longest",
        (sum(changing["seconds"]) - beyond) / usual / options.steps,
        at_most=limit,
    )
    report.ratio(f"{options.way}: programs of the direction that has more", max(programs), at_most=8)
    report.ratio(f"{options.way}: first step of a second job, s", longest["seconds"][0], at_most=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--longest-steps", type=int, default=40, help="of the second job, whose first is not compared")
    parser.add_argument("--longest", type=int, default=8192 if ON_GPU else 512, help="tokens of a row, over all processes")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--small", action="store_true", default=not ON_GPU, help="two small layers; without a GPU always")
    parser.add_argument("--job", choices=("changing", "longest"), help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.job:
        job(options)
        return
    report = Report(options.output or default_folder(f"lengths-{options.way}"), "Changing lengths in training")
    with tempfile.TemporaryDirectory() as kept:
        found = [run(options, what, kept) for what in ("changing", "longest")]
    told(report, options, *found)
    report.finish()


if __name__ == "__main__":
    main()
