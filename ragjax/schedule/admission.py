"""Starts waiting requests in their order: each matches KV, pins it and reserves pages."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.stretches import MOVED
from ragjax.core import OutOfPages, RequestError, Run, StepLimits
from ragjax.core.tiers import Inquiry
from ragjax.reuse.base import Allocation
from ragjax.reuse.exact import Prefix
from ragjax.schedule.requests import Requests
from ragjax.schedule.state import Inquired, RequestState

PREFETCH = 0.25
"""Share of the pool's pages that loads for waiting requests may take."""

AHEAD = 8
"""Waiting requests that are looked after, in the order in which they will start."""

BACKGROUND = 8
"""Background requests that run at a time."""

WORTH = 64
"""Tokens that `moved` has to save beside `prefix`, which is exact, where a request left its strategy to the engine."""

A = TypeVar("A", bound=Allocation)


class Preview(Allocation):
    """An allocation that finds and takes nothing: the prefill that was given it ends where it would reserve."""

    def reserve(self, tokens: int, spare: int = 0) -> Run:
        raise OutOfPages("a look ahead reserves nothing")


@dataclass(frozen=True)
class Allocations:
    """Makes what requests will hold; nothing is held yet."""

    requests: Requests
    cache: KnowledgeCache
    limits: StepLimits
    stages: tuple[int, ...]

    def make(self, state: RequestState, kind: type[A]) -> A:
        in_front = self.requests.in_front
        return kind(
            self.cache,
            tenant=state.request.tenant,
            label=state.id,
            decode_tokens=state.decode_tokens,
            limits=self.limits,
            stages=self.stages,
            cold=state.may_load,
            forced=min(state.forced_tokens, state.decode_tokens),
            spare=len(in_front),
            alone=not in_front,
        )


class Admission:
    """Starts waiting requests in the order of the queue.

    A request that would compute what a running one is computing waits until that one has kept it; others may start
    meanwhile. One that was overtaken as often as a request bears waits for nobody.

    Args:
        max_running: most requests that run at a time, background ones apart (0: as many as have room).
    """

    def __init__(self, requests: Requests, cache: KnowledgeCache, allocations: Allocations, *, max_running: int = 0):
        self._requests = requests
        self._cache = cache
        self._allocations = allocations
        self._max_running = max_running
        # who computes KV now, by the names of its pieces: from the start of a request until its prompt is computed, or
        # until it fails, leaves, or is to start again; then one of those that waited computes the rest
        self._owners: dict[bytes, RequestState] = {}
        self._prefetch = Prefetch(requests, cache, allocations)
        self._presence = None if cache.inquiry is None else Presence(cache.inquiry, requests, self._prefetch)
        self._foreseen = (0, 0)  # changes of queue and tree at the last look ahead

    def start_waiting(self) -> Iterator[tuple[RequestState, Exception | None]]:
        """Start waiting requests while they have room; yields each with the error that it failed by, if any.

        Generations whose documents are not final join the queue while few prompts are to be computed. Background
        requests are started, a few at a time, while no other runs or waits.
        """
        requests = self._requests
        for offered in requests.take_offered():
            requests.arrive(offered)
        while not requests.blocked and (not self._max_running or len(requests.in_front) < self._max_running):
            self._owners = {name: one for name, one in self._owners.items() if one.running and not one.decoding}
            state = requests.queue.next(self._may_start)
            if state is None:  # all wait for what others compute
                break
            missing = state.look().missing if state.awaited else {}
            started, error = self._try(state)
            requests.blocked = not (started or error)
            if not requests.blocked:
                found = sum(tokens for name, tokens in state.awaited.items() if name not in missing)
                requests.counters.awaited_tokens += found
                requests.leave_queue(state)
                if not state.decoding:
                    self._owners = dict.fromkeys(state.look().missing, state) | self._owners
                yield state, error
        while requests.background and not len(requests.queue) and not requests.in_front:
            if len(requests.running) >= BACKGROUND:
                return
            state = requests.background[0]
            started, error = self._try(state)
            if not (started or error):
                return
            requests.background.popleft()
            yield state, error

    def prefetch(self) -> None:
        queue = self._requests.queue
        if self._presence is not None and len(queue):
            for state in queue.ahead(AHEAD):
                self._presence.is_known(state)
        seen = queue.changes, self._cache.tree.generation
        if self._cache.tiered and len(queue) and seen != self._foreseen:
            self._foreseen = seen
            self._prefetch.run(queue.ahead(AHEAD))

    def _may_start(self, state: RequestState) -> bool:
        """True if no running request is computing what it would compute, and the shared tier has answered for it."""
        if self._presence is not None and not self._presence.is_known(state):
            return False
        awaited: dict[bytes, int] = {}
        if self._owners and state.may_load:
            awaited = {name: tokens for name, tokens in state.look().missing.items() if name in self._owners}
        self._requests.counters.awaits += bool(awaited) and not state.awaited
        state.awaited = {**state.awaited, **awaited}
        return not awaited

    def _try(self, state: RequestState) -> tuple[bool, Exception | None]:
        """True if it started, or why it never will. A request counts as one look-up, however often it is tried."""
        again, state.tried = state.tried, False
        try:
            self._weigh(state)
            with self._cache.uncounted() if again else nullcontext():
                started = self._start(state)
        except Exception as error:
            state.stop()
            return False, error
        state.tried = not started
        return started, None

    def _weigh(self, state: RequestState) -> None:
        """Serve a request that left its strategy to the engine by `prefix` where another one would compute more.

        Where both compute as much, chunks are computed for later requests by the other one.
        """
        prompt, strategy, cache, tenant = state.prompt, state.strategy, self._cache, state.request.tenant
        if not state.by_default or state.times.admitted:
            return
        if strategy.name == MOVED:
            saved = Prefix().work(prompt, cache, tenant) - strategy.work(prompt, cache, tenant)
            if saved < WORTH:  # exact, and as fast
                state.strategy = Prefix()
                self._requests.look_up(state)
            return
        if strategy.exact or not prompt.chunks:
            return
        exact = Prefix().work(state.plain, cache, tenant)
        own = strategy.work(prompt, cache, tenant, state.ratio)
        if exact >= own:
            return
        reason = f"{strategy.name} would have computed {own} tokens of the prompt, and prefix {exact}"
        state.strategy, state.ratio, state.prompt = Prefix(), None, state.plain
        state.notices.append(f"{reason}: the request ran prefix, which is exact")
        self._requests.look_up(state)

    def _start(self, state: RequestState) -> bool:
        """Match and reserve for a request; False if it has to wait for others to end.

        Raises:
            RequestError: if it is alone and still has no room.
        """
        vacated = False
        while True:
            began = time.perf_counter()
            try:
                state.start(self._allocations.make(state, Allocation))
            except OutOfPages as error:
                if not state.background and stop_background(self._requests):
                    continue
                if self._requests.running or self._cache.loading:
                    return False
                if not vacated:  # what it would reuse may lie scattered over more pages than it needs
                    self._cache.vacate()
                    vacated = True
                    continue
                param = "messages" if state.request.prompt is None else "prompt"
                raise RequestError(str(error), param=param, code="context_length_exceeded") from error
            self._requests.start(state)
            state.times.start(began, time.perf_counter() if state.ready else None)
            return True


