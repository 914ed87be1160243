"""JAX beside torch in real processes: the start, rings of a mesh, the end, and the death of a peer."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.distributed as dist
from launch import WORKERS, environment, processes

from torch_bridge.failures import coordinator, peers, watchdog
from torch_bridge.mesh.jax_mesh import _Joiner, jax_mesh, to_global, to_local
from torch_bridge.mesh.rings import ProcessRing, resolve
from torch_bridge.runtime import EXIT_PEER_FAILURE
from torch_bridge.start import jax_memory, runtime
from torch_bridge.start.network import open_relay

PEER_TIMEOUT = 12.0  # what killed_peer.py gives to start()
NOISE = re.compile(r"Traceback|Check failure|grpc|CANCELLED|UNAVAILABLE|coordination|Error|Warning")


@pytest.mark.slow
def test_rings_of_a_2d_mesh_run_at_the_same_time_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(WORKERS / "rings.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"rank {rank} is done" in done.stdout for rank in range(4))
    assert not NOISE.search(done.stderr), done.stderr


@pytest.mark.slow
def test_torchruns_second_attempt_works():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    settings = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # else torch's gloo may find the first attempt's addresses
    done = subprocess.run(
        [*command, str(WORKERS / "restarts.py")], env=settings, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("attempt 1 works") == 2


def test_a_rank_does_not_meet_those_of_an_earlier_attempt(monkeypatch):
    store, rank = dist.HashStore(), 0
    endpoint = coordinator.Endpoint(1, 2, "token")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(runtime, "_problem", lambda device: "")
    monkeypatch.setattr(runtime, "_launch", lambda *_: (endpoint, "here", ""))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert runtime._meet(1.0, 1.0, None) == (endpoint, "here", [socket.gethostname()])
    rank = 1
    monkeypatch.setattr(runtime, "_world_size", lambda: 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(runtime.PeerFailure, match=r"global rank 0 asked for nothing in 0.1 s, while global rank 1 waited"):
        runtime._meet(0.1, 1.0, None)


def test_a_rank_says_its_own_problem_though_the_store_has_ended_with_rank_0(monkeypatch):
    class Ended(dist.HashStore):
        def set(self, *pair):
            raise dist.DistNetworkError("Broken pipe")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Ended)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(runtime, "_problem", lambda device: "JAX runs already")
    with pytest.raises(RuntimeError, match="JAX runs already"):
        runtime._meet(1.0, 1.0, None)


@pytest.mark.parametrize("way", [pytest.param("early", marks=pytest.mark.slow), "late"])
def test_a_clean_end_is_quiet(way):
    for ended in processes(2, "ends.py", way, forked=False):
        assert ended.status == 0, ended.err
        assert not NOISE.search(ended.err), ended.err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the coordinator in /proc")
@pytest.mark.slow
def test_a_stopped_coordinator_keeps_nobody_from_ending():
    ended = processes(2, "ends.py", "stopped_coordinator", timeout=180, forked=False)
    ((stopped, at),) = re.findall(r"stopped (\d+) at (\S+)", ended[0].out)
    os.kill(int(stopped), signal.SIGKILL)
    assert [(rank.status, rank.err) for rank in ended] == [(0, "")] * 2
    # GOODBYE_TIME, and what a loaded machine takes for two interpreters to end; without a limit of ours it would be minutes.
    assert max(rank.at for rank in ended) < float(at) + 30


@pytest.mark.slow
def test_the_exit_of_a_forked_child_leaves_its_parent_alone():
    for ended in processes(2, "ends.py", "fork", forked=False):
        assert ended.status == 0, ended.err
        assert "Terminating" not in ended.err


@pytest.mark.slow
def test_an_error_of_one_rank_ends_it_at_once_and_leaves_the_others_alone():
    fine, failed = processes(2, "ends.py", "user_error", forked=False)
    assert (fine.status, fine.err) == (0, "")
    assert failed.status == 1
    assert failed.err.strip().endswith("ZeroDivisionError: a mistake of the user")
    assert failed.err.count("Traceback") == 1


@pytest.mark.slow
def test_a_step_whose_peer_has_left_does_not_hang():
    left_alone, left = processes(2, "ends.py", "early_exit_status", forked=False)
    assert (left.status, left.err) == (5, "")
    assert left_alone.status == 1
    assert re.search(r"PeerFailure: the ring of global ranks \[0, 1\] lost a member in forward step 2", left_alone.err)


@pytest.mark.parametrize(
    ("victim", "survivors"),
    [
        pytest.param(2, "leave", id="killed"),
        pytest.param(0, "linger", id="rank 0 killed, others catch the error", marks=pytest.mark.slow),
    ],
)
def test_the_death_of_a_peer_ends_the_others_with_the_ring_and_the_step(victim, survivors):
    ended = processes(4, "killed_peer.py", str(victim), survivors, forked=False)
    died = re.search(r"dies at ([\d.]+)", ended[victim].out)
    assert died, ended[victim].err
    for rank, survivor in enumerate(ended):
        if rank == victim:
            continue
        assert survivor.status > 0, survivor.err  # neither success, nor a signal such as JAX's abort
        assert re.search(r"the ring of global ranks \[0, 1, 2, 3\] lost a member in (forward|backward) step 1[56]", survivor.err)
        assert f"{victim} (died)" in survivor.err
        assert "Check failure" not in survivor.err
    noticed = max(survivor.at for survivor in ended) - float(died[1])
    assert noticed < PEER_TIMEOUT + 6 * (survivors == "linger")  # those who linger sleep on after they have caught it
    if survivors == "linger":
        opposite = ended[2]
        assert opposite.status == EXIT_PEER_FAILURE  # no connection of its own broke: the watchdog ended it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("local_first", "its backend was already running in this process"),
        ("other_world", r"jax.distributed must have the torch world: process {rank} of 2; .* as process 0 of 1"),
        ("many_devices", r"exactly one device in each of torch's 2 processes, but has 8 on rank {rank}"),
    ],
)
def test_a_start_that_cannot_work_is_refused(way, message):
    for rank, ended in enumerate(processes(2, "starts.py", way, forked=False)):
        assert ended.status == 0, ended.err
        assert re.search("refused: .*" + message.format(rank=rank), ended.out), ended.out


@pytest.mark.slow
def test_a_world_that_the_program_has_started_rightly_is_used():
    for ended in processes(2, "starts.py", "right_world", forked=False):
        assert ended.status == 0, ended.err
        assert "started" in ended.out


@pytest.mark.slow
def test_a_death_during_the_start_does_not_hang():
    survivor, _ = processes(2, "starts.py", "death", forked=False)
    assert survivor.status == EXIT_PEER_FAILURE, survivor.err
    assert "the ring of global ranks [0, 1] lost a member in start step 1, on global rank 0: global rank 1 (died)" in survivor.err


@pytest.mark.parametrize("where", ["ring", 3, 1.5, ["cp"]], ids=str)
def test_only_meshes_groups_and_local_are_places(where):
    with pytest.raises(ValueError, match=r'mesh must be a DeviceMesh, a ProcessGroup, "local" or None, got'):
        resolve(where)


@pytest.mark.parametrize("where", [None, "local"])
def test_without_torch_distributed_there_is_a_ring_of_one(where):
    ring = resolve(where)
    assert (ring, ring.size, ring.group) == (ProcessRing((0,), 0), 1, None)
    local = jnp.ones((2, 3))
    assert to_global(ring, local) is local
    assert to_local(local).unsafe_buffer_pointer() == local.unsafe_buffer_pointer()
    assert jax_mesh(ring).shape == {"ring": 1}
    with pytest.raises(ValueError, match="mesh_dim chooses a dimension of a DeviceMesh, got mesh_dim='cp'"):
        resolve(where, "cp")


class OtherArray:
    """An array of a JAX whose constructor takes something else."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.ndim = array, array.shape, array.dtype, array.ndim


