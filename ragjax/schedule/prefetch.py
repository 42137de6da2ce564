"""KV of waiting requests is brought to the device while they queue, of the next ones first.

A look ahead is what the request itself will do when it starts, up to its first reservation: the strategy matches, and
what lies in host memory or on disk is ordered. Nothing is held afterwards: a load holds its own pages until it is done,
then its KV may leave as any other's. `give_up` takes the pages of such loads back, as those of cancelled requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import OutOfPages, Run
from ragjax.reuse.base import Allocation
from ragjax.schedule.state import RequestState

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
    """Looks ahead once for each waiting request, in turn, as long as there are pages for it.

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
