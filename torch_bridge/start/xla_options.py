"""XLA's options for the programs of a ring on GPUs, of one process, too. Options of the user's XLA_FLAGS stay."""

import os

# XLA combines permutes that start together into one collective, up to 30 MiB. Above that they stay separate, and only one would
# overlap with the kernel.
ONE_ROTATION = {"xla_gpu_collective_permute_combine_threshold_bytes": str(2**40)}
# A ring on two axes has a rotation under way on each.
TWO_AXES = {"xla_gpu_experimental_parallel_collective_overlap_limit": "2"}
# XLA would share the search for the fastest algorithms among the processes of a program, and wait for one that has found its
# program on disk and searches for nothing.
NO_SHARED_AUTOTUNING = {"xla_gpu_shard_autotuning": False}
# XLA would run fusions in several forms on the device, with inputs that it invents, while it compiles a program: on the stream of
# all calls, where those that are launched meanwhile wait behind them. The kernels are not XLA's.
NO_TRIALS_OF_FUSIONS = {"xla_gpu_experimental_enable_fusion_autotuner": False}
# XLA would make CUDA graphs of launches in a row, by capturing them. A torch.cuda.synchronize() on another thread breaks a capture,
# and both fail: so no call is captured, though short ones take the host longer (docs/contributing/streams.md).
NO_CAPTURE = {"xla_gpu_graph_min_graph_size": str(2**31 - 1)}


def options_of_ring(axes: int) -> dict[str, str | bool]:
    """For ``jax.jit(compiler_options=)``: every program of a ring over so many mesh axes has them, since the first one that
    communicates opens the connections of all."""
    options = ONE_ROTATION | NO_SHARED_AUTOTUNING | NO_TRIALS_OF_FUSIONS | NO_CAPTURE | (TWO_AXES if axes > 1 else {})
    flags = {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in options.items() if f"--{name}" not in flags}
