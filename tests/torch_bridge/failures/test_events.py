"""A driver that keeps whoever asks about an event, or lets go of one: it keeps no watchdog, and no listener."""

import threading
import time
from typing import NamedTuple

import pytest

from torch_bridge.failures import device_progress, events
from torch_bridge.failures.device_progress import DeviceProgress


class Driver:
    """One whose calls return when it is ``free``."""

    def __init__(self):
        self.free = threading.Event()

    def event(self, **keeps):
        driver = self

        class Event:
            def query(self):
                if keeps.get("query"):
                    driver.free.wait()
                return True

            def __del__(self):
                if keeps.get("destroy"):
                    driver.free.wait()

        return Event()


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(events, "_looks", events._Looks())
    driver = Driver()
    assert until(lambda: events.has_ended(driver.event()))
    monkeypatch.setattr(events, "ANSWERED", 0.1)
    yield driver
    driver.free.set()


def until(answer) -> bool:
    """Of a machine that is busy."""
    return any(answer() or time.sleep(0.01) for _ in range(1000))


def test_a_driver_that_does_not_answer(driver):
    kept = driver.event(query=True)
    assert not events.has_ended(kept)
    assert not events.has_ended(driver.event())  # nor does anybody else wait
    driver.free.set()
    assert until(lambda: events.has_ended(kept))


def test_a_driver_that_does_not_let_go_of_an_event(driver):
    assert until(lambda: events.has_ended(driver.event(destroy=True)))  # nobody else has it any more
    assert not any(events.has_ended(driver.event()) for _ in range(3))
    driver.free.set()
    assert until(lambda: events.has_ended(driver.event()))


class Call(NamedTuple):
    begun: float
    number: int


@pytest.mark.parametrize("keeps", ["query", "destroy"])
def test_a_device_whose_driver_keeps_everybody_is_told_within_the_limit(driver, keeps, monkeypatch):
    """As two GPUs did: a copy to the host kept the driver, and the watchdog was in it when it should have spoken."""
    now = 0.0
    monkeypatch.setattr(device_progress.time, "monotonic", lambda: now)
    progress = DeviceProgress(100.0)
    for number in range(3):
        progress.launched(Call(now, number), driver.event(**{keeps: True}))
    for _ in range(240):
        now += 0.5
        progress.beat()
    stalled = progress.stalled()
    driver.free.set()  # before this process lets go of them
    assert stalled is not None and stalled.seconds >= 100
    assert stalled.call.number == (0 if keeps == "query" else 1)
