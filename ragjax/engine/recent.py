"""The last requests that were answered, for who looks on (`Engine.inventory`)."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

from ragjax.core import Answer, Served
from ragjax.schedule.state import RequestState

KEPT = 500
"""Requests that are remembered, of all tenants."""


class Recent:
    """What is remembered of the last requests; those in the background are left out. Any thread may read it."""

    def __init__(self) -> None:
        self._entries: deque[tuple[float, str, Served]] = deque(maxlen=KEPT)

    def add(self, state: RequestState, answer: Answer) -> None:
        """A request was answered."""
        if state.background:
            return
        ttft = state.times.ttft_ms  # the answer may have been made before its documents were final
        served = Served(0.0, answer.strategy, answer.prompt_tokens, answer.cached_tokens, ttft)
        self._entries.appendleft((time.monotonic(), state.request.tenant, served))

    def of(self, tenant: str) -> tuple[Served, ...]:
        """Requests of a tenant, newest first, each with its age now."""
        now = time.monotonic()
        return tuple(replace(served, age=now - at) for at, owner, served in self._entries.copy() if owner == tenant)
