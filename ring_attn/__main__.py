"""``python -m ring_attn verify MODEL``: whether a transformers model gives on a ring what it gives in one process."""

import argparse
import importlib.util
import os
import subprocess
import sys

WORKER = "ring_attn.integrations.transformers.verify_command"


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
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks), "-m", WORKER]
    flags = [f"--{name}" for name in ("packed", "trust_remote_code") if getattr(options, name)]
    given = [options.model, "--length", str(options.length), "--layout", options.layout, *flags]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return subprocess.run([*launcher, *given], env={**os.environ, "OMP_NUM_THREADS": threads}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
