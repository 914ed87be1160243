"""Two processes start JAX as the first argument says, and print the response of start()."""

import os
import signal
import sys

import torch.distributed as dist

from torch_bridge.mesh import rings
from torch_bridge.start import runtime


def local_first() -> None:
    """A ring of one before the ring of all."""
    import jax.numpy as jnp

    runtime.start(rings.resolve("local"))
    jnp.zeros(1).block_until_ready()


def other_world() -> None:
    """The program's own jax.distributed does not include the other process."""
    import jax

    jax.distributed.initialize("localhost:" + os.environ["OWN_PORT_" + os.environ["RANK"]], 1, 0)


def right_world() -> None:
    """The program's own jax.distributed, as it must be."""
    import jax

    port = os.environ["OWN_PORT_0"]
    jax.distributed.initialize(f"localhost:{port}", 2, dist.get_rank(), local_device_ids=[0])


def death() -> None:
    """Rank 1 dies once the others are waiting for it."""
    if dist.get_rank() == 1:
        runtime._initialize = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def many_devices() -> None:
    """Eight CPU devices in each process."""
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"


def main() -> None:
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    try:
        runtime.start(rings.resolve(), peer_timeout=8.0)
        print("started")
    except RuntimeError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
