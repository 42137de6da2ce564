"""Dynamic speculative pipelining (RAGCache, section 5.3, Algorithm 2 and Theorem 5.1): what to begin, and when.

A search runs in stages. After each one a generation with the documents known so far may begin. When a later stage knows
other documents, it is cancelled and these are offered. Offered generations start while few requests have prompts to be
computed (`max_prefill_bs` of the paper). Two cases that Algorithm 2 leaves open: documents that found no room start
later, if they are still the latest known ones; the final documents start whatever else runs (case 3 of the theorem's
proof).

Only decisions; `ragjax/engine/speculation.py` carries them out.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ragjax.core.options import MAX_PREFILL

LEARNED = 8
"""Searches that are guessed at whatever they are, before what was learned counts."""

FADES = 0.95
"""Weight of past searches, at each new one."""


@dataclass
class _Stage:
    searches: float = 0.0
    right: float = 0.0
    left_s: float = 0.0


@dataclass
class Odds:
    """Learns from past searches whether a guess pays, by stage. Any thread may call it.

    Algorithm 2 begins with whatever a stage knows. Here a generation begins only where it is expected to gain more time
    than it loses: p min(left, compute) > (1 - p) max(compute - left, 0), where p is the share of past searches whose
    documents after this stage were the final ones, `left` the mean time from this stage to the last one, and `compute`
    the time that the whole prompt takes. counted: False to begin with whatever a stage knows.
    """

    counted: bool = True
    _stages: list[_Stage] = field(default_factory=list)
    _seen: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, right: Sequence[bool], left_s: Sequence[float]) -> None:
        """A search has ended: for each stage but the last, whether it was right, and seconds from it to the last."""
        with self._lock:
            self._seen += 1
            self._stages += [_Stage() for _ in range(len(right) - len(self._stages))]
            for stage, was_right, seconds in zip(self._stages, right, left_s, strict=False):
                stage.searches = FADES * stage.searches + 1
                stage.right = FADES * stage.right + was_right
                stage.left_s = FADES * stage.left_s + seconds

    def pays(self, stage: int, compute_s: float | None) -> bool:
        with self._lock:
            if not self.counted or self._seen < LEARNED or compute_s is None or stage >= len(self._stages):
                return True
            known = self._stages[stage]
            share, left_s = known.right / known.searches, known.left_s / known.searches
        return share * min(left_s, compute_s) > (1 - share) * max(compute_s - left_s, 0.0)


T = TypeVar("T")


@dataclass(frozen=True)
class Decision:
    """Decision after a stage, to be carried out in this order.

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
        if documents == self._latest:
            return Decision()
        decision = Decision(cancel=self._offered, offer=bool(documents))
        self._latest, self._offered = documents, bool(documents)
        return decision

    def final(self, documents: tuple[Hashable, ...]) -> Decision:
        if self._offered and documents == self._latest:
            return Decision(release=True)
        return Decision(cancel=self._offered, start=True)

    def forget(self) -> None:
        """Note that the offered generation failed; its documents are not offered again before the last stage."""
        self._offered = False

    def decline(self) -> None:
        self._offered, self._latest = False, ()


class Reserve(Generic[T]):
    """Offered generations that wait for room, oldest first; of all requests together.

    limit: they start while fewer requests than this have prompts to be computed.
    """

    def __init__(self, limit: int = MAX_PREFILL) -> None:
        self.waiting: list[T] = []
        self.limit = limit

    def add(self, offered: T) -> None:
        self.waiting.append(offered)

    def remove(self, offered: T) -> bool:
        waited = any(other is offered for other in self.waiting)
        self.waiting = [other for other in self.waiting if other is not offered]
        return waited

    def take(self, pool: int) -> list[T]:
        """Take out those that start now. pool: requests whose prompts are not computed, started or not."""
        room = max(self.limit - pool, 0)
        started, self.waiting = self.waiting[:room], self.waiting[room:]
        return started
