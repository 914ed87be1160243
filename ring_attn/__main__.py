"""``python -m ring_attn verify MODEL``: whether a transformers model gives on a ring what it gives in one process. Under torchrun
it is one rank; by itself it starts them."""

import argparse
import importlib.util
import os
import subprocess
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ring_attn", description="Tools of the ring-attention library.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    verify = commands.add_parser(
        "verify",
        help="compare a transformers model on a ring with the same model in one process",
        description="Compares loss, logits and every gradient in float32 on CPU processes. Exit code 1 if they differ.",
    )
    verify.add_argument("model", help="a folder or a name for AutoConfig; a large one is tried with fewer layers, random weights")
    verify.add_argument("--ranks", type=int, default=2, help="processes of the ring (default: 2)")
    verify.add_argument("--length", type=int, default=64, help="tokens of each of two rows (default: 64)")
    verify.add_argument("--layout", default="zigzag", choices=("zigzag", "striped", "contiguous"))
    verify.add_argument("--packed", action="store_true", help="one row of documents instead, told by position_ids")
    verify.add_argument("--trust-remote-code", action="store_true", help="run the model's own code")
    options = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        parser.error("verify needs transformers: pip install 'ring-attn[transformers]'")
    if "LOCAL_RANK" not in os.environ:
        return _on_ranks(options.ranks)
    from ring_attn.integrations.transformers.verify_command import verify_one_rank

    return verify_one_rank(options)


def _on_ranks(ranks: int) -> int:
    """This command in so many CPU processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "ring_attn"]
    environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **os.environ}
    return subprocess.run([*launcher, *sys.argv[1:]], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
