"""The table of live requests: where each of them stands, and how it starts again or ends.

A request is in one phase (`state.Phase`) from its arrival to its end, and every change of phase goes through this
table. It belongs to the engine's thread; other threads use `QueueLimit` alone.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import Answer, Event, OverloadError, RequestError, Served
from ragjax.core.options import MAX_PREFILL
from ragjax.core.overload import Overload
from ragjax.schedule.order import FCFS, Order, Queue
from ragjax.schedule.state import Phase, RequestState

_log = logging.getLogger(__name__)

RESTARTS = 3  # times that a request is started again, after a step failed, KV could not be loaded or a device was lost
RECENT = 500  # answered requests that are remembered, of all tenants


@dataclass
class Counters:
    """Counts of an engine since its start. They only ever grow, but for `overhead_ms_last`."""

    requests: Counter[str] = field(default_factory=Counter)  # answered ones, by strategy
    prompt_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    generated_tokens: int = 0
    dropped_tokens: int = 0  # prompt tokens that no token of the answer saw, since the prompt was compressed
    lookup_tokens: Counter[str] = field(default_factory=lambda: Counter(proposed=0, accepted=0))  # by prompt lookup
    cancelled: int = 0
    errors: int = 0
    steps: int = 0
    step_failures: int = 0  # steps that failed while the device's memory was intact
    device_losses: int = 0  # times that the device's pool was lost and made again
    load_fallbacks: Counter[str] = field(default_factory=Counter)  # KV recomputed, its load "failed" or was "slow"
    pauses: int = 0
    resumes: int = 0
    stops: int = 0  # requests that gave way before their prompt was computed
    awaits: int = 0  # requests that waited for KV which another was computing
    awaited_tokens: int = 0  # of it, tokens that they found
    late: int = 0  # requests that started before the shared tier had answered all questions about them
    # begun before their documents were final: "hit" had the final ones, "wrong" others, "skipped" found no room before
    # they were replaced or final
    speculations: Counter[str] = field(default_factory=Counter)
    speculative_wasted_tokens: int = 0  # computed for wrong ones
    overhead_ms_last: float = 0.0  # of the last request: time to its first token without retrieval and steps

    def count_answered(self, state: RequestState) -> None:
        reports = state.reports
        self.requests[state.strategy.name] += 1
        self.prompt_tokens += len(state.prompt)
        self.reused_tokens += sum(report.reused for report in reports)
        self.recomputed_tokens += sum(report.recomputed for report in reports)
        self.generated_tokens += len(state.generated)
        if state.plan is not None and state.plan.kept is not None:
            self.dropped_tokens += max(0, len(state.prompt) - state.plan.kept)
        if state.lookup is not None:
            self.lookup_tokens["proposed"] += state.lookup.proposed
            self.lookup_tokens["accepted"] += state.lookup.accepted


class QueueLimit:
    """Limits how many requests may wait (`max_queue`). Any thread may call it."""

    def __init__(self, most: int):
        self.counted: set[RequestState] = set()  # requests that wait or run, from their arrival to their end
        self._held: set[object] = set()  # places of requests that are being prepared
        self._most = most
        self._overload = Overload()
        self._lock = threading.Lock()

    def hold_place(self) -> object:
        """Hold a place for a request that is to be prepared; OverloadError: the queue is full."""
        with self._lock:
            self._check(len(self._held))
            place = object()
            self._held.add(place)
            return place

    def release_place(self, place: object) -> None:
        with self._lock:
            self._held.discard(place)

    def enter(self, state: RequestState, place: object = None) -> None:
        """Count a request from now on, in the place that was held for it. One that ended meanwhile is not counted."""
        with self._lock:
            self._held.discard(place)
            if state.ended or state in self.counted:
                return
            if not state.running:
                self._check(0)
            self.counted.add(state)
            self._overload.begin(time.perf_counter())

    def leave(self, state: RequestState) -> None:
        with self._lock:
            if state in self.counted:
                self.counted.discard(state)
                self._overload.end(time.perf_counter())

    def check_room(self) -> None:
        with self._lock:
            self._check(len(self._held))

    def _check(self, held: int) -> None:
        # with nothing running, the head of the queue counts as running
        waiting = len(self.counted) + held - max(sum(other.running for other in self.counted), 1)
        if waiting >= self._most:
            seconds = self._overload.retry_after(time.perf_counter())
            message = f"the queue is full: {waiting} requests wait; try again in {seconds:.0f} s or later"
            raise OverloadError(message, retry_after=seconds)


class Requests:
    """All live requests, by phase. lacks: tells if one has to wait for programs, which are made next."""

    def __init__(
        self,
        cache: KnowledgeCache,
        *,
        max_queue: int,
        order: Order | None = None,
        lacks: Callable[[RequestState], bool] = lambda state: False,
    ):
        # waiting
        self.unready: list[RequestState] = []  # for programs; not in the queue yet
        self.queue: Queue[RequestState] = Queue(order or FCFS())
        self.background: deque[RequestState] = deque()  # these run while no other does
        self.offered: list[RequestState] = []  # with documents that are not final; not in the queue yet
        self.max_prefill = MAX_PREFILL  # they start while fewer requests than this have prompts to be computed
        # started
        self.running: list[RequestState] = []  # in the order in which their turn comes
        self.paused: list[RequestState] = []  # oldest first; their KV is in host memory
        # ended
        self.answered: list[tuple[RequestState, Answer]] = []  # since `take_answered`

        self.limit = QueueLimit(max_queue)
        self.counters = Counters()
        self.blocked = False  # the last attempt to start one ran out of pages: retry only after pages are freed
        self.freed = False  # a running request gave pages back while the last step landed
        self._cache = cache
        self._lacks = lacks
        self._recent: deque[tuple[float, str, Served]] = deque(maxlen=RECENT)

    @property
    def live(self) -> list[RequestState]:
        return [*self.unready, *self.offered, *self.paused, *self.queue, *self.background, *self.running]

    @property
    def in_front(self) -> list[RequestState]:
        return [state for state in self.running if not state.background]

    @property
    def quiet_s(self) -> float:
        """Seconds since a request was answered that was not in the background."""
        return time.monotonic() - self._recent[0][0] if self._recent else math.inf

    @property
    def in_background(self) -> list[RequestState]:
        return [state for state in self.running if state.background]

    @property
    def unprefilled(self) -> int:
        """Requests in front whose prompts are not computed (RAGCache, Algorithm 2: `pool.size`)."""
        return len(self.queue) + sum(not state.decoding for state in self.in_front)

    def recent_of(self, tenant: str) -> tuple[Served, ...]:
        """The last answered requests of a tenant, newest first, each with its age now. Any thread may call it."""
        now = time.monotonic()
        return tuple(replace(served, age=now - at) for at, owner, served in self._recent.copy() if owner == tenant)

    def arrive(self, state: RequestState) -> None:
        """Let a request wait to be started, and tell the replacement policy what it will use.

        One whose programs are not made yet waits for these first.
        """
        if self._lacks(state):
            state.times.lacks_since = time.perf_counter()
            self.unready.append(state)
            return
        if state.background:
            self.background.append(state)
            return
        try:
            self.look_up(state)
            self.queue.add(state)
            self._cache.announce(state.id, state.strategy.keys(state.prompt, self._cache, state.request.tenant))
        except Exception as error:
            self.fail(state, error)

    def release(self) -> bool:
        ready = [state for state in self.unready if not self._lacks(state)]
        for state in ready:
            self.unready.remove(state)
            state.times.stop_lacking(time.perf_counter())
            self.arrive(state)
        return bool(ready)

    def start(self, state: RequestState) -> None:
        if state in self.paused:
            self.paused.remove(state)
        self.running.append(state)

    def leave_queue(self, state: RequestState) -> None:
        self.queue.start(state)
        self._forget(state)

    def pause(self, state: RequestState) -> None:
        self.running = [other for other in self.running if other is not state]
        self.paused = sorted([*self.paused, state], key=age)
        self.counters.pauses += 1

    def free(self) -> None:
        self.blocked, self.freed = False, True

    def restart(self, state: RequestState, notice: str = "") -> None:
        """Take back what a request holds, and let it wait to be started again before all others.

        notice: why, for its answer; empty if it only makes room for others, which may happen any number of times.
        """
        self._leave(state)
        state.restart(notice)
        self.blocked = False
        if state.background:
            self.background.appendleft(state)
        else:
            self.look_up(state)
            self.queue.put_back(state)

    def retry(self, state: RequestState, notice: str, error: Exception) -> None:
        """Start a request again after a fault, or end it with the error if that was tried too often."""
        if state.restarts >= RESTARTS:
            self.fail(state, error)
        else:
            self.restart(state, notice)

    def finish(self, state: RequestState, answer: Answer) -> None:
        if state.speculative:  # it counts once its documents are confirmed
            state.answer = answer
        else:
            self._settle(state, answer)
        self.end(state, answer)

    def fail(self, state: RequestState, error: Exception) -> None:
        if not isinstance(error, RequestError):  # such a one is the client's
            self.counters.errors += not (state.speculative or state.background)
            _log.error("request failed", exc_info=error)
        self.end(state, error)

    def end_cancelled(self) -> None:
        for state in [state for state in self.live if state.cancelled]:
            self.counters.cancelled += not (state.speculative or state.background)  # no client asked for it
            self.end(state, None)

    def end(self, state: RequestState, last: Event | BaseException | None) -> None:
        """Take a request out, give back what it holds, and tell its owner; nothing happens if it has ended."""
        if state.ended:
            return
        if state.running:
            self.free()
        self._leave(state)
        state.phase = Phase.ENDED  # before it is counted no more: `QueueLimit.enter` looks at it in another thread
        self.limit.leave(state)
        state.stop()
        if last is not None:
            state.sink(last)

    def take_answered(self) -> Iterator[tuple[RequestState, Answer]]:
        while self.answered:
            yield self.answered.pop(0)

    def take_offered(self) -> list[RequestState]:
        """Take out the generations that start now: prompts that are not computed, started or not, are few."""
        room = max(self.max_prefill - self.unprefilled, 0)
        started = self.offered[:room]
        del self.offered[:room]
        return started

    def confirm(self, state: RequestState) -> None:
        """Make a speculation a request like any other: its documents are the final ones."""
        waited = self._withdraw(state)
        self.counters.speculations["skipped" if waited else "hit"] += 1
        state.speculative = False
        if waited and not state.ended:
            self.arrive(state)
        elif state.answer is not None:
            self._settle(state, state.answer)

    def refute(self, state: RequestState) -> None:
        if self._withdraw(state):
            self.counters.speculations["skipped"] += 1
        else:
            self.counters.speculations["wrong"] += 1
            self.counters.speculative_wasted_tokens += state.computed
        self.end(state, None)

    def _leave(self, state: RequestState) -> None:
        if state.phase is Phase.RUNNING:
            self.running = [other for other in self.running if other is not state]
        elif state.phase is Phase.PAUSED:
            self.paused = [other for other in self.paused if other is not state]
        elif state in self.unready:
            self.unready.remove(state)
        elif state in self.background:
            self.background.remove(state)
        elif state in self.queue:
            self.queue.remove(state)
            self._forget(state)
            self.blocked = False
        else:
            self._withdraw(state)

    def _withdraw(self, state: RequestState) -> bool:
        waited = state in self.offered
        if waited:
            self.offered.remove(state)
        return waited

    def look_up(self, state: RequestState) -> None:
        outlook = state.strategy.outlook(state.prompt, self._cache, state.request.tenant)
        state.total, state.overtaken = len(state.prompt), 0
        state.look, state.awaited = partial(self._cache.peek, outlook), {}

    def _forget(self, state: RequestState) -> None:
        state.ahead = state.inquiry = None
        state.tried = False
        self._cache.withdraw(state.id)

    def _settle(self, state: RequestState, answer: Answer) -> None:
        self.answered.append((state, answer))
        if state.background:
            return
        self.counters.count_answered(state)
        ttft = state.times.ttft_ms  # the answer may have been made before its documents were final
        served = Served(0.0, answer.strategy, answer.prompt_tokens, answer.cached_tokens, ttft)
        self._recent.appendleft((time.monotonic(), state.request.tenant, served))


def age(state: RequestState) -> tuple[float, str]:
    return state.times.arrival, state.id