@pytest.mark.parametrize("wrap", [lambda array: array, OtherArray], ids=["this JAX", "another"])
def test_global_arrays_after_the_first_are_like_it(wrap, monkeypatch):
    checked, check = [], jax.make_array_from_single_device_arrays

    def spy(shape, sharding, arrays):
        checked.append(shape)
        return check(shape, sharding, [getattr(array, "array", array) for array in arrays])

    monkeypatch.setattr(jax, "make_array_from_single_device_arrays", spy)
    alone = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:1], ("ring",)), jax.sharding.PartitionSpec("ring"))
    join, local = _Joiner(1, alone), jnp.arange(6.0).reshape(3, 2)
    first, second = join(wrap(local)), join(wrap(local))
    assert (first.aval, first.sharding, first.committed) == (second.aval, second.sharding, second.committed)
    assert first.unsafe_buffer_pointer() == second.unsafe_buffer_pointer() == local.unsafe_buffer_pointer()
    assert checked == [(3, 2)] * (1 if wrap(local) is local else 2)
    with pytest.raises(ValueError, match="got a scalar"):
        join(jnp.float32(0))


def test_a_ring_whose_processes_jax_does_not_see_is_refused():
    with pytest.raises(RuntimeError, match=r"has none of ranks \[1\]; call torch_bridge.runtime.start"):
        jax_mesh(ProcessRing((0, 1), 0))


