"""JAX beside torch: its start in every process of the world, and a quiet end.

Nothing here is asked of the user. The first call of a ring of more than one process runs :func:`start`, which is then a
collective call of the *whole world*, also when the rings are subsets of it: JAX has one ``jax.distributed`` per job. A program
in which only some ranks ever use a ring calls ``start()`` on all ranks, once, after ``init_process_group``.

What happens when a process dies is in ``torch_bridge.peers``, whose names for callers are here too.
"""

import atexit
import os
import socket
import threading
import warnings
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torch_bridge import coordinator, peers
from torch_bridge.mesh import AXIS, Ring, jax_mesh, jax_platform, to_global, to_local
from torch_bridge.peers import EXIT_PEER_FAILURE, PEER_TIMEOUT, PeerFailure, watch

if TYPE_CHECKING:
    import jax

__all__ = ["EXIT_PEER_FAILURE", "PEER_TIMEOUT", "START_TIMEOUT", "PeerFailure", "shutdown", "start", "watch"]

# How long the processes wait for one another at the start, in seconds; `start(start_timeout=)` changes it.
START_TIMEOUT = 300.0


@dataclass
class _State:
    """How far JAX's start has come in this process."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    started: bool = False
    distributed: bool = False
    owns_distributed: bool = False
    connected: set[Ring] = field(default_factory=set)


# A process has one JAX: its state cannot live anywhere but in the module.
_state = _State()


def start(
    ring: Ring | None = None,
    *,
    device: torch.device | None = None,
    peer_timeout: float = PEER_TIMEOUT,
    start_timeout: float = START_TIMEOUT,
) -> None:
    """Have JAX run in this process, as one of the torch world. Idempotent, thread-safe, and nearly free once it has run.

    With ``ring`` of one process, or without torch.distributed, or in a world of one: settings only, no communication.
    Otherwise (a larger ring, or no ``ring``) a collective call of all ranks of the default process group: JAX's process
    index is then the global torch rank, and each process has exactly one device.

    ``device``: the torch device of the tensors to come (default: the current CUDA device, or the CPU). ``peer_timeout``:
    seconds after a peer's death within which this process ends with :class:`PeerFailure`. ``start_timeout``: seconds to wait
    for the other processes. Both count only in the call that starts JAX. Raises RuntimeError when the user's program has
    started JAX in a way that cannot work.
    """
    if ring in _state.connected:
        return
    with _state.lock:
        alone = _world_size() == 1 if ring is None else ring.size == 1
        if not alone and not _state.distributed:
            _start_world(device, peer_timeout, start_timeout)
        elif alone and not _state.started:
            _start_alone(device)
        if ring is not None:
            _connect_ring(ring, device)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _start_alone(device: torch.device | None) -> None:
    _settings_before_jax(device)
    _state.started = True


def _start_world(device: torch.device | None, peer_timeout: float, start_timeout: float) -> None:
    _settings_before_jax(device)
    _refuse_what_cannot_work()
    import jax

    endpoint, address = _agree(start_timeout)
    peers.join(address, endpoint, dist.get_rank(), peer_timeout, start_timeout)
    atexit.register(shutdown)
    with watch(Ring(tuple(range(_world_size())), dist.get_rank()), "start"):
        if not jax.distributed.is_initialized():
            _initialize(address, endpoint, device, start_timeout)
        _verify()
    if jax.default_backend() == "cpu":
        peers.trust_collectives()
    _state.started = _state.distributed = True


def _settings_before_jax(device: torch.device | None) -> None:
    """What JAX reads from the environment when its backends start; what the user has set stays."""
    if "XLA_PYTHON_CLIENT_PREALLOCATE" not in os.environ and _backends_started():
        _warn_of_preallocation()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes 75 % of the GPU that torch shares
    if "JAX_PLATFORMS" not in os.environ and not torch.cuda.is_available():
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    # The environment is read when jax is imported, and the user may have imported it before.
    if not _backends_started() and not _platforms() and "JAX_PLATFORMS" in os.environ:
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def _warn_of_preallocation() -> None:
    import jax

    if jax.default_backend() == "gpu" and os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default") in ("default", "bfc"):
        warnings.warn(
            "JAX was running in this process before ring_attn started it, and has taken its share of the GPU's memory, 75 % unless "
            "told otherwise, which torch cannot use. Call torch_bridge.runtime.start() before the first use of JAX, or set "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment",
            RuntimeWarning,
            stacklevel=2,
        )


def _backends_started() -> bool:
    from jax._src import xla_bridge  # no public name tells it without starting them

    return bool(xla_bridge.backends_are_initialized())


def _refuse_what_cannot_work() -> None:
    import jax

    world, rank = _world_size(), dist.get_rank()
    if jax.distributed.is_initialized():
        if (jax.process_count(), jax.process_index()) != (world, rank):
            raise RuntimeError(
                f"jax.distributed must have the torch world: process {rank} of {world}; it was initialised as process "
                f"{jax.process_index()} of {jax.process_count()}. Remove the program's own jax.distributed.initialize, or "
                "give it num_processes=dist.get_world_size(), process_id=dist.get_rank() and one local device"
            )
    elif _backends_started():
        raise RuntimeError(
            f"JAX must start after torch's {world} processes have met, but its backend was already running in this process as "
            "a single one. Call torch_bridge.runtime.start() on all ranks before the first use of JAX (jax.devices(), any "
            'jnp array, ring_attention(..., mesh="local"))'
        )


def _agree(timeout: float) -> tuple[coordinator.Endpoint, str]:
    """Rank 0 starts the coordinator and tells the others where it is, or why it is nowhere: none may wait for what is not."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [(tuple(coordinator.launch(dist.get_world_size(), timeout)), _address(), None)]
        except RuntimeError as error:
            told = [((), "", str(error))]
    dist.broadcast_object_list(told, src=0, device=_group_device(dist.group.WORLD))
    endpoint, address, problem = told[0]
    if problem:
        raise RuntimeError(f"rank 0 could not start JAX's coordinator: {problem}")
    return coordinator.Endpoint(*endpoint), address


