"""Requests in progress, without an engine around them."""

from __future__ import annotations

from ragjax.core import Prompt, Request
from ragjax.reuse.base import Allocation, Strategy
from ragjax.schedule.state import RequestState


class Started(RequestState):
    """A request with an allocation made beforehand, under whose label it goes; `begin` starts it."""

    def __init__(self, prompt: Prompt, strategy: Strategy, allocation: Allocation, ratio: float | None = None):
        super().__init__(allocation.label, Request(), prompt, strategy, ratio)
        self._given = allocation

    def begin(self) -> None:
        """Start with the allocation."""
        self.start(self._given)
