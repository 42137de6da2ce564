"""The end of a server: requests end, the engine closes, and the process ends even if a thread does not."""

from __future__ import annotations

import asyncio
import faulthandler
import math
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from ragjax.engine.service import Service

CLOSING = 10.0
"""Seconds after the grace time in which the engine must have closed and written what it keeps on disk."""

LAST = 5.0
"""Seconds that threads get once the engine is closed."""

STUCK = 3
"""Exit code of a process that had to be ended."""


@dataclass
class Drain:
    """Whether the server is stopping, and how many requests it is serving.

    A server that stops still listens: what it serves, waiting requests included, goes on, and what comes gets a 503, by
    which a load balancer sends it elsewhere.
    """

    stopping: bool = False
    serving: int = 0


class Watchdog:
    """Ends the process with code STUCK if it does not end in time after a signal; a context manager around its run.

    grace: seconds that running requests get.
    """

    def __init__(self, grace: float):
        self._grace = grace
        self._begun, self._closed, self._ended = threading.Event(), threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="ragjax-watchdog", daemon=True).start()

    def begin(self) -> None:
        """The stop was asked for."""
        self._begun.set()

    def closed(self) -> None:
        """The engine is closed: nothing is lost if the process ends now."""
        self._closed.set()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for event in (self._ended, self._closed, self._begun):
            event.set()

    def _watch(self) -> None:
        self._begun.wait()
        closed = self._closed.wait(self._grace + CLOSING)
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

    drain: shared with the application. grace: seconds that requests get after the first signal; a second one ends them.
    """

    def __init__(self, config: uvicorn.Config, engine: Service, watchdog: Watchdog, drain: Drain, grace: float):
        super().__init__(config)
        self._engine = engine
        self._watchdog = watchdog
        self._drain = drain
        self._grace = grace
        self._deadline = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM and SIGINT."""
        self._watchdog.begin()
        if self._drain.stopping:
            self.should_exit = True
            super().handle_exit(sig, frame)
            return
        self._deadline = time.monotonic() + self._grace
        self._drain.stopping = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to stop listening, and to cancel what is still served."""
        if self._drain.stopping and not self.should_exit:
            left = self._deadline - time.monotonic()
            self.should_exit = not self._drain.serving or left <= 0
            self.config.timeout_graceful_shutdown = max(0, math.ceil(left))
        return await super().on_tick(counter)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until a signal comes, and closes the engine."""
        try:
            await super().serve(sockets)
        finally:
            if self.server_state.tasks:  # they were cancelled, and tell their clients
                await asyncio.wait(self.server_state.tasks, timeout=1)
            self._engine.close()
            self._watchdog.closed()
