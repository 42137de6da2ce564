"""After a failed program took the device's pool with it: requests go on with what host memory and disk hold.

Source: RAGCache, section 6 (fault tolerance).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from ragjax.cache.cache import KnowledgeCache
from ragjax.engine.fault import RESTARTS
from ragjax.runner.runner import Runner
from ragjax.schedule.state import RequestState

_log = logging.getLogger(__name__)

TICK = 0.005
"""Seconds between two looks at loads that were given up and have not ended yet."""


def restart_all(
    running: Iterable[RequestState],
    error: Exception,
    restart: Callable[[RequestState, str], None],
    fail: Callable[[RequestState, Exception], None],
) -> None:
    """Start all running requests again, or end those for which it was tried too often.

    Requests before their first token are computed again; others continue after the tokens that went out.
    """
    _log.error("the device's memory was lost; running requests start again", exc_info=error)
    # each is put in front of the line: the oldest last
    for state in sorted(running, key=lambda state: state.times.admitted, reverse=True):
        if state.restarts >= RESTARTS:
            fail(state, error)
        else:
            restart(state, "the device's memory was lost; the request was computed again")


def renew(runner: Runner, cache: KnowledgeCache) -> None:
    """Make the pool again, and have the cache forget what lay in the old one; nobody holds pages of it any more."""
    runner.reset()
    cache.give_up()
    while cache.loading:
        cache.poll()
        time.sleep(TICK)
    cache.lose_device()
