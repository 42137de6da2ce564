"""Requests wait a moment for what the shared tier says it has of them.

A look ahead raises questions, which a thread of the tier asks of its server; when they are answered, the next look goes
on from what was found. What was found is ordered once nothing more can be asked without it, so that a prefix comes in
one piece, however many entries it lies in. A request starts when nothing is open, or when it has waited long enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ragjax.core.tiers import Inquiry
from ragjax.schedule.state import RequestState


@dataclass
class _Wait:
    """A request's wait. until: when it ends at the latest, s. open: the questions that its last look raised."""

    until: float
    open: Collection[str] = ()
    over: bool = False


class Presence:
    """Holds back requests while questions about them are open.

    look: looks ahead for a request, which raises questions, and orders what is found if told to. late: requests that
    started before all was answered.
    """

    def __init__(
        self, inquiry: Inquiry, look: Callable[[RequestState, bool], None], clock: Callable[[], float] = time.monotonic
    ):
        self.late = 0
        self._inquiry = inquiry
        self._look = look
        self._clock = clock
        self._waits: dict[RequestState, _Wait] = {}

    def known(self, state: RequestState) -> bool:
        """Whether the request may start: what there is of it is known, or was not said in time."""
        if not state.may_load:
            return True
        wait = self._waits.get(state)
        if wait is None:
            wait = self._waits[state] = _Wait(self._clock() + self._inquiry.patience)
        if wait.over:
            return True
        if self._clock() >= wait.until:
            self.late += 1
            wait.over = True
        elif not (wait.open and self._inquiry.waits(wait.open)):
            wait.open = self._raised(state, False) or self._raised(state, True)
            wait.over = not wait.open
        return wait.over

    def _raised(self, state: RequestState, load: bool) -> Collection[str]:
        """The questions that a look raises."""
        self._inquiry.asked()  # what others asked is not this request's
        self._look(state, load)
        return self._inquiry.asked()

    def forget(self, state: RequestState) -> None:
        """The request waits no more."""
        self._waits.pop(state, None)
