"""Who is admitted: requests that wait, and the start of each, which matches KV, pins it and reserves pages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.keys import context_hasher, raw_of
from ragjax.core import OutOfPages, Prompt, RequestError
from ragjax.reuse.base import Allocation
from ragjax.schedule.computing import Computing
from ragjax.schedule.order.base import Order, Queue, Waiting
from ragjax.schedule.order.fcfs import FCFS
from ragjax.schedule.prefetch import AHEAD, Prefetch, Preview
from ragjax.schedule.presence import Presence
from ragjax.schedule.scheduler import Scheduler
from ragjax.schedule.state import RequestState

A = TypeVar("A", bound=Allocation)

BACKGROUND = 8
"""Background requests that run at a time."""


class _Entry(Waiting):
    """A request of the engine while it waits. awaited: pieces for which it was held back, tokens by name."""

    def __init__(self, state: RequestState, cache: KnowledgeCache):
        outlook = state.strategy.outlook(state.prompt, cache, state.request.tenant)
        super().__init__(len(state.prompt), _path(state.prompt), partial(cache.peek, outlook))
        self.state = state
        self.awaited: dict[bytes, int] = {}


class Admission:
    """Requests between their arrival and their start, in the order that `order` chooses (None: as they came).

    A request that would compute what a running one is computing waits until that one has kept it; others may start
    meanwhile. One that was overtaken as often as a request bears waits for nobody.

    max_running: most requests that run at a time, background ones apart (0: as many as have room). stages: layers at
    which a pass may begin, ascending, and the number of layers. reach: layers that may use each other's units.

    background: requests that were not started, and run while no other does. blocked: the one that was to start found no
    room, and nothing was given back since. awaits, awaited_tokens: requests that waited for KV which another was
    computing, and tokens of it that they found.
    """

    def __init__(
        self,
        cache: KnowledgeCache,
        scheduler: Scheduler,
        *,
        stages: tuple[int, ...],
        reach: int = 0,
        max_running: int = 0,
        order: Order | None = None,
    ):
        self.background: deque[RequestState] = deque()
        self.blocked = False
        self.awaits = 0
        self.awaited_tokens = 0
        self._queue: Queue[_Entry] = Queue(order or FCFS())
        self._entries: dict[RequestState, _Entry] = {}
        self._computing = Computing()
        self._cache = cache
        self._scheduler = scheduler
        self._stages = stages
        self._reach = reach
        self._max_running = max_running
        self._prefetch = Prefetch(cache, self._preview)
        self._presence = None if cache.inquiry is None else Presence(cache.inquiry, self._prefetch.again)
        self._tried: set[str] = set()  # requests that were matched, counted, and found no room
        self._foreseen = (0, 0)  # changes of queue and tree at the last look ahead

    @property
    def waiting(self) -> list[RequestState]:
        """Requests that were not started, background ones apart; those that ran before, then as they came."""
        return [entry.state for entry in self._queue]

    @property
    def late(self) -> int:
        """Requests that started before the shared tier had answered all questions about them."""
        return 0 if self._presence is None else self._presence.late

    @property
    def depth(self) -> int:
        """How many they are; callable in any thread."""
        return len(self._entries)

    def add(self, state: RequestState) -> None:
        """Let a request wait, and tell the replacement policy what it will use."""
        if state.background:
            self.background.append(state)
            return
        self._queue.add(self._enter(state))
        self._cache.announce(state.id, state.strategy.keys(state.prompt, self._cache, state.request.tenant))

    def put_back(self, state: RequestState) -> None:
        """Let a request that ran wait to be started again, before all others."""
        self.blocked = False
        if state.background:
            self.background.appendleft(state)
        else:
            self._queue.put_back(self._enter(state))

    def remove(self, state: RequestState) -> None:
        """Let a request wait no longer; nothing happens if it does not."""
        self._tried.discard(state.id)
        if state in self.background:
            self.background.remove(state)
        entry = self._entries.pop(state, None)
        if entry is not None:
            self._queue.remove(entry)
            self._forget(state)
            self.blocked = False

    def admit(self) -> Iterator[tuple[RequestState, Exception | None]]:
        """Start waiting requests, in their order, while they have room; each with the error that it failed by, if any.

        Background requests are started, a few at a time, while no other runs or waits.
        """
        while not self.blocked and self._has_turn() and (entry := self._next()) is not None:
            state, missing = entry.state, entry.look().missing if entry.awaited else {}
            if (plan := self._queue.plan(entry)) is not None:
                self._cache.plan([waiting.state.id for waiting in plan])
            started, error = self._try(state)
            self.blocked = not (started or error)
            if not self.blocked:
                self.awaited_tokens += sum(tokens for name, tokens in entry.awaited.items() if name not in missing)
                self._queue.start(entry)
                del self._entries[state]
                self._forget(state)
                self._computing.begin(state, entry.look().missing)
                yield state, error
        while self.background and not self._busy() and len(self._scheduler.running) < BACKGROUND:
            state = self.background.popleft()
            started, error = self._try(state)
            if not (started or error):
                self.background.appendleft(state)
                return
            yield state, error

    def prefetch(self) -> None:
        """Have KV of the requests that start next brought to the device while they wait."""
        if self._presence is not None and self._entries:
            for entry in self._queue.ahead(AHEAD):
                self._presence.known(entry.state)
        seen = self._queue.changes, self._cache.tree.generation
        if self._cache.tiered and self._entries and seen != self._foreseen:
            self._foreseen = seen
            self._prefetch.run(entry.state for entry in self._queue.ahead(AHEAD))

    def _enter(self, state: RequestState) -> _Entry:
        entry = self._entries[state] = _Entry(state, self._cache)
        return entry

    def _next(self) -> _Entry | None:
        """The request to start next; None if all wait for what others compute."""
        self._computing.prune()
        return self._queue.next(self._may_start)

    def _may_start(self, entry: _Entry) -> bool:
        """Whether no running request is computing what it would compute; one that no load may serve asks nobody.

        What the shared tier has of it must be known by then, or not be had in time.
        """
        if self._presence is not None and not self._presence.known(entry.state):
            return False
        awaited = self._computing.awaited(entry.look) if entry.state.may_load else {}
        self.awaits += bool(awaited) and not entry.awaited
        entry.awaited |= awaited
        return not awaited

    def _forget(self, state: RequestState) -> None:
        """The request waits no more."""
        self._prefetch.forget(state)
        if self._presence is not None:
            self._presence.forget(state)
        self._cache.withdraw(state.id)

    def _has_turn(self) -> bool:
        return not self._max_running or len(self._scheduler.in_front) < self._max_running

    def _busy(self) -> bool:
        return bool(len(self._queue) or self._scheduler.in_front)

    def _try(self, state: RequestState) -> tuple[bool, Exception | None]:
        """Whether it started, or why it never will. A request counts as one look-up, however often it is tried."""
        again = state.id in self._tried
        self._tried.discard(state.id)
        try:
            with self._cache.uncounted() if again else nullcontext():
                started = self._start(state)
        except Exception as error:
            state.stop()
            return False, error
        if not started:
            self._tried.add(state.id)
        return started, None

    def _start(self, state: RequestState) -> bool:
        """Match and reserve for a request; False if it has to wait for others to end.

        Raises:
            RequestError: if it is alone and still has no room.
        """
        vacated = False
        while True:
            began = time.perf_counter()
            try:
                state.start(self.allocation(state))
            except OutOfPages as error:
                if not state.background and self.stop_background():
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

    def allocation(self, state: RequestState) -> Allocation:
        """What a request will hold: nothing yet."""
        return self._made(Allocation, state)

    def _preview(self, state: RequestState) -> Preview:
        return self._made(Preview, state)

    def _made(self, kind: type[A], state: RequestState) -> A:
        return kind(
            self._cache,
            tenant=state.request.tenant,
            label=state.id,
            decode_tokens=state.tail_tokens,
            limits=self._scheduler.limits,
            stages=self._stages,
            reach=self._reach,
            cold=state.may_load,
            forced=min(state.forced_tokens, state.tail_tokens),
            spare=len(self._scheduler.in_front),
            alone=not self._scheduler.in_front,
        )

    def stop_background(self) -> bool:
        """Have background requests give back what they hold; whether there were any."""
        running = self._scheduler.in_background
        for state in reversed(running):
            self._scheduler.remove(state)
            state.restart("")
            self.put_back(state)
        return bool(running)


def _path(prompt: Prompt) -> Mapping[Hashable, int]:
    """The end of each segment, by a digest of all tokens up to there."""
    hasher, path = context_hasher(), dict[Hashable, int]()
    for segment, end in zip(prompt.segments, prompt.starts[1:], strict=True):
        hasher.update(raw_of(segment.tokens))
        path[hasher.digest()] = end
    return path
