"""Requests that wait for KV to be loaded: they go on when it is there, or compute it instead."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

from ragjax.cache.cache import KnowledgeCache
from ragjax.schedule.state import RequestState

_log = logging.getLogger(__name__)


class LoadWatch:
    """Looks after loads in every iteration of the engine's thread.

    fallbacks: requests that computed KV because its load "failed" or was "slow"; counted here.
    timeout: seconds that a request waits for KV before it computes it. restart: starts a request again, with a notice.
    """

    def __init__(
        self,
        cache: KnowledgeCache,
        fallbacks: Counter[str],
        timeout: float,
        restart: Callable[[RequestState, str], None],
    ):
        self._cache = cache
        self._fallbacks = fallbacks
        self._timeout = timeout
        self._restart = restart
        self._stalled: float | None = None

    def check(self, running: Iterable[RequestState]) -> None:
        """Requests whose KV arrived go on; those whose KV will not, or not in time, compute it instead."""
        now = time.perf_counter()
        for state in [state for state in running if not state.decoding]:
            assert state.allocation is not None
            if state.allocation.broken is not None:
                notice = f"KV could not be loaded and was computed instead: {state.allocation.broken}"
                self._compute_instead(state, "failed", notice)
            elif state.allocation.ready:
                state.times.stop_waiting(now)
            elif state.times.waits_since is None:
                state.times.waits_since = now
            elif now - state.times.waits_since > self._timeout:
                notice = f"loading KV took over {self._timeout:g} s; it was computed instead"
                self._compute_instead(state, "slow", notice)

    def check_stall(self, running: bool, waiting: bool) -> bool:
        """Whether loads that are not done in time gave back their pages, for requests that wait while none runs."""
        now = time.perf_counter()
        if running or not waiting or not self._cache.loading:
            self._stalled = None
        elif self._stalled is None:
            self._stalled = now
        elif now - self._stalled > self._timeout and self._cache.give_up():
            self._stalled = None
            return True
        return False

    def _compute_instead(self, state: RequestState, reason: str, notice: str) -> None:
        if not self._fallbacks[reason]:
            _log.warning("%s", notice)
        self._fallbacks[reason] += 1
        state.may_load = False  # a disk that always fails is not asked again for this request
        self._restart(state, notice)
