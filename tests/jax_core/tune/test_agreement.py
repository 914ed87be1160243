"""One process decides, and the others follow."""

import json
import threading
import time
from types import SimpleNamespace

import jax
import pytest
from launch import torchrun

from jax_core.tune import agreement


class Store:
    """A coordination service's store, as JAX's client shows it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        with self.changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: Config key {key} already exists.")
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key}")
            return self.values[key]


def test_a_process_alone_decides():
    assert agreement.agreed("a key", lambda: "mine") == "mine"


def test_the_first_decides_and_the_others_wait_for_it():
    client, asked, answers = Store(), [], []

    def ask(number: int) -> None:
        def decide() -> str:
            asked.append(number)
            time.sleep(0.2)
            return f"of {number}"

        answers.append(agreement._first_decides(client, "a key", decide, 30))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(asked) == 1 and answers == [f"of {asked[0]}"] * 4
    assert agreement._first_decides(client, "another key", lambda: "new", 30) == "new"


def test_the_first_asks_again_and_gets_its_own_answer():
    client = Store()
    answers = [agreement._first_decides(client, "a key", lambda answer=answer: answer, 1) for answer in ("first", "second")]
    assert answers == ["first", "first"]


def test_an_empty_answer_is_an_answer():
    client = Store()
    assert (
        agreement._first_decides(client, "a key", lambda: "", 1) == agreement._first_decides(client, "a key", lambda: "x", 1) == ""
    )


def test_a_decision_that_fails_keeps_nobody_waiting():
    client = Store()
    with pytest.raises(ZeroDivisionError):
        agreement._first_decides(client, "a key", lambda: str(1 // 0), 30)
    with pytest.raises(RuntimeError, match="failed while it chose the configuration of a key"):
        agreement._first_decides(client, "a key", lambda: "mine", 30)


def test_a_decision_that_does_not_come_ends_the_wait():
    client = Store()
    client.key_value_set("ring_attn/tune/a key/by", "3")
    with pytest.raises(RuntimeError, match=r"process 3 was to choose the configuration of a key, and did not in 0\.05 s"):
        agreement._first_decides(client, "a key", lambda: "mine", 0.05)


def test_other_errors_of_the_service_are_raised():
    def broken(key: str, value: str) -> None:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: connection refused")

    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        agreement._first_decides(SimpleNamespace(key_value_set=broken), "a key", lambda: "mine", 1)


@pytest.mark.slow
def test_ranks_with_different_caches_compute_with_one_configuration(tmp_path):
    torchrun("tuned_worker.py", 2, str(tmp_path))
    told = {name: [json.loads((tmp_path / f"{name} {rank}").read_text()) for rank in (0, 1)] for name in ("cached", "autotuned")}
    for blocks, other in told.values():
        assert blocks == other and blocks in ([[16, 32]], [[32, 16]])
    searcher = int((tmp_path / "searched").read_text())
    assert told["autotuned"][0] == [[[16, 32]], [[32, 16]]][searcher]
