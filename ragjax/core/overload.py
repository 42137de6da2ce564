"""When a client that was refused should come again: from the rate at which requests end, and from how many wait."""

from __future__ import annotations

from collections import deque

WINDOW = 32
"""Last ends of requests that the rate is measured over."""

UNKNOWN = 1.0
"""Seconds to wait while no rate is known."""


class Overload:
    """Promises each refused client a place in the queue at a time of its own.

    One place becomes free whenever a request ends. Clients that are refused at once are sent to places that become free
    one after another, but no further than to the time at which all who run and wait now have ended.
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=WINDOW)
        self._begun = 0.0
        self._before: float | None = None  # the rate of the last time in which anybody was here
        self.present = 0
        self._promised = 0.0

    def begin(self, now: float) -> None:
        if not self.present:
            self._before = self.rate(now) if self._ends else self._before
            self._ends.clear()
            self._begun = now
        self.present += 1

    def end(self, now: float) -> None:
        self.present -= 1
        if len(self._ends) == WINDOW:
            self._begun = self._ends[0]
        self._ends.append(now)

    def rate(self, now: float) -> float | None:
        if not self._ends:
            return self._before
        count, idle = len(self._ends), not self.present
        until = self._ends[-1] if idle else max(self._ends[-1], self._begun + (now - self._begun) * count / (count + 1))
        return count / max(until - self._begun, 1e-6)

    def retry_after(self, now: float) -> float:
        """Seconds after which there is a place for one who is refused now."""
        rate = self.rate(now)
        if rate is None:
            return UNKNOWN
        last = now + max(self.present, 1) / rate
        self._promised = min(max(self._promised, now) + 1 / rate, last)
        return self._promised - now
