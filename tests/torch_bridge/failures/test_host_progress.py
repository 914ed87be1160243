"""For how long a host has been in a call, by the watchdog's beats."""

from threading import Event, Thread
from types import SimpleNamespace

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
