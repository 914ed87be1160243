"""The coordinator's port: whoever connects and whatever is sent, the job goes on."""

import json
import math
import re
import socket
import threading
from contextlib import ExitStack, contextmanager

import pytest

from torch_bridge.failures import addresses, coordinator, peers

TOKEN = "a token"
HELLO = {"token": TOKEN, "rank": 0, "peer_timeout": 20}


class Line:
    """One connection to the coordinator."""

    def __init__(self, address, rank=None):
        self.socket = socket.create_connection(address, timeout=10)
        self.lines = self.socket.makefile("rb")
        if rank is not None:
            self.send(HELLO | {"rank": rank})

    def close(self):
        self.lines.close()
        self.socket.close()

    def send(self, message):
        self.raw(json.dumps(message).encode() + b"\n")

    def raw(self, data):
        self.socket.sendall(data)

    def hears(self):
        return json.loads(self.lines.readline())

    def ends(self):
        """Whether the coordinator closes it, with nothing left to read."""
        try:
            return self.lines.readline() == b""
        except ConnectionResetError:  # it had not read everything
            return True


class Served:
    """A coordinator in a thread of this process: its connections, and what it died of."""

    def __init__(self, listener, world, stack):
        self.address, self.world, self.stack, self.died = listener.getsockname(), world, stack, []
        self.exchange = coordinator.Exchange(listener, TOKEN, world)

    def serve(self):
        try:
            self.exchange.serve(10.0)
        except Exception as error:
            self.died.append(error)

    def connect(self, rank=None):
        line = Line(self.address, rank)
        self.stack.callback(line.close)
        return line


@contextmanager
def serving(world=2):
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        served = Served(listener, world, stack)
        thread = threading.Thread(target=served.serve, daemon=True)
        thread.start()
        yield served
        stack.close()
        thread.join(10)
        assert not thread.is_alive()
        for peer in served.exchange.connections.values():
            peer.connection.close()


def still_works(*ranks, leave=True):
    """Both ranks compare a call, and leave."""
    for line in ranks:
        line.send({"compare": {"ring": [0, 1], "number": 1, "call": "q"}})
    for line in ranks:
        assert line.hears() == {"compared": {"ring": [0, 1], "number": 1, "calls": None}}
    for line in ranks if leave else ():
        line.send({"bye": True})
        assert line.hears() == {"bye": True}
    for line in ranks if leave else ():
        line.socket.shutdown(socket.SHUT_WR)


STRANGERS = {
    "deep JSON": b"[" * 3000 + b"\n",
    "a long line": b" " * 5000 + json.dumps(HELLO).encode() + b"\n",
    "a line without an end": b"x" * 5000,
    "no JSON": b"GET / HTTP/1.1\r\n\r\n",
    "no UTF-8": b"\xff\xfe\n",
    "no object": b"[]\n",
    "another token": json.dumps(HELLO | {"token": "\u00e9"}).encode() + b"\n",
    "an infinite rank": json.dumps(HELLO | {"rank": math.inf}).encode() + b"\n",
    "half a rank": json.dumps(HELLO | {"rank": 0.5}).encode() + b"\n",
    "a rank that is true": json.dumps(HELLO | {"rank": True}).encode() + b"\n",
    "a rank of no one": json.dumps(HELLO | {"rank": 2}).encode() + b"\n",
    "a timeout that never comes": json.dumps(HELLO | {"peer_timeout": math.inf}).encode() + b"\n",
}


def test_what_a_stranger_sends_ends_its_own_connection_and_no_other():
    with serving() as job:
        for sent in STRANGERS.values():
            stranger = job.connect()
            stranger.raw(sent)
            if TOKEN.encode() in sent and len(sent) < 1000:
                assert "ends" in stranger.hears()  # it knows the token, so it is told why
            assert stranger.ends(), sent
        still_works(job.connect(0), job.connect(1))
    assert not job.died


def test_a_connection_that_stays_silent_is_closed(monkeypatch):
    monkeypatch.setattr(coordinator, "HELLO_TIME", 0.2)
    with serving() as job:
        silent = job.connect()
        silent.raw(b"{")
        assert silent.ends()
        still_works(job.connect(0), job.connect(1))


def test_a_second_connection_of_a_rank_is_refused():
    with serving() as job:
        first = job.connect(0)
        first.send({"waits": 1.0})
        assert "ask" in first.hears()  # it is known
        second = job.connect(0)
        assert "global rank 0 has a connection already" in second.hears()["ends"]
        assert second.ends()
        still_works(first, job.connect(1))


