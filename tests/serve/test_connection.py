"""Clients that send or read slowly, or not at all, and too many of them: their connections end, others are served."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from functools import partial
from http.client import HTTPResponse
from threading import Thread
from typing import Any

import pytest
import uvicorn

from ragjax import core
from ragjax.serve.server import Connection, Drain, Limits
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, Served, serving, wait_for, written

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 200\r\n"
LENGTH = b"content-length: 200\r\n"
LIMIT = Limits().timeout


@pytest.fixture
def asyncio_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers run in asyncio's own loop, whose clock can be put forward; uvloop's cannot."""
    monkeypatch.setattr(uvicorn, "Config", partial(uvicorn.Config, loop="asyncio"))


@pytest.fixture
def timed(asyncio_loop: None) -> Iterator[Timed]:
    drain = Drain()
    with serving(FakeEngine(), drain=drain) as served:
        yield Timed(served, drain)


class Timed:
    """A server whose time a test has pass: a client that is held up is not late before it does."""

    def __init__(self, served: Served, drain: Drain):
        self.served, self.drain, self.ahead = served, drain, 0.0
        self.loop = served.server.servers[0].get_loop()
        real = self.loop.time
        self.loop.time = lambda: real() + self.ahead

    def theirs(self, client: socket.socket) -> Connection | None:
        """The server's end of a connection."""
        there = list(self.served.server.server_state.connections)
        return next((one for one in there if one.client == client.getsockname()), None)

    def has_begun(self, client: socket.socket) -> bool:
        """Whether a part of a request has arrived, and its time runs."""
        one = self.theirs(client)
        if one is None or one.cycle is None:
            return one is not None and bool(one.conn.trailing_data[0])
        return one.cycle.response_complete or self.drain.serving > 0

    def passes(self, seconds: float) -> None:
        """The server's time goes on by so much."""

        def go_on() -> None:
            self.ahead += seconds

        self.loop.call_soon_threadsafe(go_on)


