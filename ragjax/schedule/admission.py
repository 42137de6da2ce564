"""Who is admitted: requests that wait, and the start of each, which matches KV, pins it and reserves pages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import OutOfPages, RequestError
from ragjax.reuse.base import Allocation
from ragjax.schedule.scheduler import Scheduler
from ragjax.schedule.state import RequestState

BACKGROUND = 8
"""Background requests that run at a time."""


class Admission:
    """Requests between their arrival and their start: first come, first served.

    max_running: most requests that run at a time, background ones apart (0: as many as have room). stages: layers at
    which a pass may begin, ascending, and the number of layers.

    waiting, background: requests that were not started. blocked: the first of the waiting found no room, and nothing
    was given back since.
    """

    def __init__(self, cache: KnowledgeCache, scheduler: Scheduler, *, stages: tuple[int, ...], max_running: int = 0):
        self.waiting: deque[RequestState] = deque()
        self.background: deque[RequestState] = deque()
        self.blocked = False
        self._cache = cache
        self._scheduler = scheduler
        self._stages = stages
        self._max_running = max_running

    def add(self, state: RequestState) -> None:
        """Let a request wait, and tell the replacement policy what it will use."""
        if state.background:
            self.background.append(state)
            return
        self.waiting.append(state)
        self._cache.announce(state.id, state.strategy.keys(state.prompt, self._cache, state.request.tenant))

    def put_back(self, state: RequestState) -> None:
        """Let a request that ran wait to be started again, before all others."""
        self.blocked = False
        (self.background if state.background else self.waiting).appendleft(state)

    def remove(self, state: RequestState) -> None:
        """Let a request wait no longer; nothing happens if it does not."""
        if state in self.background:
            self.background.remove(state)
        if state in self.waiting:
            self.waiting.remove(state)
            self._cache.withdraw(state.id)
            self.blocked = False

    def admit(self) -> Iterator[tuple[RequestState, Exception | None]]:
        """Start waiting requests, oldest first, while they have room; each with the error that it failed by, if any.

        Background requests are started, a few at a time, while no other runs or waits.
        """
        while self.waiting and not self.blocked and self._has_turn():
            state = self.waiting[0]
            started, error = self._try(state)
            self.blocked = not (started or error)
            if not self.blocked:
                self.waiting.popleft()
                self._cache.withdraw(state.id)
                yield state, error
        while self.background and not self._busy() and len(self._scheduler.running) < BACKGROUND:
            state = self.background.popleft()
            started, error = self._try(state)
            if not (started or error):
                self.background.appendleft(state)
                return
            yield state, error

    def _has_turn(self) -> bool:
        return not self._max_running or len(self._scheduler.in_front) < self._max_running

    def _busy(self) -> bool:
        return bool(self.waiting or self._scheduler.in_front)

    def _try(self, state: RequestState) -> tuple[bool, Exception | None]:
        try:
            return self._start(state), None
        except Exception as error:
            state.stop()
            return False, error

    def _start(self, state: RequestState) -> bool:
        """Match and reserve for a request; False if it has to wait for others to end.

        Raises:
            RequestError: if it is alone and still has no room.
        """
        vacated = False
        while True:
            began = time.perf_counter()
            try:
                state.start(self._allocation(state))
            except OutOfPages as error:
                if not state.background and self._stop_background():
                    continue
                if self._scheduler.running or self._cache.loading:
                    return False
                if not vacated:  # what it would reuse may lie scattered over more pages than it needs
                    self._cache.vacate()
                    vacated = True
                    continue
                param = "messages" if state.request.prompt is None else "prompt"
                raise RequestError(str(error), param=param, code="context_length_exceeded") from error
            self._scheduler.add(state)
            state.times.start(began, time.perf_counter() if state.ready else None)
            return True

    def _allocation(self, state: RequestState) -> Allocation:
        return Allocation(
            self._cache,
            tenant=state.request.tenant,
            label=state.id,
            decode_tokens=state.decode_tokens,
            limits=self._scheduler.limits,
            stages=self._stages,
            cold=state.may_load,
        )

    def _stop_background(self) -> bool:
        """Have background requests give back what they hold; whether there were any."""
        running = self._scheduler.in_background
        for state in reversed(running):
            self._scheduler.remove(state)
            state.restart("")
            self.put_back(state)
        return bool(running)
