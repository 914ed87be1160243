"""What is known of a device from the events of its calls, at a watchdog's beat of half a second and a limit of 600."""

from typing import NamedTuple

import pytest

from torch_bridge.failures import device_progress
from torch_bridge.failures.device_progress import DeviceProgress

LIMIT, BEAT = 600.0, 0.5


class Call(NamedTuple):
    begun: float
    number: int


class Clock:
    """Time as the watchdog sees it, and the device's events by it."""

    def __init__(self, monkeypatch):
        self.now: float = 0.0
        self.looks: set[float] = set()
        monkeypatch.setattr(device_progress.time, "monotonic", lambda: self.now)
        self.progress = DeviceProgress(LIMIT)

    def event(self, ends: float):
        clock = self

        class Event:
            def query(self):
                clock.looks.add(clock.now)
                return clock.now >= ends

        return Event()

    def launch(self, number: int, ends: float) -> None:
        self.progress.launched(Call(self.now, number), self.event(ends))

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / BEAT)):
            self.now += BEAT
            self.progress.beat()


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_call_that_never_ends_is_found_within_an_eighth_of_the_limit(clock):
    clock.launch(7, float("inf"))
    clock.pass_time(LIMIT)
    assert clock.progress.stalled() is None
    clock.pass_time(LIMIT / 8)
    assert clock.progress.stalled().call.number == 7
    assert clock.progress.stalled().seconds >= LIMIT


@pytest.mark.parametrize("lead", [0.0, 300.0], ids=["no lead", "the host five minutes ahead"])
def test_a_device_that_makes_one_call_after_the_other_is_at_no_fault(clock, lead):
    for number in range(4000):
        clock.launch(number, clock.now + lead + 1)
        clock.pass_time(1)
        assert clock.progress.stalled() is None
    assert len(clock.progress._launched) <= 256
    assert len(clock.looks) < 4000 / 50  # CUDA forbids them while a graph is captured


@pytest.mark.parametrize("calls", [40, 300])  # a queue of CUDA has about a thousand kernels
def test_many_calls_that_were_launched_at_once_may_take_any_time_together(clock, calls):
    for number in range(calls):
        clock.launch(number, (number + 1) * 30.0)
    for _ in range(calls):
        clock.pass_time(30)
        assert clock.progress.stalled() is None
    clock.pass_time(LIMIT)
    assert not clock.progress._launched


def test_the_call_is_named_in_which_a_busy_device_stops(clock):
    for number in range(100):
        clock.launch(number, clock.now + 1 if number < 50 else float("inf"))
        clock.pass_time(1)
    clock.pass_time(LIMIT * 1.25)
    assert clock.progress.stalled().call.number == 50


def test_the_last_call_of_all_is_watched_too(clock):
    clock.launch(1, 1.0)
    clock.pass_time(2)
    clock.launch(2, float("inf"))
    clock.pass_time(LIMIT * 1.5)
    assert clock.progress.stalled().call.number == 2


def test_one_long_call_is_no_fault_and_neither_is_an_idle_device(clock):
    clock.launch(1, LIMIT * 0.95)
    clock.pass_time(LIMIT * 3)
    assert clock.progress.stalled() is None and not clock.progress._launched


def test_a_process_that_was_stopped_has_not_waited(clock):
    clock.launch(1, 10 * LIMIT)
    clock.pass_time(100)
    clock.now += 5 * LIMIT
    clock.pass_time(100)
    assert clock.progress.stalled() is None


def test_a_device_in_error_does_nothing_any_more(clock):
    class Broken:
        def query(self):
            raise RuntimeError("CUDA error")

    clock.progress.launched(Call(0.0, 1), Broken())
    clock.pass_time(3 * LIMIT)
    assert clock.progress.stalled() is None
