"""Requests whose step failed, and requests that make no progress: started again once, and then told."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from ragjax.core import DeadlineError, DeviceFullError
from ragjax.schedule.pause import age
from ragjax.schedule.state import RequestState

_log = logging.getLogger(__name__)

RESTARTS = 3
"""Times that a request is started again, after a step failed, KV could not be loaded or a device was lost."""


class Faults:
    """What becomes of requests that a fault hits. Nothing of another request is touched.

    timeout: seconds without progress, after which a request is started again, or ends (0: none).
    restart, fail: start a request again with a notice, and end it with an error.

    Attributes:
        steps: steps that failed while the device's memory was intact.
        timeouts: requests without progress, by what became of them: "restarted" or "ended".
    """

    def __init__(
        self,
        timeout: float,
        restart: Callable[[RequestState, str], None],
        fail: Callable[[RequestState, Exception], None],
    ):
        self.steps = 0
        self.timeouts: Counter[str] = Counter()
        self._timeout = timeout
        self._waited_s = 0.0
        self._restart = restart
        self._fail = fail

    def step_failed(self, states: Sequence[RequestState], error: Exception) -> None:
        """A step failed, and the pool is intact: its members start again, each in steps of its own.

        So the one at fault shows: it fails alone, with its error, and the others go on.
        """
        self.steps += 1
        _log.error("a step of %d requests failed", len(states), exc_info=error)
        for state in sorted(states, key=age, reverse=True):  # put back in front of the line, the oldest last
            if state.restarts >= RESTARTS or (state.suspect and len(states) == 1):
                self._fail(state, error)
            else:
                state.suspect = True
                self._restart(state, "a step failed; the request was computed again")

    def memory_lost(self, states: Sequence[RequestState], error: Exception) -> None:
        """A step failed, and took the pool with it: all requests are about to start again.

        If it found the device full, its members then run in steps of their own, and one that fails so again ends: it
        would take the pool from all others each time.
        """
        if not isinstance(error, DeviceFullError):
            return
        for state in states:
            if state.suspect and len(states) == 1:
                self._fail(state, error)
            state.suspect = True

    def excuse(self, states: Callable[[], Iterable[RequestState]], waited_s: float) -> None:
        """Time in which programs were compiled is nobody's lack of progress.

        waited_s: seconds of it since the start.
        """
        lost, self._waited_s = waited_s - self._waited_s, waited_s
        if not lost or not self._timeout:
            return
        for state in states():
            state.times.progress += lost

    def check(self, states: Callable[[], Iterable[RequestState]], now: float) -> None:
        """Look for requests without progress: none of their rows was computed, or they wait to be started."""
        if not self._timeout:
            return
        asked = [state for state in states() if not state.background and not state.speculative]
        late = [state for state in asked if now - state.times.progress > self._timeout]
        for state in sorted(late, key=age, reverse=True):
            if state.running and not state.overdue and state.restarts < RESTARTS:
                state.overdue, state.times.progress = True, now
                self.timeouts["restarted"] += 1
                self._restart(state, f"no progress for {self._timeout:g} s; the request was computed again")
            else:
                self.timeouts["ended"] += 1
                self._fail(state, self._deadline(state))

    def _deadline(self, state: RequestState) -> DeadlineError:
        waited = "while others had its pages" if state.paused is not None else "while it waited to be started"
        where = "since it was started again" if state.overdue else waited
        return DeadlineError(
            f"the request made no progress for {self._timeout:g} s {where}: send fewer requests at a time, "
            "try again later, or raise --request-timeout"
        )


def note_progress(states: Iterable[RequestState]) -> None:
    """Rows of these requests were computed."""
    now = time.perf_counter()
    for state in states:
        state.times.progress = now
