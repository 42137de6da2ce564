"""Who is admitted: requests that wait, and the start of each, which matches KV, pins it and reserves pages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.keys import context_hasher, raw_of
from ragjax.cache.outlook import Look
from ragjax.core import OutOfPages, Prompt, RequestError, Run
from ragjax.core.tiers import Inquiry
from ragjax.reuse.base import Allocation
from ragjax.schedule.order import FCFS, Order, Queue, Waiting
from ragjax.schedule.scheduler import Scheduler
from ragjax.schedule.state import RequestState


@dataclass
class _Wait:
    """A request's wait. until: when it ends at the latest, s. open: the questions that its last look raised."""

    until: float
    open: Collection[str] = ()
    over: bool = False


class Presence:
    """Holds back requests for a moment while the shared tier is asked what it has of them.

    A look ahead raises questions; when they are answered, the next look goes on from what was found. What was found is
    ordered once nothing more can be asked without it, so that a prefix comes in one piece.

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


PREFETCH = 0.25
"""Share of the pool's pages that loads for waiting requests may take."""

AHEAD = 8
"""Waiting requests that are looked after, in the order in which they will start."""


class Preview(Allocation):
    """An allocation that finds and takes nothing: the prefill that was given it ends where it would reserve."""

    def reserve(self, tokens: int, spare: int = 0) -> Run:
        """Never.

        Raises:
            OutOfPages: always.
        """
        raise OutOfPages("a look ahead reserves nothing")


class Prefetch:
    """Brings KV of waiting requests to the device while they queue, once for each, as long as there are pages for it.

    A look ahead is what the request itself will do when it starts, up to its first reservation: the strategy matches,
    and what lies in host memory or on disk is ordered. Nothing is held afterwards: a load holds its own pages until it
    is done, then its KV may leave as any other's.

    preview: makes the allocation of a look ahead.
    """

    def __init__(self, cache: KnowledgeCache, preview: Callable[[RequestState], Preview]):
        self._cache = cache
        self._preview = preview
        self._limit = int(PREFETCH * cache.pool.capacity)
        self._taken: dict[RequestState, int] = {}  # pages of the loads that were ordered for it
        self._seen: tuple[RequestState, ...] = ()

    def run(self, ahead: Iterable[RequestState]) -> None:
        """Order what these requests need, first things first; nothing is done while they stay the same."""
        states = tuple(ahead)
        if states == self._seen:
            return
        self._seen = states
        if all(state in self._taken for state in states):
            return
        held: list[Preview] = []
        try:
            for state in states:  # what a nearer one needs stays, while a farther one's is brought
                held.append(self._preview(state))
                self._look(state, held[-1], state not in self._taken)
        finally:
            for preview in held:
                preview.close()

    def again(self, state: RequestState, load: bool) -> None:
        """Look ahead for one request, even if that was done before: more may be known of what lies below.

        load: order what is found.
        """
        preview = self._preview(state)
        try:
            self._look(state, preview, load)
        finally:
            preview.close()

    def forget(self, state: RequestState) -> None:
        """The request waits no more: what was loaded for it is its own, or nobody's."""
        self._taken.pop(state, None)

    def _look(self, state: RequestState, preview: Preview, load: bool) -> None:
        room = self._limit - sum(self._taken.values()) if load and state.may_load else 0
        self._taken.setdefault(state, 0)
        with self._cache.looking_ahead(room) as taken, suppress(Exception):  # the request itself will tell
            prefill = state.strategy.prefill(state.whole_prompt, preview, state.ratio)
            with suppress(OutOfPages):
                next(prefill)
            prefill.close()
            self._taken[state] += taken()


class Computing:
    """Pieces of KV by name, each with the running request that will keep it once it is computed.

    A request counts from its start until its prompt is computed, or until it fails, leaves, or is to start again: then
    one of those that waited computes what is still missing.
    """

    def __init__(self) -> None:
        self._owners: dict[bytes, RequestState] = {}

    def begin(self, state: RequestState, names: Iterable[bytes]) -> None:
        """A request has started and computes these pieces; those in the background rest too often to be waited for."""
        if not state.background and not state.decoding:
            for name in names:
                self._owners.setdefault(name, state)

    def prune(self) -> None:
        """Forget requests that compute their prompts no more."""
        if self._owners:
            self._owners = {name: state for name, state in self._owners.items() if state.running and not state.decoding}

    def awaited(self, look: Callable[[], Look]) -> dict[bytes, int]:
        """The pieces missing to a request that a running one is computing, tokens by name."""
        if not self._owners:
            return {}
        return {name: tokens for name, tokens in look().missing.items() if name in self._owners}


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
            decode_tokens=state.decode_tokens,
            limits=self._scheduler.limits,
            stages=self._stages,
            reach=self._reach,
            cold=state.may_load,
            forced=min(state.forced_tokens, state.decode_tokens),
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
