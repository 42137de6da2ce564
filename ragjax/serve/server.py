"""Connections: how many there are at a time, and how long one may keep the server waiting."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragjax.core.options import GRACE
from ragjax.serve.error import ApiError, late, overloaded

if TYPE_CHECKING:
    from ragjax.cluster.fleet import Service

LINGER = 1.0
"""Seconds between the last answer on a connection and its end, in which the client can read the answer."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    # Seconds that a client has for a request, from the connection (or the response before it) to the end of the body;
    # and for reading what fills the buffers of its connection.
    timeout: float = 60.0
    connections: int = 512  # most of them at a time; one more is answered with 503


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 connection, bounded in time and number.

    uvicorn has no limit on the time in which a request arrives, and its limit of connections refuses requests on those
    that were there before. While a body arrives `RequestMiddleware` answers in time; the connection ends in any case.
    """

    limits = Limits()
    count: Callable[[str], None]
    """Called with the reason why the server ends a connection."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._refused = False
        self._arrival: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) <= self.limits.connections:
            self._watch()
            return
        most = self.limits.connections
        self.count("overloaded")
        _log.warning("refused a connection: there are %d already, the most that it takes", most)
        self._end(overloaded(most))

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._arrival, self._reading)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes data, unless the connection ends: its answer is sent, and what still comes is dropped."""
        if not self._refused:
            super().data_received(data)

    def handle_events(self) -> None:
        """Takes what has arrived; the clock stops once that is a whole request."""
        super().handle_events()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self.count("malformed")
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._end(ApiError(400, "this is not an HTTP request that can be read", headers={"connection": "close"}))
        else:
            self.transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """The buffers are full: starts the clock of a client that does not read."""
        super().pause_writing()
        self._reading = self.loop.call_later(self.limits.timeout, self._unread)

    def resume_writing(self) -> None:
        _stop(self._reading)
        super().resume_writing()

    def _watch(self) -> None:
        if self._refused:
            return
        if self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete:
            _stop(self._arrival)
            self._arrival = None
        elif self._arrival is None:
            self._arrival = self.loop.call_later(self.limits.timeout, self._late)

    def _unread(self) -> None:
        self.count("unread")
        self.transport.abort()

    def _late(self) -> None:
        """Ends a connection in time: here for a part of a head; `RequestMiddleware` answers for a part of a body."""
        answering = self.cycle is not None and not self.cycle.response_complete
        begun = answering or bool(self.conn.trailing_data[0])
        if not self.transport.is_closing():
            self.count("late" if begun else "idle")
        if answering or self.transport.is_closing():
            self._arrival = self.loop.call_later(LINGER, self.transport.abort)
        elif self.conn.our_state is h11.IDLE and begun:
            self._end(late(self.limits.timeout))
        else:
            self.transport.abort()

    def _end(self, error: ApiError) -> None:
        """Send the error in the application's place, and end the connection."""
        self._refused = True
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        response = error.response()
        response.headers["x-request-id"] = request_id = uuid.uuid4().hex
        _log.info("request %s was refused with its connection, status %d", request_id, error.status_code)
        head = h11.Response(status_code=error.status_code, headers=response.raw_headers)
        for event in (head, h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        # Closed at once it would be reset by what the client still sends, and the answer lost.
        self.transport.write_eof()
        _stop(self._arrival)
        self._arrival = self.loop.call_later(LINGER, self.transport.abort)


def limited(limits: Limits, count: Callable[[str], None]) -> type[Connection]:
    return type("Connection", (Connection,), {"limits": limits, "count": staticmethod(count)})


def _stop(*clocks: asyncio.TimerHandle | None) -> None:
    for clock in clocks:
        if clock is not None:
            clock.cancel()


CLOSING = 10.0  # seconds after the grace time in which the engine must have closed and written what it keeps on disk
LAST = 5.0  # seconds that threads get once the engine is closed
STUCK = 3  # exit code of a process that had to be ended


@dataclass
class Drain:
    """State of a stop: whether it has begun, and how many requests are served.

    A server that stops still listens: what it serves, waiting requests included, goes on, and what comes gets a 503, by
    which a load balancer sends it elsewhere.
    """

    stopping: bool = False
    serving: int = 0


class Watchdog:
    """Ends the process with code STUCK if it does not end in time after a signal; a context manager around its run."""

    def __init__(self) -> None:
        self._begun, self._closed, self._ended = threading.Event(), threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="ragjax-watchdog", daemon=True).start()

    def begin(self) -> None:
        self._begun.set()

    def closed(self) -> None:
        """The engine is closed: nothing is lost if the process ends now."""
        self._closed.set()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *_: object) -> None:
        for event in (self._ended, self._closed, self._begun):
            event.set()

    def _watch(self) -> None:
        self._begun.wait()
        closed = self._closed.wait(GRACE + CLOSING)
        if closed and self._ended.wait(LAST):
            return
        what = "a thread" if closed else "the engine"
        # Neither logging nor sys.stderr: a thread that is stuck may hold their locks.
        with suppress(OSError):
            os.write(2, f"ragjax.serve: {what} did not end in time; the process ends with code {STUCK}\n".encode())
            faulthandler.dump_traceback(2)
        os._exit(STUCK)


class Server(uvicorn.Server):
    """uvicorn's server, which drains, and closes the engine before it waits for threads: one of them may be stuck.

    drain: shared with the application. Requests get GRACE seconds after the first signal; a second one ends them.
    """

    def __init__(self, config: uvicorn.Config, engine: Service, watchdog: Watchdog, drain: Drain):
        super().__init__(config)
        self._engine = engine
        self._watchdog = watchdog
        self._drain = drain
        self._deadline = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._watchdog.begin()
        if self._drain.stopping:
            self.should_exit = True
            super().handle_exit(sig, frame)
            return
        self._deadline = time.monotonic() + GRACE
        self._drain.stopping = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to stop listening, and to cancel what is still served."""
        if self._drain.stopping and not self.should_exit:
            left = self._deadline - time.monotonic()
            self.should_exit = not self._drain.serving or left <= 0
            self.config.timeout_graceful_shutdown = max(0, math.ceil(left))
        return await super().on_tick(counter)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().serve(sockets)
        finally:
            if self.server_state.tasks:  # they were cancelled, and tell their clients
                await asyncio.wait(self.server_state.tasks, timeout=1)
            self._engine.close()
            self._watchdog.closed()
