"""A strategy looked at from outside: how long its passes took.

A probe stands in for the strategy it wraps: it hands on every pass and result, and changes nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Outlook
from ragjax.core import Asked, Pass, Plan, Prefill, Prompt, Results, Tokens
from ragjax.reuse.base import Allocation, Strategy


@dataclass(frozen=True)
class Lap:
    """One pass or move: what it was, and when it was yielded."""

    item: Asked
    began: float

    @property
    def opens(self) -> bool:
        """Whether it is a pass that begins with the first layer."""
        return isinstance(self.item, Pass) and (self.item.layers is None or self.item.layers[0] == 0)


class Probe(Strategy):
    """Wraps a strategy for one request at a time. laps: passes and moves of the last request."""

    def __init__(self, inner: Strategy):
        self._inner = inner
        self.name, self.measures, self.selective = inner.name, inner.measures, inner.selective
        self.early_end, self.steady = inner.early_end, inner.steady
        self.laps: list[Lap] = []

    def outlook(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        return self._inner.outlook(prompt, cache, tenant)

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        self.laps = []
        conversation = self._inner.prefill(prompt, allocation, ratio)
        try:
            item = next(conversation)
            while True:
                self.laps.append(Lap(item, time.perf_counter()))
                results: Results = yield item
                item = conversation.send(results)
        except StopIteration as end:
            plan: Plan = end.value
            return plan
        finally:
            conversation.close()

    def finish(self, prompt: Prompt, plan: Plan, generated: Tokens, allocation: Allocation) -> None:
        self._inner.finish(prompt, plan, generated, allocation)

    @property
    def selection_seconds(self) -> float:
        """From the first pass to the beginning of the last one that starts at layer 0: finding what to recompute."""
        opening = [lap for lap in self.laps if lap.opens]
        return opening[-1].began - self.laps[0].began
