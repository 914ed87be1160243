"""A worker script in a fork of a process that has imported what every worker imports: ``launch.py``'s fork server loads this module
and nothing here starts a backend, a thread or a process group."""

import builtins
import os
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from program_cache import keep_programs

PRELOADED = (
    "jax",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "jax_core",
    "torch_bridge.attention.functional",
    "torch_bridge.backends.compiled",
    "torch_bridge.runtime",
    "ring_attn",
)
for module in PRELOADED:
    import_module(module)


def become(script: str, arguments: Sequence[str], environment: Mapping[str, str], out: str, err: str) -> None:
    """Run the script as Python's main program would, its output in the files ``out`` and ``err``. What is read from the environment
    when a module is imported was read by the server."""
    for file, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [script, *arguments]
    sys.path[:0] = [str(Path(script).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    warnings.resetwarnings()
    for action in filter(None, environment.get("PYTHONWARNINGS", "").split(",")):
        kind, _, category = action.partition("::")
        warnings.simplefilter(kind, getattr(builtins, category or "Warning"))  # type: ignore[arg-type]
    keep_programs()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
