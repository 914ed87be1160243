"""The hardware that a request is for. These are the only questions to devices: kernels find the answers in their ``Problem``."""

import jax


def capability(backend: str) -> int:
    """The compute capability of this process's GPU, as 90 for 9.0; 0 where there is none, or one that is not NVIDIA's."""
    if backend != "gpu":
        return 0
    try:
        major, _, minor = jax.local_devices(backend="gpu")[0].compute_capability.partition(".")
    except RuntimeError:  # a program for devices that this process does not have
        return 0
    return 10 * int(major) + int(minor) if major.isdigit() and minor.isdigit() else 0


def generation(backend: str) -> str:
    """The generation of the TPUs of the enclosing ``shard_map``, or of this process, as JAX names it, like "TPU v5 lite"; "" if
    neither says."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) if backend == "tpu" else None
    if device is None and backend == "tpu" == jax.default_backend():
        device = jax.local_devices(backend="tpu")[0]
    return "" if device is None else device.device_kind
