"""Runs JAX beside torch: starts it in every process of the world, and shuts it down quietly.

Users need not call anything here. The first call of a ring of more than one process runs :func:`start`, which is then a collective
of the *whole world*, even if the rings are subsets of it: JAX has one ``jax.distributed`` per job. A program in which only some
ranks ever use a ring must call ``start()`` once on all ranks, after ``init_process_group``.

``torch_bridge.failures.watchdog`` handles a process that dies, fails, or does not join; its public names are re-exported here.
"""

import atexit
import json
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from jax_core.internals import backends_started, skip_atexit
from torch_bridge.failures import coordinator, peers
from torch_bridge.failures.addresses import loopback, meeting_place
from torch_bridge.failures.deadlock import named
from torch_bridge.failures.peers import DEVICE_TIMEOUT, PEER_TIMEOUT
from torch_bridge.failures.watchdog import PeerFailure, compare, compiling, watch
from torch_bridge.mesh.jax_mesh import jax_mesh, jax_platform, to_global, to_local
from torch_bridge.mesh.rings import ProcessRing
from torch_bridge.mesh.trial import note_ring
from torch_bridge.start.compilation_cache import keep_programs
from torch_bridge.start.jax_memory import choose_allocator
from torch_bridge.start.network import leave_jax, open_relay, set_gloo_address
from torch_bridge.start.xla_options import options_of_ring

if TYPE_CHECKING:
    import jax

# How long the processes wait for one another in `start`, in seconds; `start(start_timeout=)` changes it.
START_TIMEOUT = 300.0


@dataclass
class _State:
    """How far JAX has been started in this process."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    started: bool = False
    distributed: bool = False
    owns_distributed: bool = False
    refused: bool = False
    connected: set[ProcessRing] = field(default_factory=set)


# A process has one JAX, hence module-level state.
_state = _State()


def start(
    ring: ProcessRing | None = None,
    *,
    device: torch.device | None = None,
    peer_timeout: float = PEER_TIMEOUT,
    start_timeout: float | None = None,
    wait_timeout: float | None = None,
    device_timeout: float = DEVICE_TIMEOUT,
    check: Literal["new_programs", "every_call"] = "new_programs",
) -> None:
    """Start JAX in this process, as one process of the torch world. Idempotent, thread-safe, and nearly free once it has run.

    With a ``ring`` of one process, without torch.distributed, or in a world of one: settings only, no communication.
    Otherwise (a larger ring, or no ``ring``) it is a collective of all ranks of the default process group: JAX's process
    index is then the global torch rank, and each process has exactly one device.

    ``device``: the torch device of the tensors to come (default: the current CUDA device, or the CPU). ``peer_timeout``:
    seconds after a peer's death within which this process ends with :class:`PeerFailure`. ``wait_timeout`` (default:
    ``peer_timeout``): the same limit for a ring call that a living member of the ring never joins. A rank that computes or
    compiles in the same call may take any time; one that pauses between its calls (a checkpoint, a slow data loader) while
    others wait may take three quarters of ``wait_timeout``. ``start_timeout``: seconds to wait here for the other processes
    (default: ``START_TIMEOUT``; if the first ring call comes without ``start()``, the other ranks have ``wait_timeout`` to make
    theirs). ``device_timeout``: seconds within which a GPU must come to the end of a ring call that all ranks of the ring have
    given to theirs, and a host give it to its GPU, what it compiles not counted. One that does not ends the job in the same
    way, and it is said which call that is, and what is in flight on each rank. ``check``: "new_programs" compares the ranks'
    requests whenever a ring meets a new program, "every_call" before every forward and backward, to find the first call that
    differs.

    All of these take effect only in the call that starts JAX. Raises ValueError for an unknown ``check`` or if it differs between
    ranks, RuntimeError if the user's program has started JAX in a way that cannot work, and PeerFailure if a rank does not arrive.
    """
    if ring is not None:
        note_ring(ring.ranks)
    if ring in _state.connected:
        return
    if check not in ("new_programs", "every_call"):
        raise ValueError(f'check must be "new_programs" or "every_call", got {check!r}')
    with _state.lock:
        alone = _world_size() == 1 if ring is None else ring.size == 1
        if not alone and not _state.distributed:
            wait = peer_timeout if wait_timeout is None else wait_timeout
            arrival = (wait if ring else START_TIMEOUT) if start_timeout is None else start_timeout
            settings = peers.Settings(peer_timeout, wait, check == "every_call", device_timeout)
            _start_world(device, settings, arrival, START_TIMEOUT if start_timeout is None else start_timeout)
        elif alone and not _state.started:
            _start_alone(device)
        if ring is not None:
            _connect_ring(ring, device)


def refused() -> bool:
    """Whether a start failed before the processes had met: then they have no way to exchange messages."""
    return _state.refused


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _start_alone(device: torch.device | None) -> None:
    _settings_before_jax(device)
    _state.started = True


def _start_world(device: torch.device | None, settings: peers.Settings, arrival: float, timeout: float) -> None:
    try:
        endpoint, address, hosts = _meet(arrival, timeout, device)
    except Exception:
        _state.refused = True
        raise
    import jax

    peers.join(address, endpoint, dist.get_rank(), hosts, settings, timeout)
    atexit.register(shutdown)
    os.register_at_fork(after_in_child=_disown)
    world = ProcessRing(tuple(range(_world_size())), dist.get_rank())
    with watch(world, "start"):
        if not jax.distributed.is_initialized():
            _initialize(address, endpoint, device, timeout)
        _verify()
    check = "every_call" if settings.every_call else "new_programs"
    compare(world, f'ring_attn.start(check="{check}")', "ring_attn.start must have the same check on all ranks")
    if jax.default_backend() == "cpu":
        peers.collectives_report_ends()
    _state.started = _state.distributed = True
    _state.refused = False


def _settings_before_jax(device: torch.device | None) -> None:
    """Set what JAX reads from the environment when its backends start; the user's own settings are kept."""
    choose_allocator(running=backends_started())
    if "JAX_PLATFORMS" not in os.environ and not torch.cuda.is_available():
        os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    # JAX reads the environment when it is imported, which the user may have done before.
    if not backends_started() and not _platforms() and "JAX_PLATFORMS" in os.environ:
        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    keep_programs()


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
    elif backends_started():
        raise RuntimeError(
            f"JAX must start after torch's {world} processes have met, but its backend was already running in this process as "
            "a single one. Call torch_bridge.runtime.start() on all ranks before the first use of JAX (jax.devices(), any "
            'jnp array, ring_attention(..., mesh="local"))'
        )


