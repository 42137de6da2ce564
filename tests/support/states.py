"""Requests in progress, without an engine around them."""

from __future__ import annotations

import numpy as np

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.policy.base import LRU
from ragjax.cache.pool import PagePool
from ragjax.core import Kind, Prompt, Request, Segment
from ragjax.reuse.base import Allocation, Strategy
from ragjax.schedule.requests import Requests
from ragjax.schedule.state import RequestState, Times


def table(cache: KnowledgeCache | None = None) -> Requests:
    """A table of requests over a cache (None: one that holds nothing)."""
    return Requests(cache or KnowledgeCache(b"model", PagePool(2, 4), LRU()), max_queue=1000)


class Started(RequestState):
    """A request with an allocation made beforehand, under whose label it goes; `begin` starts it."""

    def __init__(self, prompt: Prompt, strategy: Strategy, allocation: Allocation, ratio: float | None = None):
        super().__init__(allocation.label, Request(), prompt, prompt, strategy, ratio)
        self._given = allocation

    def begin(self) -> None:
        """Start with the allocation."""
        self.start(self._given)


class Asked(RequestState):
    """A request as admission gets it, without sampling: `limit` tokens are generated, `said` before its last start.

    stuck: its KV does not arrive.
    """

    def __init__(
        self, name: str, prompt: Prompt, strategy: Strategy, limit: int, *, arrival: float, background: bool = False
    ):
        super().__init__(name, Request(background=background), prompt, prompt, strategy, times=Times(arrival))
        self.limit, self.said = limit, 0
        self.stuck = False

    @property
    def stages_ready(self) -> int:
        """Whether all KV that its next rows read is on the device."""
        return 0 if self.stuck else super().stages_ready

    @property
    def decode_tokens(self) -> int:
        """Slots needed after the prompt."""
        return self.limit

    def restart(self, notice: str) -> None:
        """As ever; what it said belongs to its prompt from here on."""
        said = np.array(self.decoded, np.int32)
        super().restart(notice)
        if len(said):
            self.prompt = Prompt((*self.prompt.segments, Segment("continued", Kind.QUERY, said)))
            self.limit, self.said, self.decoded = self.limit - len(said), self.said + len(said), []
