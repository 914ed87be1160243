"""Which rings can never go on: deadlocked_rings on reports as ranks make them."""

import json

import pytest

from torch_bridge.failures.deadlock import (
    RankStatus,
    RingStatus,
    Stalled,
    asked_for,
    crossed_rings,
    deadlocked_rings,
    named,
    stalled_rings,
)

LIMIT = 20.0
PAIR, OTHER = (0, 1), (1, 2)


def status(number: int, waits: float | None, asked: str = "same") -> RingStatus:
    return RingStatus(number, waits, {earlier: asked if earlier == number else "same" for earlier in range(1, number + 1)}, asked)


def report(idle: float = 0.0, **rings: RingStatus) -> RankStatus:
    names = {"pair": PAIR, "other": OTHER}
    return RankStatus(LIMIT, idle, f"idle for {idle:g} s", {names[name]: own for name, own in rings.items()})


FINE = {
    "all in one long call": {0: report(pair=status(3, 600.0)), 1: report(pair=status(3, 599.0))},
    "one is computing an earlier call": {0: report(pair=status(4, 600.0)), 1: report(pair=status(3, 610.0))},
    "one compiles": {0: report(pair=status(3, 600.0)), 1: report(pair=status(2, None))},
    "a short pause": {0: report(pair=status(3, 600.0)), 1: report(14.0, pair=status(2, None))},
    "a short wait for an idle rank": {0: report(pair=status(3, 14.0)), 1: report(600.0, pair=status(2, None))},
    "nobody waits": {0: report(600.0, pair=status(3, None)), 1: report(600.0)},
    "waits for a rank that is busy in another ring": {
        0: report(pair=status(1, 60.0)),
        1: report(other=status(1, 60.0)),
        2: report(other=status(1, 60.0)),
    },
    "a call differs that has just begun": {0: report(pair=status(3, 1.0, "a")), 1: report(pair=status(3, 1.0, "b"))},
    "a rank that has gone": {0: report(pair=status(3, 600.0))},
}


@pytest.mark.parametrize("reports", FINE.values(), ids=FINE)
def test_whoever_can_go_on_does(reports):
    assert deadlocked_rings(reports) == {}


STUCK = {
    "an idle rank": ({0: report(pair=status(3, 16.0)), 1: report(16.0, pair=status(2, None))}, {PAIR: "global rank 1 did not"}),
    "a rank that never called": ({0: report(pair=status(1, 16.0)), 1: report(16.0)}, {PAIR: "global rank 1 did not come"}),
    "calls that differ": (
        {0: report(pair=status(3, 6.0, "causal")), 1: report(pair=status(3, 6.0))},
        {PAIR: "have made call 3 differently"},
    ),
    "calls that differed before": (
        {0: report(pair=status(3, 6.0, "causal")), 1: report(pair=status(4, 6.0))},
        {PAIR: "have made call 3 differently"},
    ),
    "calls that differed and have ended, with nobody waiting": (
        {0: report(pair=status(3, None, "backward")), 1: report(pair=status(5, 0.1))},
        {PAIR: "have made call 3 differently"},
    ),
    "two rings in two orders": (
        {0: report(pair=status(1, 60.0)), 1: report(other=status(1, 60.0)), 2: report(60.0)},
        {PAIR: "global rank 1 did not come", OTHER: "global rank 2 did not come"},
    ),
}


@pytest.mark.parametrize(("reports", "expected"), STUCK.values(), ids=STUCK)
def test_whoever_cannot_go_on_is_found(reports, expected):
    found = deadlocked_rings(reports)
    assert found.keys() == expected.keys()
    assert all(words in found[ring] for ring, words in expected.items())


def test_calls_that_crossed_are_those_that_have_ended():
    differs, same = status(3, None, "backward"), status(5, 0.1)
    assert crossed_rings({0: report(pair=differs), 1: report(pair=same)}) == {PAIR: "its ranks have made call 3 differently"}
    assert crossed_rings({0: report(pair=status(3, 0.1, "backward")), 1: report(pair=same)}) == {}  # a comparison, perhaps


def test_a_circle_of_waiting_ranks_is_found():
    def cross(own: tuple[int, int, int]) -> RankStatus:
        return RankStatus(LIMIT, 0.0, "", {own: RingStatus(1, 60.0, {1: "same"}, "q")})

    first, second = (0, 1, 2), (1, 0, 2)  # two groups of the same ranks, called in two orders
    assert set(deadlocked_rings({0: cross(first), 1: cross(second)})) == {first, second}


STALLED = Stalled(PAIR, 3, "forward step 2: a call", 1801.0, 600.0)


def given(launched: int, stalled: Stalled | None = None, since: float = 600.0) -> RankStatus:
    """Of a rank in call 4, whose device was given the ``launched`` first ones."""
    return report(pair=status(4, 600.0)._replace(launched=launched, since=since))._replace(stalled=stalled)


@pytest.mark.parametrize("other", [given(3), given(4, STALLED)], ids=["at its end", "as well"])
def test_a_device_that_does_not_finish_is_named(other):
    found = stalled_rings({0: other, 1: given(3, STALLED), 2: report(600.0)})
    assert list(found) == [PAIR]
    assert found[PAIR].endswith("has not finished call 3, forward step 2: a call, nor any other for 1801 s")


IN_HOST = Stalled(PAIR, 4, "forward step 3: a call", 601.0, 600.0, in_host=True)


def test_a_host_that_does_not_give_its_device_a_call_is_named():
    found = stalled_rings({0: given(3, IN_HOST), 1: given(4)})
    assert found[PAIR].endswith("host of global rank 0 has been in call 4, forward step 3: a call, for 601 s, and compiles nothing")
    assert PAIR in stalled_rings({0: given(3, IN_HOST), 1: given(3, IN_HOST)})
    assert PAIR in stalled_rings({0: given(3, IN_HOST), 1: given(4, STALLED._replace(number=4))})
    assert stalled_rings({0: given(3, IN_HOST), 1: given(3)}) == {}, "the other compiles"


@pytest.mark.parametrize(
    "reports",
    [{1: given(2)}, {1: given(3, since=599.0)}, {1: report(600.0)}, {}],
    ids=["compiles", "has come just now", "never called", "does not answer"],
)
def test_no_device_is_at_fault_that_waits_for_a_rank(reports):
    assert stalled_rings({0: given(3, STALLED), **reports}) == {}


@pytest.mark.parametrize("stalled", [None, STALLED, STALLED._replace(in_host=True)])
def test_a_report_survives_the_connection(stalled):
    sent = report(3.0, pair=status(2, 1.5))._replace(stalled=stalled)
    assert RankStatus.from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_ranks_that_say_the_same_are_named_together():
    reports = {0: report(pair=status(2, 3.0)), 1: report(pair=status(2, 4.0)), 2: report(9.0)}
    assert asked_for((0, 1), reports) == "global ranks 0-1: in call 2, same"
    assert asked_for((1, 2), reports | {1: report(9.0, other=status(1, None))}) == (
        "global rank 1: call 1, same, which has ended; idle for 9 s; global rank 2: never called this ring; idle for 9 s"
    )
    assert named([5, 0, 1, 2]) == "global ranks 0-2, 5"