def test_one_process_needs_no_torch_distributed():
    ring = ProcessRing((0,), 0)
    runtime.start(ring)
    runtime.start()
    with runtime.watch(ring, "forward") as call:
        assert call.call == 0  # nobody to watch


@pytest.fixture
def unset(monkeypatch):
    """No setting of the user's, on a machine whose torch has CUDA."""
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"):
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    jax_memory._say_once_what_it_costs.cache_clear()


@pytest.fixture
def running_jax(unset, monkeypatch):
    """A program that has used JAX on a GPU before it came here, with no setting of its own."""
    monkeypatch.setattr(runtime, "backends_started", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("running_jax")
@pytest.mark.parametrize(("preallocate", "said"), [(None, "has taken its share .*PREALLOCATE=false"), ("false", "by doubling")])
def test_a_program_whose_jax_runs_with_another_pool_is_told_once(preallocate, said, monkeypatch):
    if preallocate:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", preallocate)
    with pytest.warns(RuntimeWarning, match=said) as told:
        runtime._settings_before_jax(None)
    assert len(told) == 1
    runtime._settings_before_jax(None)
    assert "XLA_PYTHON_CLIENT_ALLOCATOR" not in os.environ  # too late for this process


@pytest.mark.usefixtures("running_jax")
@pytest.mark.parametrize("setting", [("PREALLOCATE", "true"), ("ALLOCATOR", "platform"), ("ALLOCATOR", "cuda_async")])
def test_what_the_user_has_set_stays(setting, monkeypatch):
    name = f"XLA_PYTHON_CLIENT_{setting[0]}"
    monkeypatch.setenv(name, setting[1])
    runtime._settings_before_jax(None)
    assert os.environ[name] == setting[1]


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("allocator", ["bfc", "default"])
def test_a_pool_that_the_user_chose_stays_and_its_cost_is_said_once(allocator, monkeypatch):
    monkeypatch.setattr(runtime, "backends_started", lambda: False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", allocator)
    with pytest.warns(RuntimeWarning, match="has the allocator of XLA_PYTHON_CLIENT_ALLOCATOR: its pool grows by doubling") as told:
        runtime._settings_before_jax(None)
    runtime._settings_before_jax(None)
    assert len(told) == 1 and os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == allocator


@pytest.mark.usefixtures("unset")
def test_jax_takes_no_memory_ahead_and_has_cudas_own_pool(monkeypatch):
    monkeypatch.setattr(runtime, "backends_started", lambda: False)
    for _ in range(2):
        runtime._settings_before_jax(None)
        assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
        assert os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == "cuda_async"
        monkeypatch.setattr(runtime, "backends_started", lambda: True)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("fresh")
def test_errors_of_the_program_pass_through_a_watch():
    with pytest.raises(ValueError, match="shapes"), runtime.watch(ProcessRing((0, 1), 0), "forward"):
        raise ValueError("shapes do not fit")


class Event:
    """Stands for the event behind it: complete when the peers have done their part."""

    complete = False

    def query(self):
        return self.complete


@pytest.fixture
def fresh(monkeypatch):
    """The state of a process that knows nothing of its peers yet."""
    state = peers.State(settings=peers.Settings(peer_timeout=0.08))
    monkeypatch.setattr(peers, "state", state)
    return state


@pytest.mark.usefixtures("fresh")
def test_a_launched_call_is_watched_until_its_stream_is_past_it():
    event = Event()
    with runtime.watch(ProcessRing((0, 1), 0), "backward") as call:
        call.event = event
    assert peers._unfinished() == [call]
    event.complete = True
    assert peers._unfinished(young=call.begun - 1) == [call]  # nobody looks at a young event
    assert peers._unfinished() == []


class BrokenEvent:
    """An event of a device that has met an error."""

    def query(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_broken_device_stops_neither_the_listener_nor_the_watchdog(fresh, monkeypatch):
    with runtime.watch(ProcessRing((0, 1), 0), "forward", "q") as call:
        call.event = BrokenEvent()
    here, coordinators = socket.socketpair()
    monkeypatch.setattr(fresh, "connection", here)
    listener = threading.Thread(target=peers._listen, args=(here,), daemon=True)
    listener.start()
    with here, coordinators, coordinators.makefile("rw") as lines:
        coordinators.settimeout(10)
        for question in (1, 2):
            fresh.launched[0, 1][0].finished = False
            lines.write(f'{{"ask": {question}}}\n')
            lines.flush()
            answer = json.loads(lines.readline())
            assert (answer["ask"], answer["report"]["rings"][0][1][0]) == (question, 1)
        coordinators.shutdown(socket.SHUT_RDWR)
        listener.join(10)
    assert peers._unfinished() == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_listener_that_fails_leaves_nobody_waiting_for_news(fresh, monkeypatch):
    def fail():
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(peers, "_report", fail)
    here, coordinators = socket.socketpair()
    listener = threading.Thread(target=peers._listen, args=(here,), daemon=True)
    listener.start()
    with here, coordinators:
        coordinators.sendall(b'{"ask": 1}\n')
        listener.join(10)
    assert fresh.cut_off
    with pytest.raises(runtime.PeerFailure, match="the connection to the coordinator process beside global rank 0 has ended"):
        watchdog.compare(ProcessRing((0, 1), 0), "q")


def test_a_call_is_overdue_only_when_a_member_of_its_ring_has_died(fresh):
    call = runtime.watch(ProcessRing((0, 1), 0), "backward")
    fresh.gone[7] = False
    assert not call.overdue()
    fresh.gone[1] = False
    assert not call.overdue()  # it has a while to end by itself
    time.sleep(0.03)
    assert call.overdue()


def test_after_a_good_end_of_a_peer_gloo_decides_and_nccl_has_more_time(fresh):
    call = runtime.watch(ProcessRing((0, 1), 0), "backward")
    fresh.gone[1] = True
    assert call._grace() == pytest.approx(0.24)
    peers.collectives_report_ends()
    assert call._grace() is None
    assert not call.overdue()


def test_a_new_step_of_a_ring_that_lost_a_member_fails_at_once(fresh):
    fresh.gone[3] = True
    with pytest.raises(runtime.PeerFailure, match=r"ranks \[2, 3\] .* forward step 1, on global rank 2: global rank 3 \(ended\)"):
        runtime.watch(ProcessRing((2, 3), 0), "forward").__enter__()
    with runtime.watch(ProcessRing((0, 1), 0), "forward"):
        pass


def test_the_coordinator_ignores_strangers_and_ends_with_the_last_rank():
    endpoint = coordinator.launch(2, 30.0, "127.0.0.1")
    address = ("localhost", endpoint.port)
    stranger, first, second = (socket.create_connection(address, timeout=10) for _ in range(3))
    stranger.sendall(b'{"token": "", "rank": 0}\n')
    assert stranger.recv(1) == b""
    for rank, connection in enumerate((first, second)):
        connection.sendall(f'{{"token": "{endpoint.token}", "rank": {rank}, "peer_timeout": 20}}\n'.encode())
    first.sendall(b'{"bye": true}\n')
    first.close()
    assert second.makefile().readline() == '{"gone": 0, "clean": true}\n'
    second.shutdown(socket.SHUT_RDWR)
    for connection in (stranger, second):
        connection.close()
    assert _refuses(address)


def test_the_relay_passes_on_what_is_said_and_hides_the_end_of_the_service():
    with socket.create_server(("localhost", 0)) as service:
        port = open_relay("localhost", service.getsockname()[1], 10.0)
        with socket.create_connection(("localhost", port), timeout=10) as client:
            there, _ = service.accept()
            client.sendall(b"question")
            assert there.recv(100) == b"question"
            there.sendall(b"answer")
            assert client.recv(100) == b"answer"
            there.close()
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(1)  # an end would be b""
        with socket.create_connection(("localhost", port), timeout=10) as client:
            there, _ = service.accept()
        with there:
            there.settimeout(10)
            assert there.recv(1) == b""  # the client's own end is passed on
    with socket.create_connection(("localhost", port), timeout=10) as client:
        assert _ends(client)  # nothing listens there any more


def test_who_has_lost_the_coordinator_names_the_ranks_of_its_host(fresh):
    call = runtime.watch(ProcessRing((1, 3), 0), "forward")
    fresh.cut_off, fresh.hosts = True, ["a", "b", "a", "b"]
    with pytest.raises(runtime.PeerFailure, match=r"has ended: it has died, or its whole host a \(global ranks 0, 2\) has died or"):
        call.__enter__()
    assert not call.overdue()
    time.sleep(0.03)
    assert call.overdue()
    fresh.hosts = ["a", "a"]
    assert peers.without_coordinator() == "the connection to the coordinator process beside global rank 0 has ended"


def test_an_error_inside_a_call_is_told_once_and_is_no_call_of_the_ring_any_more(fresh, monkeypatch):
    sent: list[dict] = []
    monkeypatch.setattr(peers, "send", sent.append)
    error = MemoryError("no room")
    with pytest.raises(MemoryError), runtime.watch(ProcessRing((0, 1), 0), "forward", "q"):
        raise error
    watchdog.tell_failure(ProcessRing((0, 1), 0), error)  # as around the whole call
    assert sent == [{"failed": {"ring": (0, 1), "number": 1, "error": "MemoryError: no room"}}]
    assert not fresh.calls[0, 1].recent


@pytest.fixture
def compared(fresh, monkeypatch):
    """The calls that are compared with those of other ranks, which make the same ones."""
    calls: list[str] = []

    def answer(message):
        if compare := message.get("compare"):
            calls.append(compare["call"])
            fresh.compared[compare["ring"], compare["number"]] = None

    monkeypatch.setattr(peers, "send", answer)
    return calls


def test_a_call_that_failed_elsewhere_fails_here_and_the_next_one_is_compared_once(fresh, compared):
    fresh.failed[(0, 1), 1] = "global rank 1 (ValueError: no)"
    with pytest.raises(ValueError, match=r"failed on global rank 1 \(ValueError: no\); here: forward step 1: q; every rank"):
        runtime.watch(ProcessRing((0, 1), 0), "forward", "q").__enter__()
    for number in (3, 4):
        with runtime.watch(ProcessRing((0, 1), 0), "forward", "q") as call:
            assert call.number == number
    assert compared == ["forward of q, after call 1, which failed"]
    assert not fresh.failed


def test_a_rank_whose_own_call_failed_compares_the_next_one(fresh, compared):
    watchdog.tell_failure(ProcessRing((0, 1), 0), ValueError("no"))
    fresh.failed[(0, 1), 7] = fresh.failed[(2, 3), 1] = "another one"  # a later call, and another ring's
    watchdog.compare(ProcessRing((0, 1), 0), "q")
    assert compared == ["q, after call 1, which failed", "q"]
    assert set(fresh.failed) == {((0, 1), 7), ((2, 3), 1)}


def test_a_rank_whose_device_is_in_a_call_that_failed_elsewhere_does_not_go_on(fresh, compared):
    event = Event()
    with runtime.watch(ProcessRing((0, 1), 0), "forward", "q") as call:
        call.event = event
    fresh.failed[(0, 1), call.number] = "global rank 1 (ValueError: no)"
    next_call = threading.Thread(target=watchdog.compare, args=(ProcessRing((0, 1), 0), "the next"), daemon=True)
    next_call.start()
    assert not call.overdue()
    next_call.join(0.1)
    assert not compared and call.overdue()  # its watchdog would end it now
    event.complete = True  # a program without transfers
    next_call.join(5)
    assert compared == ["the next, after call 1, which failed", "the next"]


def test_a_device_that_has_more_calls_to_make_after_one_that_failed_elsewhere_ends(fresh):
    for _ in range(2):
        with runtime.watch(ProcessRing((0, 1), 0), "forward") as call:
            call.event = Event()
    fresh.failed[(0, 1), 1] = "global rank 1 (ValueError: no)"
    assert not call.overdue()
    time.sleep(0.03)
    assert call.overdue() and "the call failed on global rank 1 (ValueError: no)" in call.describe()


def test_a_device_that_waits_for_a_call_that_failed_elsewhere_ends(fresh):
    with runtime.watch(ProcessRing((0, 1), 0), "forward") as call:
        call.event = Event()
    fresh.failed[(0, 1), call.number] = "global rank 1 (ValueError: no)"
    assert not call.overdue()  # a program without transfers ends by itself
    time.sleep(0.03)
    assert call.overdue()
    assert "the call failed on global rank 1 (ValueError: no)" in call.describe()


def test_a_report_says_what_this_process_does(fresh):
    fresh.left = time.monotonic() - 5
    ring = ProcessRing((0, 1), 0)
    idle = peers._report()
    assert 5 <= idle.idle < 6 and not idle.rings
    assert re.search(r"in no ring call for 5 s, now at .*peers.py:\d+ in _line_of_main", idle.place)
    with runtime.watch(ring, "forward", "q"):
        busy = peers._report()
    assert (busy.idle, busy.rings[0, 1].number, busy.rings[0, 1].last) == (0, 1, "forward step 1: q")
    assert (busy.rings[0, 1].waits or 0) > 0
    key = peers.mark_busy()
    assert peers._report().idle == 0
    peers.mark_idle(key)
    assert 0 < peers._report().idle < 1
    assert peers._report().rings[0, 1].waits is None


def _ends(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def _refuses(address: tuple[str, int]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address, timeout=1).close()
        except OSError:
            return True
        time.sleep(0.1)
    return False
