"""Clients that send or read slowly, or not at all, and too many of them: their connections end, others are served."""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from threading import Thread
from typing import Any

import pytest

from ragjax.serve.command import parse_options
from ragjax.serve.connection import Limits
from tests.support.fakes import FakeEngine
from tests.support.serving import CHAT, Served, serving, wait_for

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 200\r\n"
LENGTH = b"content-length: 200\r\n"
QUICK = Limits(timeout=0.3)


@pytest.fixture(scope="module")
def quick() -> Iterator[Served]:
    with serving(FakeEngine(), limits=QUICK) as served:
        yield served


@contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    address = ("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    with socket.create_connection(address, timeout=20) as connection:
        yield connection


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
    found = re.findall(
        r'^ragjax_http_connections_ended_total{reason="(\w+)"} (\S+)$', served.get("/metrics").text, re.M
    )
    return {reason: float(count) for reason, count in found}


def test_who_sends_nothing_is_closed_without_a_word(quick: Served) -> None:
    with counted(quick, idle=1), connected(quick) as connection:
        assert until_closed(connection) == b""


@pytest.mark.parametrize("part", [HEAD, HEAD[:9], HEAD + b"\r\n{", HEAD + b"\r\n"])
def test_who_sends_a_part_and_pauses_is_told_and_closed(quick: Served, part: bytes) -> None:
    with counted(quick, late=1), connected(quick) as connection:
        connection.sendall(part)
        status, error = refused(until_closed(connection))
    assert status == 408 and error["code"] == "timeout" and "within 0.3 seconds" in error["message"]


def drip(connection: socket.socket, part: bytes) -> bytes:
    """Send the part again and again, with pauses, until the connection ends; what came."""
    answers: list[bytes] = []
    reading = Thread(target=lambda: answers.append(until_closed(connection)))
    reading.start()
    with suppress(OSError):
        while reading.is_alive():
            connection.sendall(part)
            reading.join(0.02)
    reading.join(20)
    return answers[0]


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
def test_who_drips_is_closed(quick: Served, begin: bytes, part: bytes, status: bytes) -> None:
    """Each part would begin uvicorn's time anew."""
    with connected(quick) as connection:
        connection.sendall(begin)
        answer = drip(connection, part)
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
def test_what_is_no_http_is_told_and_closed(quick: Served, wrong: bytes) -> None:
    with counted(quick, malformed=1), connected(quick) as connection:
        connection.sendall(wrong)
        status, error = refused(until_closed(connection))
    assert status == 400 and error["type"] == "invalid_request_error" and "not an HTTP request" in error["message"]
    wait_for(lambda: not quick.server.server_state.tasks)


def test_a_long_answer_and_a_second_request_have_their_time() -> None:
    """The limit is on what the client sends: an answer may take longer, and the next request starts anew."""
    with serving(FakeEngine(delay=0.1), limits=QUICK) as served, connected(served) as connection:
        body = json.dumps(CHAT).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        for _ in range(3):
            connection.sendall(head + body)
            answer = HTTPResponse(connection)
            answer.begin()
            assert answer.status == 200 and b"The lighthouse is red." in answer.read()
        assert until_closed(connection) == b""


def test_who_does_not_read_is_closed() -> None:
    """The stream is more than the buffers hold; its request is cancelled."""
    engine = FakeEngine(tokens=("x" * 2**20,) * 64)
    with serving(engine, limits=QUICK) as served, connected(served) as connection:
        body = json.dumps({**CHAT, "stream": True}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        wait_for(lambda: engine.cancelled == 1)
        wait_for(lambda: not served.server.server_state.connections)
        assert ended(served) == {"unread": 1}
    engine.audit()


def test_two_hundred_slow_clients_end_while_others_are_served(quick: Served) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(quick)) for _ in range(200)]
        for connection in slow:
            connection.sendall(HEAD[:30])
        assert quick.post(json=CHAT).status_code == 200
        assert all(b" 408 " in until_closed(connection) for connection in slow)
    wait_for(lambda: not quick.server.server_state.connections)


def test_one_connection_too_many_is_told_and_the_others_go_on() -> None:
    with serving(FakeEngine(), limits=Limits(connections=3)) as served, ExitStack() as stack:
        kept = [stack.enter_context(connected(served)) for _ in range(3)]
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
    with serving(FakeEngine(), limits=Limits(connections=1)) as served, connected(served):
        wait_for(lambda: len(served.server.server_state.connections) == 1)
        with connected(served) as connection:
            assert refused(drip(connection, b"x"))[0] == 503


def test_the_flags_are_the_limits() -> None:
    options = parse_options(["--knowledge", "none", "--receive-timeout", "2.5", "--max-connections", "7"])
    assert (options.receive_timeout, options.max_connections) == (2.5, 7)
    assert (Limits().timeout, Limits().connections) == (60, 512)
