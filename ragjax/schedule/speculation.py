"""Dynamic speculative pipelining (RAGCache, section 5.3, Algorithm 2 and Theorem 5.1): what to begin, and when.

A search runs in stages. After each one the documents known so far are offered: a generation may begin with them before
the search has ended. When a later stage knows other documents, that generation is cancelled and these are offered.
Offered generations start while few requests have prompts to be computed (`max_prefill_bs` of the paper), so that a busy
device does not work on guesses.

Two cases that Algorithm 2 leaves open: documents that found no room start later, when there is room and they are still
the latest known ones; the final documents start whatever else runs (case 3 of the theorem's proof).

Only decisions; `ragjax/engine/pipeline.py` and `ragjax/engine/loop.py` carry them out.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_PREFILL = 4
"""Requests whose prompts are not computed, below which a speculation may start (`max_prefill_bs`)."""

T = TypeVar("T")


@dataclass(frozen=True)
class Decision:
    """What to do after a stage, in this order.

    cancel: the generation that was offered has other documents: end it. offer: these documents, to start when there is
    room. start: a generation with these documents now, whatever else runs. release: the generation that was offered
    has the final documents: let its text out.
    """

    cancel: bool = False
    offer: bool = False
    start: bool = False
    release: bool = False


class Speculation:
    """One request's side of Algorithm 2: it compares the documents that its search knows after each stage.

    Documents are their ids in order; another order is another prompt.
    """

    def __init__(self) -> None:
        self._latest: tuple[Hashable, ...] = ()
        self._offered = False

    def stage(self, documents: tuple[Hashable, ...]) -> Decision:
        """A stage that is not the last one has ended."""
        if documents == self._latest:
            return Decision()
        decision = Decision(cancel=self._offered, offer=bool(documents))
        self._latest, self._offered = documents, bool(documents)
        return decision

    def final(self, documents: tuple[Hashable, ...]) -> Decision:
        """The last stage has ended."""
        if self._offered and documents == self._latest:
            return Decision(release=True)
        return Decision(cancel=self._offered, start=True)

    def forget(self) -> None:
        """What was offered failed, or could not be made; the documents are not offered again before the last stage."""
        self._offered = False

    def decline(self) -> None:
        """What was offered is not begun now; the same documents may be offered after the next stage."""
        self._offered, self._latest = False, ()


class Reserve(Generic[T]):
    """Offered generations that wait for room, oldest first; of all requests together.

    limit: they start while fewer requests than this have prompts to be computed.
    """

    def __init__(self, limit: int = MAX_PREFILL) -> None:
        self.waiting: list[T] = []
        self._limit = limit

    def add(self, offered: T) -> None:
        """Let it wait, if only until the next `take`."""
        self.waiting.append(offered)

    def remove(self, offered: T) -> bool:
        """Let it wait no longer; whether it did."""
        waited = any(other is offered for other in self.waiting)
        self.waiting = [other for other in self.waiting if other is not offered]
        return waited

    def take(self, pool: int) -> list[T]:
        """Those that start now, which wait no longer. pool: requests whose prompts are not computed, started or not."""
        room = max(self._limit - pool, 0)
        started, self.waiting = self.waiting[:room], self.waiting[room:]
        return started