def _meet(arrival: float, timeout: float, device: torch.device | None) -> tuple[coordinator.Endpoint, str, list[str]]:
    """Wait until every rank has arrived here; rank 0 starts the coordinator and tells the others its address. The last result: the
    names of all ranks' hosts.

    Everything goes through torch's store, where a wait has a timeout and can tell who is missing. Raises RuntimeError if a rank's
    JAX or the coordinator cannot start, PeerFailure if a rank does not arrive.
    """
    # torchrun's attempts may share a store, in which an earlier one's keys still are.
    prefix = f"ring_attn/start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
    problem = _problem(device)
    with suppress(*[RuntimeError] if problem else []):  # rank 0 may have ended for its own, and the store with it
        store.set(f"host of rank {dist.get_rank()}", json.dumps((socket.gethostname(), loopback())))
        store.set(f"rank {dist.get_rank()}", problem)
    if problem:
        raise RuntimeError(problem)
    _await_all(store, arrival)
    hosts, loopbacks = zip(*(json.loads(store.get(f"host of rank {rank}")) for rank in range(_world_size())), strict=True)
    if dist.get_rank() == 0:
        store.set("coordinator", json.dumps(_launch(timeout, loopbacks)))
    _await_keys(store, ["coordinator"], timeout, "rank 0 has not started the coordinator")
    endpoint, address, problem = json.loads(store.get("coordinator"))
    if problem:
        raise RuntimeError(f"rank 0 could not start JAX's coordinator: {problem}")
    return coordinator.Endpoint(*endpoint), address, list(hosts)


def _problem(device: torch.device | None) -> str:
    """Why JAX cannot start in this process; empty if it can."""
    try:
        _settings_before_jax(device)
        _refuse_what_cannot_work()
    except RuntimeError as error:
        return str(error)
    return ""


def _await_all(store: dist.Store, arrival: float) -> None:
    """Wait for all ranks, each of which may take ``arrival`` seconds. A rank that gives up tells those that come later, which
    would find it in the store and wait for it."""
    names = [f"rank {rank}" for rank in range(_world_size())]
    try:
        store.wait(names, timedelta(seconds=arrival))
    except RuntimeError:
        missing = [rank for rank, name in enumerate(names) if not store.check([name])]
        if not missing:
            raise
        here = set(range(len(names))) - set(missing)
        store.set(names[dist.get_rank()], f"it gave up after {arrival:g} s without {named(missing)}")
        raise PeerFailure(
            f"the first ring call of a job, as ring_attn.start(), is a collective call of all {len(names)} ranks: "
            f"{named(missing)} asked for nothing in {arrival:g} s, while {named(here)} waited in it. Where some ranks come late, "
            "call ring_attn.start(start_timeout=seconds) on all of them after init_process_group"
        ) from None
    problems = {rank: text for rank, name in enumerate(names) if (text := store.get(name).decode())}
    if problems:
        raise RuntimeError("JAX cannot start on " + "; ".join(f"rank {rank}: {text}" for rank, text in problems.items()))


