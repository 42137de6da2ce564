"""Generations that began before their documents were final: what becomes of them in the engine's thread."""

from __future__ import annotations

from collections.abc import Callable

from ragjax.core import Answer
from ragjax.engine.counters import Counters
from ragjax.schedule.speculation import Reserve
from ragjax.schedule.state import RequestState


class Guesses:
    """Speculations that wait for room, and the end of those that were right or wrong.

    arrive: have a request wait to be started. settle: end a request that has its answer. drop: end one without a word.
    """

    def __init__(
        self,
        counters: Counters,
        arrive: Callable[[RequestState], None],
        settle: Callable[[RequestState, Answer], None],
        drop: Callable[[RequestState], None],
    ):
        self._counters = counters
        self._arrive = arrive
        self._settle = settle
        self._drop = drop
        self._reserve: Reserve[RequestState] = Reserve()

    @property
    def waiting(self) -> list[RequestState]:
        """Those that wait for room, oldest first."""
        return self._reserve.waiting

    def add(self, state: RequestState) -> None:
        """Have it begin when there is room."""
        self._reserve.add(state)

    def remove(self, state: RequestState) -> bool:
        """Let it wait no longer; whether it did."""
        return self._reserve.remove(state)

    def start(self, pool: int) -> None:
        """Have those begin that there is room for. pool: requests whose prompts are not computed (`Reserve.take`)."""
        for state in self._reserve.take(pool):
            self._arrive(state)

    def confirm(self, state: RequestState) -> None:
        """Its documents are the final ones: it is a request like any other, and starts if it has not."""
        waited = self.remove(state)
        self._counters.speculations["skipped" if waited else "hit"] += 1
        state.speculative = False
        if waited and not state.ended:
            self._arrive(state)
        elif state.answer is not None:
            self._settle(state, state.answer)

    def note_unlikely(self) -> None:
        """One is not begun, since it would not pay."""
        self._counters.speculations["unlikely"] += 1

    def refute(self, state: RequestState) -> None:
        """Its documents are not the final ones."""
        if self.remove(state):
            self._counters.speculations["skipped"] += 1
        else:
            self._counters.speculations["wrong"] += 1
            self._counters.speculative_wasted_tokens += state.computed
        self._drop(state)