@pytest.mark.parametrize(
    "sent",
    [b"[" * 3000, b'{"compare": 3}', b'{"waits": "long"}', b'{"ask": 1, "report": {"limit": 1}}', b"no JSON"],
    ids=lambda sent: sent.decode()[:20],
)
def test_what_a_rank_sends_ends_its_own_connection_and_it_is_told_why(sent):
    with serving(3) as job:
        broken, *others = (job.connect(rank) for rank in (2, 0, 1))
        broken.raw(sent + b"\n")
        assert "the coordinator could not take what it sent" in broken.hears()["ends"]
        assert broken.ends()
        for line in others:
            assert line.hears() == {"gone": 2, "clean": False}
        still_works(*others)
    assert not job.died


def test_a_line_of_a_rank_is_bounded_too(monkeypatch):
    monkeypatch.setattr(coordinator, "LONGEST_LINE", 10_000)
    with serving(1) as job:
        line = job.connect(0)
        line.raw(b'{"failed": "' + b"x" * 9000 + b'"')
        line.raw(b"x" * 9000)
        assert "more than 10000 bytes" in line.hears()["ends"]
    assert not job.died


def test_what_the_coordinator_dies_of_reaches_the_ranks(monkeypatch):
    def fail(*_):
        raise RecursionError("too deep")

    monkeypatch.setattr(coordinator, "deadlocked_rings", fail)
    monkeypatch.setattr(coordinator, "ANSWER_TIME", 0.1)
    with serving() as job:
        ranks = [job.connect(rank) for rank in (0, 1)]
        still_works(*ranks, leave=False)  # both are known
        ranks[0].send({"waits": 1.0})
        for line in ranks:
            assert "ask" in line.hears()
            assert "RecursionError: too deep (coordinator.py:" in line.hears()["ends"]
    assert isinstance(job.died[0], RecursionError)


def test_of_a_rank_that_has_never_answered_nobody_says_what_it_called(monkeypatch):
    monkeypatch.setattr(coordinator, "ANSWER_TIME", 0.1)
    with serving() as job:
        waiting, stopped = job.connect(0), job.connect(1)
        still_works(waiting, stopped, leave=False)
        waiting.send({"waits": 1.0})
        call = [[0, 1], [3, 9.0, {}, "forward step 3", 0, 0.0]]
        waiting.send(
            {"ask": waiting.hears()["ask"], "report": {"limit": 0.1, "idle": 0.0, "place": "", "rings": [call], "stalled": None}}
        )
        words = waiting.hears()["stuck"]["words"]
        assert re.search(r"; global rank 1: has not answered for \d s: is its process stopped\?\. Every rank of a ring", words), (
            words
        )
        assert "global rank 0: in call 3, forward step 3" in words and "never called" not in words


def test_it_listens_at_its_address_alone():
    endpoint = coordinator.launch(1, 20.0, "127.0.0.1")
    line = Line(("127.0.0.1", endpoint.port))
    line.send(HELLO | {"token": endpoint.token})  # with whom it ends
    for port in (endpoint.port, endpoint.service_port):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=10)
    line.close()


NAMES = {"debian": "127.0.1.1", "in front": "192.0.2.1", "any": "0.0.0.0"}


def test_ranks_of_one_host_meet_on_loopback_and_others_at_the_address_of_the_first(monkeypatch):
    look_up = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *rest, **more: look_up(NAMES.get(name, name), *rest, **more))
    assert addresses.meeting_place("in front", ["a", "a"]) == ("127.0.0.1", "127.0.0.1")
    for name in ("debian", "in front", "any", "no such name."):
        assert addresses.meeting_place(name, ["a", "b"]) == (addresses.ALL, name)
    monkeypatch.setattr(addresses, "listen", lambda address: socket.socket())  # whatever address, it is this host's
    assert addresses.meeting_place("in front", ["a", "b"]) == ("192.0.2.1", "192.0.2.1")
    assert addresses.loopback() == addresses.loopback() != ""


def test_why_the_connection_ended_is_in_the_message(monkeypatch):
    monkeypatch.setattr(peers, "state", peers.State(hosts=["a", "a"]))
    peers._note({"ends": "RecursionError: too deep"})
    words = "the connection to the coordinator process beside global rank 0 has ended (RecursionError: too deep)"
    assert peers.without_coordinator() == words