def _await_keys(store: dist.Store, names: list[str], timeout: float, what: str) -> None:
    try:
        store.wait(names, timedelta(seconds=timeout))
    except RuntimeError as error:
        raise PeerFailure(f"{what} within {timeout:g} s ({error}). See the log of that process for the reason") from None


def _launch(timeout: float, loopbacks: Sequence[str]) -> tuple[coordinator.Endpoint | None, str, str]:
    """The coordinator's endpoint and address, or the reason why it could not start, so that no rank waits for it in vain."""
    try:
        listens, address = meeting_place(_host_name(), loopbacks)
        return coordinator.launch(_world_size(), timeout, listens), address, ""
    except RuntimeError as error:
        return None, "", str(error)


def _host_name() -> str:
    """The name under which the others reach this host: the one by which torch's processes found rank 0."""
    return os.environ.get("MASTER_ADDR") or socket.gethostname()


def _initialize(address: str, endpoint: coordinator.Endpoint, device: torch.device | None, timeout: float) -> None:
    import jax

    if "cpu" in (_platforms() or "cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would catch SIGTERM, with which torchrun and schedulers end a job.
    jax.config.update("jax_enable_preemption_service", False)
    _bypass_proxy()
    set_gloo_address(peers.local_address())
    jax.distributed.initialize(
        f"localhost:{open_relay(address, endpoint.service_port, timeout)}",
        dist.get_world_size(),
        dist.get_rank(),
        local_device_ids=[_local_device(device)],
        cluster_detection_method="deactivate",
        initialization_timeout=int(timeout),
        # Process 0 always starts a service. The coordinator's is the one in use; this one gets an unused local port.
        coordinator_bind_address="localhost:0",
    )
    _state.owns_distributed = True


def _disown() -> None:
    """A forked child must not disconnect its parent when it exits."""
    _state.owns_distributed = False
    skip_atexit()


def _bypass_proxy() -> None:
    """Otherwise gRPC would send the ranks' own traffic through an HTTP proxy set in the environment."""
    if any(name in os.environ for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        os.environ.setdefault("no_grpc_proxy", ",".join(filter(None, (os.environ.get("no_proxy"), "localhost"))))


def _platforms() -> str:
    """The platforms that JAX may use, separated by commas; empty if JAX chooses."""
    import jax

    return jax.config.jax_platforms or ""  # type: ignore[attr-defined]  # made at run time


def _local_device(device: torch.device | None) -> int:
    """The ordinal of this process's GPU; 0 on a CPU."""
    if device is not None and device.index is not None:
        return device.index
    if not torch.cuda.is_available():
        return 0
    chosen, local_rank = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK", "0"))
    # 0 is also the default of a program that has not chosen a device yet.
    return chosen or (local_rank if local_rank < torch.cuda.device_count() else 0)


def _connect_ring(ring: ProcessRing, device: torch.device | None) -> None:
    """Synchronise the ring's processes once and open their connections before the first real step.

    gloo gives the processes 30 seconds to arrive at the first collective of a ring, and one may compile for longer: the
    comparison waits for a rank that is busy as long as it must, and for an idle one as every ring call does.
    """
    if ring.size > 1 and ring not in _state.connected:
        compare(ring, f"the first call of the {ring}")
        _rotate_once(ring, device or _default_device(ring))
    _state.connected.add(ring)


def _default_device(ring: ProcessRing) -> torch.device:
    backend = dist.get_backend(ring.groups[0] if ring.groups else None)
    return torch.device("cuda", _local_device(None)) if "nccl" in backend else torch.device("cpu")


def _rotate_once(ring: ProcessRing, device: torch.device) -> None:
    import jax
    import jax.numpy as jnp

    mesh = jax_mesh(ring, jax_platform(device))
    spec = jax.sharding.PartitionSpec(ring.axis_name)
    pairs = [(source, (source + 1) % ring.size) for source in range(ring.size)]

    def rotate(block: "jax.Array") -> "jax.Array":
        block = jax.lax.ppermute(block, ring.axis_name, pairs)
        # The collectives of a strategy over several axes have connections of their own, one set for each axis.
        for axis in ring.axes if len(ring.axes) > 1 else ():
            block = jax.lax.psum(block, axis)
        return block

    options = options_of_ring(len(ring.axes)) if device.type == "cuda" else None
    mapped = jax.shard_map(rotate, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(mapped, compiler_options=options)
    local = jax.device_put(jnp.zeros(1, jnp.float32), mesh.local_devices[0])  # the same under x64
    with watch(ring, "start", limited=device.type == "cuda"):
        block = to_global(ring, local)
        with compiling():
            compiled = program.lower(block).compile()
        to_local(compiled(block)).block_until_ready()


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
    """Leave JAX's world without waiting for any other process. Runs by itself at exit; no ring call may follow it."""
    with _state.lock:
        peers.disconnect()
        if _state.owns_distributed:
            _state.owns_distributed = False
            leave_jax()
