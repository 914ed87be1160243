"""Rings over two hosts of four processes, which reach each other by address alone, and what is left when one of them is lost."""

import re
import sys
import time
from subprocess import Popen

import pytest
from launch import BUFFERED, QUICK_COMPILE, WORKERS, environment
from strategy_cases import write
from two_hosts import INTERFACE, Host, refusal, two_hosts

PEER_TIMEOUT = 12
TO_END = 6  # what eight processes need to end once they were told, on two cores that others use too
GPUS = 4  # processes on a host
FIRST_PORT = 29400

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(refusal()), reason=refusal())]


@pytest.fixture
def hosts():
    with two_hosts() as pair:
        yield pair


def torchrun(hosts: tuple[Host, Host], worker: str, *arguments: str) -> list["Popen[str]"]:
    """One torchrun for each host, as a user would start them."""
    started = []
    for node, host in enumerate(hosts):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={GPUS}", f"--node-rank={node}"]
        command += [f"--master-addr={hosts[0].address}", f"--master-port={FIRST_PORT}", *BUFFERED]
        command += [str(WORKERS / worker), *arguments]
        started.append(host.start(command, environment(GLOO_SOCKET_IFNAME=INTERFACE, XLA_FLAGS=QUICK_COMPILE)))
    return started


def every_rank(hosts: tuple[Host, Host], worker: str, *arguments: str) -> list["Popen[str]"]:
    """Every rank without torchrun, which would itself end the survivors of a loss."""
    world = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(FIRST_PORT), "WORLD_SIZE": str(2 * GPUS)}
    command = [sys.executable, str(WORKERS / worker), *arguments]
    return [
        host.start(
            command,
            environment(**world, RANK=str(GPUS * node + local), LOCAL_RANK=str(local), GLOO_SOCKET_IFNAME=INTERFACE),
        )
        for node, host in enumerate(hosts)
        for local in range(GPUS)
    ]


@pytest.mark.costly
def test_strategies_over_two_hosts_under_torchrun(hosts, tmp_path):
    """The output, the LSE and every gradient are the oracle's, in float64."""
    runs = ["ring:window:striped:ab", "hierarchical:window:zigzag:ab"]
    write(tmp_path / "cases.pt")
    running = torchrun(hosts, "strategies_worker.py", str(tmp_path / "cases.pt"), "cpu", "float64", f"2x{GPUS}", *runs)
    said = [process.communicate(timeout=480) for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    assert all(said[0][0].count(f"ok {run}\n") == GPUS for run in runs), said[0]


LISTENING = """
from pathlib import Path
from torch_bridge.failures import addresses, coordinator
listens, reached = addresses.meeting_place({name!r}, ["a", "b"])
coordinator.launch(1, 5.0, listens)
tables = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()[1:]]
print(reached, sorted({{words[1].split(":")[0][-8:] for words in tables if words[3] == "0A"}}))
"""


@pytest.mark.parametrize(("name", "where"), [("10.77.0.1", "01004D0A"), ("east", "00000000")])
def test_the_coordinator_listens_where_the_other_host_reaches_it(hosts, name, where):
    """The name "east" means 127.0.1.1 on its own host."""
    said, errors = hosts[0].start([sys.executable, "-c", LISTENING.format(name=name)], environment()).communicate(timeout=30)
    assert said == f"{name} ['{where}']\n", errors


@pytest.mark.parametrize(
    ("lost", "how"),
    [pytest.param(0, "kill", id="the coordinator's host is killed"), pytest.param(1, "unplug", id="the cable is pulled")],
)
def test_a_lost_host_ends_the_other_within_the_limit_and_is_named(hosts, lost, how):
    running = every_rank(hosts, "lost_host.py", str(PEER_TIMEOUT))
    for process in running:
        assert any(line == "turns\n" for line in process.stdout), process.stderr.read()
    begun = time.monotonic()
    getattr(hosts[lost], how)()
    ends = [process.communicate(timeout=60) for process in running]
    took = time.monotonic() - begun
    assert took < PEER_TIMEOUT + TO_END, took
    ranks = range(GPUS * 2)
    beside, apart = [process.returncode for process in running[:GPUS]], [process.returncode for process in running[GPUS:]]
    assert beside == [-9] * GPUS if how == "kill" else min(beside) > 0, ends
    assert min(apart) > 0, ends  # neither success, nor a signal such as JAX's abort
    for rank in ranks[GPUS:]:
        assert "its whole host east (global ranks 0-3) has died or cannot be reached" in ends[rank][1], ends[rank]
    for rank in ranks[:GPUS] if how == "unplug" else ():
        gone = re.findall(r"(\d) \(died\)", ends[rank][1])  # in order: a late rank sees its neighbours end, too
        assert gone[0] in "4567" and {"4", "5", "6", "7"} <= set(gone), ends[rank]
    assert not any("Check failure" in errors for _, errors in ends)
