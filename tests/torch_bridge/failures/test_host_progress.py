"""For how long a host has been in a call, by the watchdog's beats."""

from threading import Event, Thread
from types import SimpleNamespace

from torch_bridge.failures import peers
from torch_bridge.failures.host_progress import HostProgress

CALL, OTHER = SimpleNamespace(number=7), SimpleNamespace(number=8)


def test_a_call_that_the_host_stays_in_is_found():
    host = HostProgress(limit=10.0)
    for _ in range(10):
        host.beat(1.0, [CALL])
        assert host.stalled() is None
    host.beat(1.0, [CALL, OTHER])
    assert host.stalled() == (CALL, 10.0)


def test_one_call_after_another_is_none():
    host = HostProgress(limit=3.0)
    for call in [CALL, OTHER] * 10:
        host.beat(1.0, [call])
        assert host.stalled() is None
    host.beat(1.0, [])
    assert host.stalled() is None


def test_what_is_compiled_does_not_count():
    host = HostProgress(limit=3.0)
    with host.compiling():
        with host.compiling():  # a thread ahead of the call
            host.beat(1.0, [CALL])
        for _ in range(9):
            host.beat(1.0, [CALL])
    for _ in range(2):
        host.beat(1.0, [CALL])
        assert host.stalled() is None
    host.beat(1.0, [CALL])
    assert host.stalled() == (CALL, 3.0)


def test_it_is_asked_while_a_beat_comes():
    host, over = HostProgress(limit=0.0), Event()

    def beats():
        while not over.is_set():
            host.beat(1.0, [SimpleNamespace(number=1)])

    (beating := Thread(target=beats)).start()
    try:
        for _ in range(20_000):
            host.stalled()
    finally:
        over.set()
        beating.join()


def test_a_host_that_waits_for_its_device_is_not_in_a_call_too_long(monkeypatch):
    """As where memory is freed, or a queue is full: the device goes on, and is watched itself."""
    monkeypatch.setattr(peers, "state", state := peers.State())
    state.host.limit, ended = 0.0, Event()
    state.active[0] = SimpleNamespace(limited=True)
    peers._beat()
    assert state.host.stalled() is not None
    state.device.launched(CALL, SimpleNamespace(query=ended.is_set))
    peers._beat()
    assert state.host.stalled() is None
    ended.set()
    state.device._poll()
    peers._beat()
    assert state.host.stalled() is not None
    state.active[0] = SimpleNamespace(limited=False)
    peers._beat()
    assert state.host.stalled() is None
