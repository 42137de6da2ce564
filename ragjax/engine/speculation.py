"""Speculative retrieval (`--speculate`): generations that begin before their search has ended.

The decisions are those of `ragjax/schedule/speculation.py` (RAGCache, section 5.3). They are carried out in the thread
that searches; the engine's thread starts and ends the generations (`Requests.confirm`, `Requests.refute`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from functools import partial

from ragjax.core import Answer, Event, Hit, Request, RequestError
from ragjax.engine.loop import Loop
from ragjax.engine.prepare import Preparation
from ragjax.retrieval.knowledge import SearchStage
from ragjax.schedule.speculation import Decision, Odds, Speculation
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
    """One request between its arrival and its place in the engine's queue. odds: what past searches tell of it."""

    loop: Loop
    preparation: Preparation
    request: Request
    sink: Sink
    arrival: float
    stages: int
    odds: Odds
    place: object = None
    _known: list[tuple[tuple[Hashable, ...], float]] = field(default_factory=list)  # documents of each stage; its end
    _speculation: Speculation = field(default_factory=Speculation)
    _state: RequestState | None = None
    _held: Withheld | None = None
    _closed: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)  # over _state and _closed
    _began: float = 0.0
    _ended: float = 0.0

    def run(self) -> None:
        self._began = time.perf_counter()
        stages = self.preparation.composer.search(self.request, self.stages)
        if stages is None:
            self._put(self.preparation.state(self.request, self.sink, self.arrival), self._enqueue)
        else:
            self._follow(stages)

    def close(self) -> None:
        """End whatever was begun, if it has not ended; nothing begins any more. Any thread may call it."""
        with self._lock:
            self._closed = True
            if self._state is not None:
                self.loop.cancel(self._state)

    def _follow(self, stages: Iterator[SearchStage]) -> None:
        for stage in stages:
            self.preparation.composer.check()
            # what tells the prompts of two stages apart
            documents = tuple((hit.chunk.id, hit.chunk.behind, hit.chunk.tokens.tobytes()) for hit in stage.hits)
            self._known.append((documents, time.perf_counter()))
            if not stage.final:
                self._carry_out(self._speculation.stage(documents), stage.hits)
                continue
            self._ended = time.perf_counter()
            *early, (final, ended) = self._known
            self.odds.note([known == final for known, _ in early], [ended - time_s for _, time_s in early])
            if self._held is not None and self._held.failed:
                self._speculation.forget()
            self._carry_out(self._speculation.final(documents), stage.hits)

    def _carry_out(self, decision: Decision, hits: tuple[Hit, ...]) -> None:
        if decision.cancel:
            with self._lock:
                state, self._state, self._held = self._state, None, None
            if state is not None:
                self.loop.post(partial(self.loop.requests.refute, state))
        if decision.offer:
            self._offer(hits)
        if decision.start:
            self._put(self._state_of(hits, self.sink), self._enqueue)
        if decision.release:
            assert self._held is not None
            self._put(self._state, self._confirm)
            self._held.release()

    def _offer(self, hits: tuple[Hit, ...]) -> None:
        held = Withheld(self.sink, self._finish)
        try:
            state = self._state_of(hits, held)
        except RequestError:  # too long, maybe; the final documents will tell
            self._speculation.forget()
            return
        if not state.strategy.steady:
            self._speculation.forget()
            return
        if not self.odds.pays(len(self._known) - 1, self.loop.prefill_seconds(len(state.prompt))):
            self._speculation.decline()
            self.loop.post(lambda: self.loop.requests.counters.speculations.update(["unlikely"]))
            return
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
        self.loop.post(partial(self.loop.requests.offered.add, state))

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
