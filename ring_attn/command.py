"""``python -m ring_attn``: tools for the shell. Under torchrun a process is one rank; by itself it starts them."""

import argparse
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from uuid import uuid4

from ring_attn.memory import plan
from ring_attn.memory.numbers import count, gigabytes

PROGRAM = "python -m ring_attn"
LAYOUTS = ("zigzag", "striped", "contiguous")


class Outcome(NamedTuple):
    """Of a rank: what the command prints, which is the same on all of them, and its exit code."""

    text: str
    code: int


def main() -> int:
    options = _parsed()
    code: int = options.run(options)
    return code


def _verify(options: argparse.Namespace) -> int:
    options.is_step = ".py:" in options.what
    outcome = _impossible(options)
    if outcome is None:
        outcome = one_rank(options) if "LOCAL_RANK" in os.environ else _on_ranks(options)
    if outcome.text and os.environ.get("RANK", "0") == "0":
        refused = outcome.code == 2
        print(f"{PROGRAM} verify: {outcome.text}" if refused else outcome.text, file=sys.stderr if refused else sys.stdout)
    return outcome.code


def _impossible(options: argparse.Namespace) -> Outcome | None:
    file = options.what.rpartition(":")[0]
    if options.is_step and not Path(file).is_file():
        return Outcome(f"there is no file {file}", 2)
    if options.what.endswith(".py"):
        return Outcome(f"which function of {options.what} is the step? {options.what}:step", 2)
    if not options.is_step and importlib.util.find_spec("transformers") is None:
        return Outcome(
            "no FILE.py:FUNCTION is given, and a model needs transformers: pip install '.[transformers]' in a checkout", 2
        )
    return None


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Tools of the ring-attention library.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser(
        "verify",
        help="compare your training step, or a transformers model, on a ring with the same in one process",
        description="On CPU processes. Exit code 1 if they differ, 2 if there is nothing to compare.",
    )
    verify.add_argument(
        "what",
        metavar="STEP | MODEL",
        help="FILE.py:FUNCTION, a training step as ring_attn.verify(step=) takes it; or a folder or a name for AutoConfig, a model "
        "that is tried with few layers and random weights: loss, logits, every gradient in float32",
    )
    verify.add_argument("--ranks", type=int, default=2, help="processes of the ring (default: 2)")
    verify.add_argument("--layout", default="zigzag", choices=LAYOUTS)
    verify.add_argument("--length", type=int, default=64, help="of a model: tokens of each of two rows (default: 64)")
    verify.add_argument("--packed", action="store_true", help="of a model: one row of documents instead, told by position_ids")
    verify.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")
    verify.set_defaults(run=_verify)
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what of it can run here, and whether it is right",
        description="By itself each kernel on each visible GPU, or on the CPU; under torchrun a ring of its processes. "
        "Exit code 1 if something is wrong.",
    )
    doctor.add_argument(
        "--json", action="store_true", help="one object instead of a table: ok, and findings (check, verdict, text)"
    )
    doctor.add_argument("--limit", type=float, default=300.0, help="seconds for each check that computes (default: 300)")
    doctor.set_defaults(run=_doctor)
    planned = commands.add_parser(
        "plan",
        help="whether a length trains on your GPUs, and with which levers",
        description="Predicted from sizes; nothing is run or downloaded. Exit code 1 if it does not fit.",
    )
    planned.add_argument("--model", required=True, help="a folder with a config.json, such a file, or a name like Qwen3-8B")
    planned.add_argument("--tokens", required=True, type=count, help="of a row, over all GPUs: 131072, 128k, 1M")
    planned.add_argument("--gpus", required=True, type=int, help="that share the weights (FSDP2)")
    planned.add_argument("--memory", type=gigabytes, default=80.0, help="of a GPU, as it is sold: 80G (default), 141G")
    planned.add_argument("--host", type=gigabytes, help="of the host, for each GPU (default: as much as is needed)")
    planned.add_argument("--ring", type=int, help="how many of the GPUs share a row (default: all)")
    planned.add_argument("--replicated", action="store_true", help="each GPU has all weights, in bfloat16")
    planned.set_defaults(run=_plan)
    return parser.parse_args()


def _plan(options: argparse.Namespace) -> int:
    try:
        sharded = not options.replicated
        planned = plan(
            options.model, options.tokens, options.gpus, options.memory, ring=options.ring, sharded=sharded, host=options.host
        )
    except (ValueError, NotImplementedError) as error:
        print(f"{PROGRAM} plan: {error}", file=sys.stderr)
        return 2
    print(planned)
    return 0 if planned.ok else 1


def _doctor(options: argparse.Namespace) -> int:
    from ring_attn.doctor.command import run

    return run(options)


def _on_ranks(options: argparse.Namespace) -> Outcome:
    """This command in so many CPU processes."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.update({"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "CUDA_VISIBLE_DEVICES": ""})
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=options.ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="spawn",
    )
    try:
        outcomes: dict[int, Outcome] = elastic_launch(config, one_rank)(options)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return Outcome(f"rank {rank} ended with exit code {failure.exitcode}", 2)
    return max(outcomes.values(), key=lambda outcome: outcome.code)


def one_rank(options: argparse.Namespace) -> Outcome:
    """Errors of the user's program are shown where they are raised; the other ranks hear of them as in any job."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        outcome = _of_step(options) if options.is_step else _of_model(options)
        dist.barrier()
    except Exception:
        traceback.print_exc()
        return Outcome("", 2)
    dist.destroy_process_group()
    return outcome


def _of_model(options: argparse.Namespace) -> Outcome:
    from ring_attn.integrations.transformers.verify_command import verify_model

    try:
        verdict = verify_model(options)
    except OSError as error:  # AutoConfig's, which says in many lines what a folder or name must be
        return Outcome(str(error).splitlines()[0], 2)
    return Outcome(str(verdict), 0 if verdict.ok else 1)


def _of_step(options: argparse.Namespace) -> Outcome:
    from ring_attn import Ring, verify

    file, _, name = options.what.rpartition(":")
    step = getattr(_loaded(Path(file)), name, None)
    if not callable(step):
        return Outcome(f"{file} has no function {name}", 2)
    verdict = verify(step=step, ring=Ring(layout=options.layout))
    return Outcome(str(verdict), 0 if verdict.ok else 1)


def _loaded(file: Path) -> ModuleType:
    """The file as a module: what is under ``if __name__ == "__main__"`` does not run. It may import what lies beside it."""
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
