"""A driver that keeps whoever asks about an event, or lets go of one: it keeps no watchdog, and no listener."""

import threading
import time
from types import SimpleNamespace

import pytest

from torch_bridge.failures import device_progress, events, peers
from torch_bridge.failures.device_progress import DeviceProgress
from torch_bridge.failures.watchdog import watch
from torch_bridge.mesh.rings import ProcessRing


class Driver:
    """One whose calls return when it is ``free``."""

    def __init__(self):
        self.free = threading.Event()
        self.alive = 0

    def event(self, query=False, destroy=False):
        driver = self
        driver.alive += 1

        class Event:
            def query(self):
                if query:
                    driver.free.wait()
                return True

            def __del__(self):
                if destroy:
                    driver.free.wait()
                driver.alive -= 1

        return Event()


@pytest.fixture
def driver(monkeypatch):
    for name in ("_asking", "_letting_go"):
        monkeypatch.setattr(events, name, events._Worker(f"{name} of a test"))
    monkeypatch.setattr(events, "_patience", events._Patience())
    driver = Driver()
    yield driver
    driver.free.set()


def until(answer) -> bool:
    """Of a machine that is busy."""
    return any(answer() or time.sleep(0.01) for _ in range(1000))


def test_a_driver_that_does_not_answer(driver):
    kept, other = driver.event(query=True), driver.event()
    assert until(lambda: events.has_ended(other))
    assert not events.has_ended(kept)
    begun = time.monotonic()
    assert not any(events.has_ended(other) for _ in range(1000))  # nobody waits any more
    assert time.monotonic() - begun < 1000 * events.ANSWER_WITHIN / 10
    driver.free.set()
    assert until(lambda: events.has_ended(kept)) and until(lambda: events.has_ended(other))


def test_a_driver_that_does_not_let_go_of_an_event_may_answer(driver):
    for _ in range(3):
        events.let_go(driver.event(destroy=True))
    assert until(lambda: events.has_ended(driver.event()))
    driver.free.set()
    assert until(lambda: driver.alive == 0)


def test_of_several_events_those_count_that_lead(driver):
    ended, not_yet = driver.event(), SimpleNamespace(query=lambda: False)
    questions = [events.ask(asked) for asked in ([ended, ended, not_yet, ended], [not_yet], [])]
    assert all(question.answered.wait(60) for question in questions)
    assert [question.ended for question in questions] == [2, 0, 0]


def test_what_is_let_go_of_has_its_end_on_another_thread(driver):
    threads = []

    class Event:
        def __del__(self):
            threads.append(threading.current_thread().name)

    pair = [("a call", Event())]
    events.let_go(pair)
    del pair
    assert until(lambda: threads) and threads == ["_letting_go of a test"]


def call(ring: ProcessRing, number: int) -> watch:
    call = watch(ring, "forward", limited=True)
    call.number = number
    return call


@pytest.mark.parametrize("keeps", ["query", "destroy"])
def test_a_device_whose_driver_keeps_everybody_is_told_within_the_limit(driver, keeps, monkeypatch):
    """As two GPUs did: a copy to the host kept the driver, and the watchdog was in it when it should have spoken."""
    now = 0.0
    monkeypatch.setattr(device_progress.time, "monotonic", lambda: now)
    monkeypatch.setattr(device_progress, "ANSWER_WITHIN", 0.05)
    progress = DeviceProgress(100.0)
    for number in range(3):
        progress.launched(call(ProcessRing((0, 1), 0), number), driver.event(**{keeps: True}))
    progress.launched(call(ProcessRing((0, 1), 0), 3), driver.event(query=True))
    for _ in range(240):
        now += 0.5
        progress.beat()
    stalled = progress.stalled()
    driver.free.set()  # before this process lets go of them
    assert stalled is not None and stalled.seconds >= 100
    assert stalled.call.number == (0 if keeps == "query" else 3)


def test_an_answer_that_comes_late_counts(driver, monkeypatch):
    """As on a host whose threads wait for one another."""
    now = 0.0
    monkeypatch.setattr(device_progress.time, "monotonic", lambda: now)
    progress = DeviceProgress(100.0)
    progress.launched(call(ProcessRing((0, 1), 0), 1), driver.event(query=True))
    for _ in range(30):
        now += 0.5
        progress.beat()
    assert progress.behind() and progress.lasting() is None
    driver.free.set()
    now += 0.5
    progress.beat()
    assert not progress.behind()


def test_a_call_that_is_over_keeps_no_event(driver, monkeypatch):
    """Its pair with the call does, which is let go of."""
    monkeypatch.setattr(peers, "state", peers.State())
    ring = ProcessRing((0, 1), 0)
    with watch(ring, "forward") as made:
        made.event = driver.event()
    ((known, event),) = peers.state.launched.values()
    assert known is made and made.event is None and event is not None


def test_a_process_whose_driver_is_kept_answers_the_others_in_time(driver, monkeypatch):
    state = peers.State()
    monkeypatch.setattr(peers, "state", state)
    for rank in (1, 2):
        ring = ProcessRing((0, rank), 0)
        state.calls[ring.ranks].number = 1
        state.launched[ring.ranks] = call(ring, 1), driver.event(query=True)
    begun = time.monotonic()
    report = peers._report()
    taken = time.monotonic() - begun
    driver.free.set()
    assert all(ring.waits is not None for ring in report.rings.values()) and len(report.rings) == 2
    assert taken < peers.coordinator.ANSWER_TIME