def stop_background(requests: Requests) -> bool:
    """Take back what background requests hold; True if there were any."""
    running = requests.in_background
    for state in reversed(running):
        requests.restart(state)
    return bool(running)


class Prefetch:
    """Brings KV of waiting requests to the device while they queue, once for each, as long as there are pages for it.

    A look ahead is what the request itself will do when it starts, up to its first reservation: the strategy matches,
    and what lies in host memory or on disk is ordered. Nothing is held afterwards: a load holds its own pages until it
    is done, then its KV may leave as any other's.
    """

    def __init__(self, requests: Requests, cache: KnowledgeCache, allocations: Allocations):
        self._requests = requests
        self._cache = cache
        self._allocations = allocations
        self._limit = int(PREFETCH * cache.pool.capacity)
        self._seen: tuple[RequestState, ...] = ()

    def run(self, ahead: Iterable[RequestState]) -> None:
        states = tuple(ahead)
        if states == self._seen:
            return
        self._seen = states
        if all(state.ahead is not None for state in states):
            return
        with ExitStack() as held:  # what a nearer one needs stays, while a farther one's is brought
            for state in states:
                self._look(state, state.ahead is None, held)

    def look_again(self, state: RequestState, load: bool) -> None:
        """Look ahead for one request, even if that was done before. load: order what is found."""
        with ExitStack() as held:
            self._look(state, load, held)

    def _look(self, state: RequestState, load: bool, held: ExitStack) -> None:
        preview = held.enter_context(closing(self._allocations.make(state, Preview)))
        taken_pages = sum(other.ahead or 0 for other in self._requests.queue)
        room = self._limit - taken_pages if load and state.may_load else 0
        state.ahead = state.ahead or 0
        with self._cache.looking_ahead(room) as taken, suppress(Exception):  # the request itself will tell
            prefill = state.strategy.prefill(state.whole_prompt, preview, state.ratio)
            with suppress(OutOfPages):
                next(prefill)
            prefill.close()
            state.ahead += taken()


class Presence:
    """Holds back requests for a moment while the shared tier is asked what it has of them.

    A look ahead raises questions; when they are answered, the next look goes on from what was found. What was found is
    ordered once nothing more can be asked without it, so that a prefix comes in one piece.
    """

    def __init__(self, inquiry: Inquiry, requests: Requests, prefetch: Prefetch):
        self._inquiry = inquiry
        self._requests = requests
        self._prefetch = prefetch

    def is_known(self, state: RequestState) -> bool:
        if not state.may_load:
            return True
        if state.inquiry is None:
            state.inquiry = Inquired(time.monotonic() + self._inquiry.patience)
        asked = state.inquiry
        if asked.over:
            return True
        if time.monotonic() >= asked.until:
            self._requests.counters.late += 1
            asked.over = True
        elif not (asked.open and self._inquiry.waits(asked.open)):
            asked.open = self._raised(state, False) or self._raised(state, True)
            asked.over = not asked.open
        return asked.over

    def _raised(self, state: RequestState, load: bool) -> Collection[str]:
        self._inquiry.asked()  # what others asked is not this request's
        self._prefetch.look_again(state, load)
        return self._inquiry.asked()
