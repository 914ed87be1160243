"""Two processes start JAX in a way that cannot work (the first argument) and print what start() says to it."""

import os
import sys

import torch.distributed as dist

from torch_bridge import mesh, runtime


def local_first() -> None:
    """A ring of one before the ring of all."""
    import jax.numpy as jnp

    runtime.start(mesh.resolve("local"))
    jnp.zeros(1).block_until_ready()


def other_world() -> None:
    """The program's own jax.distributed knows nothing of the other process."""
    import jax

    jax.distributed.initialize("localhost:" + os.environ["OWN_PORT_" + os.environ["RANK"]], 1, 0)


def many_devices() -> None:
    """Eight CPU devices in each process."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"


def main() -> None:
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    try:
        runtime.start(mesh.resolve())
    except RuntimeError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