def _address() -> str:
    """The name under which the others reach this host: the one by which torch's processes found rank 0."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _initialize(address: str, endpoint: coordinator.Endpoint, device: torch.device | None, timeout: float) -> None:
    import jax

    if "cpu" in (_platforms() or "cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would catch SIGTERM, by which torchrun and schedulers end a job.
    jax.config.update("jax_enable_preemption_service", False)
    _bypass_proxy(address)
    jax.distributed.initialize(
        f"{_bracketed(address)}:{endpoint.service_port}",
        dist.get_world_size(),
        dist.get_rank(),
        local_device_ids=[_local_device(device)],
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout),
        # Process 0 always starts a service. The one that counts is the coordinator's; this one gets a port nobody knows.
        coordinator_bind_address="localhost:0",
    )
    _state.owns_distributed = True
    os.register_at_fork(after_in_child=_disown)


def _disown() -> None:
    """A forked child that ends must not sign its parent off."""
    _state.owns_distributed = False


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _bypass_proxy(address: str) -> None:
    """gRPC would send the ranks' own traffic through an HTTP proxy of the environment."""
    if any(name in os.environ for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        os.environ.setdefault("no_grpc_proxy", ",".join(filter(None, (os.environ.get("no_proxy"), address, "localhost"))))


def _platforms() -> str:
    """The platforms that JAX may use, separated by commas; empty where it chooses for itself."""
    import jax

    return jax.config.jax_platforms or ""  # type: ignore[attr-defined]  # made at run time


def _local_device(device: torch.device | None) -> int:
    """The ordinal of this process's GPU; 0 on a CPU."""
    if device is not None and device.index is not None:
        return device.index
    if not torch.cuda.is_available():
        return 0
    chosen, local_rank = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK", "0"))
    # 0 is also what a program has that has chosen nothing yet.
    return chosen or (local_rank if local_rank < torch.cuda.device_count() else 0)


def _connect_ring(ring: Ring, device: torch.device | None) -> None:
    """Have the ring's processes meet once and open their connections, before any waits in a real step.

    gloo gives the processes 30 seconds to arrive at the first collective of a ring, and one may compile or read data for
    longer; torch's own wait has torch's timeout.
    """
    if ring.size > 1 and ring not in _state.connected:
        together = torch.zeros(1, device=device or _group_device(ring.group))
        dist.all_reduce(together, group=ring.group)
        together.item()  # a GPU only queues it
        _rotate_once(ring, together.device)
    _state.connected.add(ring)


def _group_device(group: Any) -> torch.device:
    return torch.device("cuda", _local_device(None)) if "nccl" in dist.get_backend(group) else torch.device("cpu")


def _rotate_once(ring: Ring, device: torch.device) -> None:
    import jax
    import jax.numpy as jnp

    mesh = jax_mesh(ring, jax_platform(device))
    spec = jax.sharding.PartitionSpec(AXIS)
    pairs = [(source, (source + 1) % ring.size) for source in range(ring.size)]

    def rotate(block: "jax.Array") -> "jax.Array":
        return jax.lax.ppermute(block, AXIS, pairs)

    program = jax.jit(jax.shard_map(rotate, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    local = jax.device_put(jnp.zeros(1), mesh.local_devices[0])
    with watch(ring, "start"):
        to_local(program(to_global(ring, local))).block_until_ready()


def _verify() -> None:
    import jax

    rank, world = dist.get_rank(), dist.get_world_size()
    if jax.local_device_count() != 1:
        raise RuntimeError(
            f"JAX must have exactly one device in each of torch's {world} processes, but has {jax.local_device_count()} on rank "
            f"{rank}; take xla_force_host_platform_device_count out of XLA_FLAGS ({os.environ.get('XLA_FLAGS', '')!r}), leave "
            "jax_num_cpu_devices unset, and give jax.distributed.initialize, if the program calls it, one local device"
        )
    if (jax.process_index(), jax.process_count()) != (rank, world):
        raise RuntimeError(
            f"JAX must be process {rank} of {world}, as torch is, but is process {jax.process_index()} of {jax.process_count()}; "
            "start JAX by torch_bridge.runtime.start() on all ranks"
        )


def shutdown() -> None:
    """Leave JAX's world quietly; no other process is waited for. Runs by itself at exit; ring calls are over after it."""
    with _state.lock:
        peers.say_goodbye()
        if _state.owns_distributed:
            import jax

            _state.owns_distributed = False
            with suppress(Exception):  # the coordinator may be gone, and nobody is left to handle it
                jax.distributed.shutdown()
