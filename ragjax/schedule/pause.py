"""Decoding requests that gave their pages to older ones: they are paused, and go on before any new request starts.

Requests are admitted by what they need at once, and their tails grow page by page. When no page can be had by evicting,
one running request gives way: one in the background, then a speculation, then whoever arrived last, if need be the one
that asks. The oldest one never gives way to others, so some request always comes to its end. (vLLM preempts in the same
order; its preempted requests are computed again, or swapped out as here: Kwon et al., SOSP 2023, section 4.5.)
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import OutOfPages, RequestError, Run, Span
from ragjax.reuse.base import Allocation
from ragjax.schedule import decoding
from ragjax.schedule.admission import Allocations, stop_background
from ragjax.schedule.requests import Requests, age
from ragjax.schedule.state import Paused, Phase, RequestState

_log = logging.getLogger(__name__)

RECOMPUTED = "its KV made room for older requests and was computed again"
"""Notice of a request that was stopped while the copies of paused requests had no room."""


class Copier(Protocol):
    """Whoever owns the pool's arrays: it copies pages, int32 [P], to host memory, and puts copies into pages."""

    @property
    def lost(self) -> bool: ...

    def download(self, pages: NDArray[np.int32]) -> object: ...

    def restore(self, pages: NDArray[np.int32], copies: Any) -> None: ...


def suspend(state: RequestState, copier: Copier) -> None:
    """Copy all KV that its next tokens read to host memory, bit for bit, and give every page back.

    Only between two steps, once its prompt is computed. `restore` or `RequestState.stop` comes next.
    """
    assert state.plan is not None and state.allocation is not None
    spans = (*state.plan.spans, Span(np.zeros(0, np.int32), state.plan.tail))
    pages = np.unique(np.array([page for span in spans for page in span.run.pages], np.int32))
    state.paused = Paused(pages, copier.download(pages), state.allocation.decode_tokens)
    state.allocation.close()
    state.allocation = None
    state.phase = Phase.PAUSED
    state.times.pauses += 1


def restore(state: RequestState, allocation: Allocation, copier: Copier) -> None:
    """Copy the KV of a paused request into pages of its own; it goes on as if nothing had been.

    What it read from the cache is its own copy now; its next tokens are the same, whatever its strategy measured.
    OutOfPages: there is no room now; it stays paused.
    """
    assert state.paused is not None and state.plan is not None
    paused = state.paused
    try:
        run = allocation.reserve(len(paused.pages) * allocation.page_size, allocation.spare)
        copier.restore(np.array(run.pages, np.int32), paused.copies)
    except BaseException:
        allocation.close()
        raise
    state.paused = None
    allocation.decode_tokens, allocation.cold = paused.decode_tokens, False
    state.phase, state.allocation = Phase.RUNNING, allocation
    moved = dict(zip(paused.pages.tolist(), run.pages, strict=True))

    def relocated(run: Run) -> Run:
        return replace(run, pages=tuple(moved[page] for page in run.pages))

    spans = tuple(replace(span, run=relocated(span.run)) for span in state.plan.spans)
    state.plan = replace(state.plan, spans=spans, tail=relocated(state.plan.tail))
    state.tail_N = state.plan.tail.slots(state.held.page_size)
    if state.rows is not None:
        state.rows.relocate(moved, state.held.page_size)


class Pauses:
    def __init__(self, requests: Requests, cache: KnowledgeCache, allocations: Allocations, copier: Copier):
        self._requests = requests
        self._cache = cache
        self._allocations = allocations
        self._copier = copier

    @property
    def pages(self) -> int:
        return sum(len(state.paused.pages) for state in self._requests.paused if state.paused is not None)

    def make_room(self, tokens: int = 1) -> None:
        """Find slots for the next `tokens` tokens of every decoding request, oldest first; the youngest give way.

        Call it between steps. A request fails if no page can be had for it even though nobody else runs.
        """
        requests = self._requests
        for state in sorted(requests.in_front or requests.running, key=_rank):
            while state.running and state.decoding and not self._grown(state, tokens):
                victim = max(requests.running, key=_rank)
                if victim is state and len(requests.running) == 1:
                    if self._cache.give_up():
                        continue
                    requests.fail(state, self._refusal(state))
                    break
                self._give_way(victim)

    def _grown(self, state: RequestState, tokens: int) -> bool:
        """True if it has the slots; it gives up what it proposed before anybody gives way for it."""
        rows = state.rows
        try:
            decoding.grow(state, tokens + (0 if rows is None else rows.proposed))  # all of them may be accepted
            return True
        except OutOfPages:
            if rows is None or not rows.proposed:
                return False
        rows.shorten()
        return self._grown(state, tokens)

    def _give_way(self, state: RequestState) -> None:
        notice = RECOMPUTED
        if state.background or not state.decoding:
            self._requests.counters.stops += 1
            notice = RECOMPUTED if len(state.generated) else ""
        elif self.pages < self._cache.pool.capacity:
            try:
                suspend(state, self._copier)
            except Exception as error:
                self._not_copied(error)
            else:
                self._requests.pause(state)
                return
        self._start_again(state, notice)
        if not state.background:
            self._requests.blocked = True  # until somebody ends: it would be stopped again

    def _not_copied(self, error: Exception) -> None:
        """A request's KV could not be copied, for want of memory as a rule: it is nobody else's affair."""
        if self._copier.lost:
            raise error
        _log.error("the KV of a request was not copied, and is computed again", exc_info=error)

    def _start_again(self, state: RequestState, notice: str) -> None:
        self._requests.restart(state)
        if notice and notice not in state.notices:
            state.notices.append(notice)

    def resume(self) -> None:
        """Let paused requests go on, oldest first, while there is room; those that never can fail."""
        requests = self._requests
        while requests.paused:
            state = requests.paused[0]
            try:
                restore(state, self._allocations.make(state, Allocation), self._copier)
            except OutOfPages:
                if stop_background(requests):
                    continue
                if requests.running or self._cache.loading:
                    return
                requests.fail(state, self._refusal(state))
                continue
            except Exception as error:
                self._not_copied(error)
                self._start_again(state, RECOMPUTED)
                continue
            requests.start(state)
            requests.counters.resumes += 1

    def _refusal(self, state: RequestState) -> RequestError:
        param = "messages" if state.request.prompt is None else "prompt"
        pool = self._cache.pool
        pinned = pool.capacity - pool.reclaimable_pages
        return RequestError(
            f"the answer has no room to grow: {pinned} of {pool.capacity} pages are in use. "
            "Lower max_tokens, or give the device cache more memory",
            param=param,
            code="context_length_exceeded",
        )


def _rank(state: RequestState) -> tuple[bool, bool, float, str]:
    """Requests in the order in which they get pages: the last one gives way first."""
    return state.background, state.speculative, *age(state)
