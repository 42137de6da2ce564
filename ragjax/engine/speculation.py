"""Speculative retrieval (`--speculate`): dynamic speculative pipelining (RAGCache, section 5.3, Algorithm 2).

A search runs in stages. After each one a generation with the documents known so far is offered, which starts while few
requests have prompts to be computed (`Requests.take_offered`). When a later stage knows other documents, it is refuted,
and these are offered. Two cases that Algorithm 2 leaves open: documents that found no room start later, if they are
still the latest known ones; the final documents start whatever else runs (case 3 of the proof of Theorem 5.1).

All of it runs in the thread that searches; the engine's thread starts and ends the generations.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from functools import partial

from ragjax.core import Answer, Event, Hit, Request, RequestError
from ragjax.engine.loop import Loop
from ragjax.engine.prepare import Preparation
from ragjax.schedule.state import RequestState, Sink


class Withheld:
    """A sink that keeps events back until they are released. Any thread may call it."""

    def __init__(self, sink: Sink, finish: Callable[[Answer], Answer]):
        self._sink = sink
        self._finish = finish
        self._events: list[Event | BaseException] = []
        self._open = False
        self._lock = threading.Lock()

    def __call__(self, event: Event | BaseException) -> None:
        with self._lock:
            if self._open:
                self._pass(event)
            else:
                self._events.append(event)

    @property
    def failed(self) -> bool:
        with self._lock:
            return any(isinstance(event, BaseException) for event in self._events)

    def release(self) -> None:
        """Let out what came, and from now on everything at once."""
        with self._lock:
            self._open = True
            for event in self._events:
                self._pass(event)
            self._events = []

    def _pass(self, event: Event | BaseException) -> None:
        self._sink(self._finish(event) if isinstance(event, Answer) else event)


@dataclass(eq=False)
class Pipeline:
    """One request between its arrival and its place in the engine's queue. stages: of its search (0: it is whole)."""

    loop: Loop
    preparation: Preparation
    request: Request
    sink: Sink
    arrival: float
    stages: int
    place: object = None
    _state: RequestState | None = None
    _held: Withheld | None = None  # keeps the text of the generation that is offered
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)  # over _state and _closed
    _began: float = 0.0
    _ended: float = 0.0

    def run(self) -> None:
        self._began = time.perf_counter()
        composer, latest = self.preparation.composer, tuple[Hashable, ...]()
        stages = composer.search(self.request, self.stages) if self.stages else None
        if stages is None:
            self._put(self.preparation.state(self.request, self.sink, self.arrival), self._enqueue)
            return
        for stage in stages:
            composer.check()
            # what tells the prompts of two stages apart; another order is another prompt
            documents = tuple((hit.chunk.id, hit.chunk.behind, hit.chunk.tokens.tobytes()) for hit in stage.hits)
            if not stage.final:
                if documents != latest:
                    self._refute()
                    self._offer(stage.hits)
                latest = documents
                continue
            self._ended, held = time.perf_counter(), self._held
            if held is not None and held.failed:
                self._held = held = None
            if held is not None and documents == latest:
                self._put(self._state, self._confirm)
                held.release()
            else:
                self._refute()
                self._put(self._state_of(stage.hits, self.sink), self._enqueue)

    def close(self) -> None:
        """End whatever was begun, if it has not ended; nothing begins any more. Any thread may call it."""
        with self._lock:
            self._closed = True
            if self._state is not None:
                self.loop.cancel(self._state)

    def _refute(self) -> None:
        """End the generation that is offered, if there is one: it has other documents."""
        if self._held is not None:
            with self._lock:
                state, self._state, self._held = self._state, None, None
            assert state is not None
            self.loop.post(partial(self.loop.requests.refute, state))

    def _offer(self, hits: tuple[Hit, ...]) -> None:
        if not hits:
            return
        held = Withheld(self.sink, self._finish)
        try:
            state = self._state_of(hits, held)
        except RequestError:  # too long, maybe; the final documents will tell
            return
        if state.strategy.steady:
            self._held = held
            self._put(state, self._start_offered)

    def _put(self, state: RequestState | None, how: Callable[[RequestState], None]) -> None:
        assert state is not None
        with self._lock:
            if self._closed:
                raise CancelledError
            how(state)
            self._state = state

    def _enqueue(self, state: RequestState) -> None:
        self.loop.enqueue(state, self.place)

    def _start_offered(self, state: RequestState) -> None:
        """Offer it to be started when there is room; it is in no queue until it is confirmed."""
        state.speculative = True
        self.loop.post(partial(self.loop.requests.offered.append, state))

    def _confirm(self, state: RequestState) -> None:
        state.times.confirmed = time.perf_counter()
        self.loop.post(partial(self.loop.requests.confirm, state), state, self.place)

    def _state_of(self, hits: tuple[Hit, ...], sink: Sink) -> RequestState:
        retrieve_ms = (time.perf_counter() - self._began) * 1e3
        made = replace(self.preparation.composer.compose(self.request, hits), retrieve_ms=retrieve_ms)
        return self.preparation.state(replace(self.request, grounded=made), sink, self.arrival)

    def _finish(self, answer: Answer) -> Answer:
        """The answer of a generation that began before its documents were confirmed, with the client's times."""
        assert self._state is not None
        searched = (self._ended - self._began) * 1e3
        begun = (self._state.times.admitted - self._began) * 1e3
        timings = replace(
            answer.timings,
            retrieve=searched,
            search_exposed=min(begun, searched),
            ttft=self._state.times.ttft_ms,
            total=max(answer.timings.total, self._state.times.ttft_ms),
        )
        return replace(answer, timings=timings)
