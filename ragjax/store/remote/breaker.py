"""A circuit breaker: after a failure a server is left alone for a while, then one call asks whether it is back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock

_log = logging.getLogger(__name__)

PAUSE = 5.0
"""Seconds that a server is left alone after it failed."""


class Breaker:
    """Whether a server may be asked. Any thread may call anything; each change is logged once.

    name: of the server, in the log. changes: how often it went off or came back.
    """

    def __init__(self, name: str, pause: float = PAUSE, clock: Callable[[], float] = time.monotonic):
        self.name = name
        self.changes = 0
        self._pause = pause
        self._clock = clock
        self._lock = Lock()
        self._error: str | None = None
        self._probe_at = 0.0

    @property
    def on(self) -> bool:
        """Whether the server may be asked."""
        return self._error is None

    @property
    def error(self) -> str | None:
        """Why it is off."""
        return self._error

    def failed(self, error: Exception) -> None:
        """The server did not answer: off from now on, or for another while."""
        with self._lock:
            was_on, self._error = self._error is None, str(error)
            self._probe_at = self._clock() + self._pause
            self.changes += was_on
        if was_on:
            _log.warning("the shared cache %s is off: %s", self.name, error)

    def worked(self) -> None:
        """A probe was answered: on again. What was asked before it went off and is answered now changes nothing."""
        with self._lock:
            was_on, self._error = self._error is None, None
            self.changes += not was_on
        if not was_on:
            _log.warning("the shared cache %s is on again", self.name)

    def probe_in(self) -> float | None:
        """Seconds until it should be probed, 0 if it is time; None while it is on."""
        with self._lock:
            return None if self._error is None else max(0.0, self._probe_at - self._clock())
