"""The command line."""

import argparse
import os

from jax_core.config import PLATFORMS
from jax_core.tune.timing import ROUNDS

DESCRIPTION = """Finds the fastest configurations of the attention kernels on this machine, and keeps them where ring_attention
looks them up (RING_ATTN_CACHE, by default ~/.cache/ring_attn). Every candidate is compared with a reference before it is timed."""
EXAMPLES = """examples:
  python -m tools.tune --all-models --seconds 600 --workers 8
  python -m tools.tune --length 8192 --heads 32 --kv-heads 8 --dim 128 --causal
  python -m tools.tune --all-models --show"""
LENGTHS = (8192, 2048)  # one of each class of lengths (keys.py), the longer first


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tools.tune", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_shape(parser.add_argument_group("shape", "of one process's shards"))
    _add_features(parser.add_argument_group("features", "of the attention to tune for; without any it is bidirectional"))
    _add_search(parser.add_argument_group("search"))
    options = parser.parse_args(arguments)
    options.kv_heads = options.kv_heads or options.heads
    options.value_dim = options.value_dim or options.dim
    return options


def _add_shape(group) -> None:
    group.add_argument("--batch", type=_count, default=1)
    group.add_argument("--length", "--lengths", type=_count, nargs="+", default=list(LENGTHS), help="tokens; default 8192 and 2048")
    group.add_argument("--heads", type=_count, default=32)
    group.add_argument("--kv-heads", type=_count, help="default: as many as heads")
    group.add_argument("--dim", type=_count, default=128)
    group.add_argument("--value-dim", type=_count, help="default: dim")
    group.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"), default="bfloat16")
    group.add_argument("--all-models", action="store_true", help="shapes of common models, in place of heads, dims and features")


def _add_features(group) -> None:
    group.add_argument("--causal", action="store_true")
    group.add_argument("--window", type=int, nargs="+", metavar="SIZE", help="sliding_window: one number, or left and right")
    group.add_argument("--chunk", type=_count, metavar="SIZE", help="chunk_size")
    group.add_argument("--softcap", type=float, metavar="CAP", help="logits_soft_cap")
    group.add_argument("--dropout", type=float, default=0.0, metavar="PROBABILITY")
    group.add_argument("--segments", action="store_true", help="packed documents")
    group.add_argument("--positions", action="store_true", help="position ids")
    group.add_argument("--bias", action="store_true")
    group.add_argument("--mask", action="store_true", help="a boolean mask")
    group.add_argument("--alibi", action="store_true")
    group.add_argument("--sinks", action="store_true", help="they join after the kernel, and change no configuration")
    group.add_argument("--fused-backward", action="store_true")


def _add_search(group) -> None:
    named = [name for name in PLATFORMS if name not in ("cuda", "cudnn")]  # cuDNN chooses its own
    group.add_argument("--platform", choices=named, default="auto", help="which kernel; auto: the first with candidates")
    group.add_argument("--seconds", type=float, default=float("inf"), help="keep and print what was found when they are over")
    group.add_argument(
        "--workers",
        type=_count,
        default=1,
        help="processes that compile, of which one at a time has the device; each takes GPU memory",
    )
    group.add_argument("--rounds", type=_count, default=ROUNDS, help="samples that decide between the fastest")
    group.add_argument("--again", action="store_true", help="also what the cache has already")
    group.add_argument("--cache", metavar="FOLDER", help="in place of RING_ATTN_CACHE", type=os.path.abspath)
    only = group.add_mutually_exclusive_group()
    only.add_argument("--dry-run", action="store_true", help="print what would be searched")
    only.add_argument("--show", action="store_true", help="print what is used now, and where it comes from")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