def until_closed(connection: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    parts = []
    with suppress(ConnectionError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def refused(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of a response, which must be the only one."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert re.search(rb"x-request-id: [0-9a-f]{32}", head)
    assert answer.count(b"HTTP/1.1") == 1 and b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


@contextmanager
def counted(served: Served, **expected: int) -> Iterator[None]:
    """Within it the server ends so many connections, by reason, and no others."""
    before = ended(served)
    yield
    wait_for(lambda: Counter(ended(served)) - Counter(before) == Counter(expected))


def ended(served: Served) -> dict[str, float]:
    metrics = served.server.config.app.state.metrics.exposition().decode()
    found = re.findall(r'^ragjax_http_connections_ended_total{reason="(\w+)"} (\S+)$', metrics, re.M)
    return {reason: float(count) for reason, count in found}


def test_who_sends_nothing_is_closed_without_a_word(timed: Timed) -> None:
    with counted(timed.served, idle=1), timed.served.connect() as connection:
        wait_for(lambda: timed.theirs(connection) is not None)
        timed.passes(LIMIT)
        assert until_closed(connection) == b""


def test_time_passes_in_the_loop_that_servers_run_in_too() -> None:
    with serving(FakeEngine(), limits=Limits(timeout=0.2)) as served, served.connect() as connection:
        assert until_closed(connection) == b""


@pytest.mark.parametrize("part", [HEAD, HEAD[:9], HEAD + b"\r\n{", HEAD + b"\r\n"])
def test_who_sends_a_part_and_pauses_is_told_and_closed(timed: Timed, part: bytes) -> None:
    with counted(timed.served, late=1), timed.served.connect() as connection:
        connection.sendall(part)
        wait_for(lambda: timed.has_begun(connection))
        timed.passes(LIMIT)
        status, error = refused(until_closed(connection))
    assert status == 408 and error["code"] == "timeout" and "within 60 seconds" in error["message"]


def drip(connection: socket.socket, part: bytes, timed: Timed | None = None) -> bytes:
    """Send the part again and again, with pauses, until the connection ends; what came.

    timed: whose time for a request passes meanwhile.
    """
    answers: list[bytes] = []
    reading = Thread(target=lambda: answers.append(until_closed(connection)))
    reading.start()
    steps = iter(range(10))
    with suppress(OSError):
        while reading.is_alive():
            connection.sendall(part)
            reading.join(0.02)
            if timed is not None and next(steps, None) is not None:
                timed.passes(LIMIT / 10)
    reading.join(20)
    return answers[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "part", "status"),
    [
        (HEAD, b"x-more: 1\r\n", b"408"),
        (HEAD + b"\r\n", b" ", b"408"),
        (HEAD.replace(LENGTH, b"transfer-encoding: chunked\r\n") + b"\r\n", b"1\r\n \r\n", b"408"),
        (HEAD[:4], b"x", b"408"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n", b" ", b"200"),
    ],
    ids=["head", "body", "chunks", "line", "body that nobody reads"],
)
def test_who_drips_is_closed(timed: Timed, begin: bytes, part: bytes, status: bytes) -> None:
    """Each part would begin uvicorn's time anew."""
    with timed.served.connect() as connection:
        connection.sendall(begin)
        wait_for(lambda: timed.has_begun(connection))
        answer = drip(connection, part, timed)
    assert answer[9:12] == status and answer.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "wrong",
    [
        b"\r\n",
        b"GET /\0 HTTP/1.1\r\nhost: x\r\n\r\n",
        HEAD.replace(LENGTH, b"transfer-encoding: chunked\r\n") + b"\r\nno length\r\n",
    ],
    ids=["blank line", "NUL", "chunk"],
)
def test_what_is_no_http_is_told_and_closed(shared: Served, wrong: bytes) -> None:
    with counted(shared, malformed=1), shared.connect() as connection:
        connection.sendall(wrong)
        status, error = refused(until_closed(connection))
    assert status == 400 and error["type"] == "invalid_request_error" and "not an HTTP request" in error["message"]
    wait_for(lambda: not shared.server.server_state.tasks)


def test_two_lengths_of_a_body_end_the_connection(shared: Served) -> None:
    """A proxy may go by the other one: then the second request was never seen by it."""
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    head = HEAD.replace(LENGTH, b"content-length: %d\r\ntransfer-encoding: chunked\r\n" % (len(hidden) + 5))
    with shared.connect() as connection:
        connection.sendall(head + b"\r\n0\r\n\r\n" + hidden)
        answer = until_closed(connection)
    assert answer[9:12] == b"400" and answer.count(b"HTTP/1.1") == 1


class Long(FakeEngine):
    """While it answers, more time passes than a client has."""

    timed: Timed

    async def submit(self, request: core.Request) -> AsyncGenerator[core.Event, None]:
        async with aclosing(super().submit(request)) as events:
            async for event in events:
                self.timed.ahead += LIMIT
                await asyncio.sleep(0.01)  # what is due by now is done
                yield event


def test_a_long_answer_and_a_second_request_have_their_time(asyncio_loop: None) -> None:
    """The limit is on what the client sends: an answer may take longer, and the next request starts anew."""
    engine = Long()
    with serving(engine) as served:
        engine.timed = timed = Timed(served, Drain())
        served.server.config.timeout_keep_alive = 2 * int(LIMIT)  # uvicorn's own limit
        with counted(served, idle=1), served.connect() as connection:
            for _ in range(3):
                timed.passes(LIMIT / 2)
                connection.sendall(written(CHAT))
                answer = HTTPResponse(connection)
                answer.begin()
                assert answer.status == 200 and b"The lighthouse is red." in answer.read()
            timed.passes(LIMIT)
            assert until_closed(connection) == b""


def test_who_does_not_read_is_closed(asyncio_loop: None) -> None:
    """The stream is more than the buffers hold; its request is cancelled."""
    engine = FakeEngine(tokens=("x" * 2**20,) * 64)
    with serving(engine) as served, served.connect() as connection:
        timed = Timed(served, Drain())
        connection.sendall(written({**CHAT, "stream": True}))
        wait_for(lambda: (one := timed.theirs(connection)) is not None and one.flow.write_paused)
        timed.passes(LIMIT)
        wait_for(lambda: engine.cancelled == 1)
        wait_for(lambda: not served.server.server_state.connections)
        assert ended(served) == {"unread": 1}
    assert engine.running == 0


def test_two_hundred_slow_clients_end_while_others_are_served(timed: Timed) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(timed.served.connect()) for _ in range(200)]
        for connection in slow:
            connection.sendall(HEAD[:30])
        wait_for(lambda: all(timed.has_begun(connection) for connection in slow), 60)
        assert timed.served.post(json=CHAT).status_code == 200
        timed.passes(LIMIT)
        assert all(b" 408 " in until_closed(connection) for connection in slow)
    wait_for(lambda: not timed.served.server.server_state.connections)


def test_one_connection_too_many_is_told_and_the_others_go_on() -> None:
    with serving(FakeEngine(), limits=Limits(connections=3)) as served, ExitStack() as stack:
        kept = [stack.enter_context(served.connect()) for _ in range(3)]
        wait_for(lambda: len(served.server.server_state.connections) == 3)
        for _ in range(2):
            response = served.post(json=CHAT)
            assert response.status_code == 503 and response.json()["error"]["code"] == "overloaded"
            assert response.headers["retry-after"] == "5" and "3 connections" in response.text
        for connection in kept:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert until_closed(connection).startswith(b"HTTP/1.1 200")
        wait_for(lambda: not served.server.server_state.connections)
        assert served.post(json=CHAT).status_code == 200
        assert ended(served) == {"overloaded": 2}


def test_who_is_refused_cannot_stay() -> None:
    with serving(FakeEngine(), limits=Limits(connections=1)) as served, served.connect():
        wait_for(lambda: len(served.server.server_state.connections) == 1)
        with served.connect() as connection:
            assert refused(drip(connection, b"x"))[0] == 503
