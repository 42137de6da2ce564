"""Which requests `max_queue` is about, and when a client that is refused should come again."""

from __future__ import annotations

import time

from ragjax.core import OverloadError
from ragjax.engine.overload import Overload
from ragjax.schedule.state import RequestState


class Places:
    """Counts requests between their arrival and their end; not safe to call from several threads at once.

    most: requests that may wait.

    counted: those that wait and those that run. held: places of requests that are being prepared.
    """

    def __init__(self, most: int):
        self.counted: set[RequestState] = set()
        self.held: set[object] = set()
        self._most = most
        self._overload = Overload()

    def hold(self) -> object:
        """A place for a request that is to be prepared, until it is given back.

        Raises:
            OverloadError: if the queue is full.
        """
        self.check()
        place = object()
        self.held.add(place)
        return place

    def give_back(self, place: object) -> None:
        """The request is prepared, or gone; nothing happens the second time."""
        self.held.discard(place)

    def add(self, state: RequestState) -> None:
        """Count a request.

        Raises:
            OverloadError: if it waits, and the queue is full. Others that are being prepared count behind it.
        """
        if not state.running:
            self._check(0)
        if state not in self.counted:
            self.counted.add(state)
            self._overload.begin(time.perf_counter())

    def remove(self, state: RequestState) -> None:
        """A request ended; nothing happens if it was not counted."""
        if state in self.counted:
            self.counted.discard(state)
            self._overload.end(time.perf_counter())

    def check(self) -> None:
        """Whether there is room for one more.

        Raises:
            OverloadError: if the queue is full.
        """
        self._check(len(self.held))

    def _check(self, held: int) -> None:
        # while none runs, one of those that wait is about to
        waiting = len(self.counted) + held - max(sum(other.running for other in self.counted), 1)
        if waiting >= self._most:
            seconds = self._overload.retry_after(time.perf_counter())
            message = f"the queue is full: {waiting} requests wait; try again in {seconds:.0f} s or later"
            raise OverloadError(message, retry_after=seconds)
