"""full: causal attention over everything; it reads nothing from the cache and keeps nothing. The reference."""

from __future__ import annotations

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import Measure, Pass, Plan, Prefill, Prompt, Span, Tokens
from ragjax.reuse.base import Allocation, Strategy, indices, report


class Full(Strategy):
    """Computes every token of the prompt; every other strategy is compared with it."""

    name = "full"
    exact = True

    def keys(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        """It uses nothing."""
        return ()

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        """One pass over all tokens."""
        n = len(prompt)
        run = allocation.reserve_with_tail(n)
        spans = (Span.consecutive(0, run.slice(0, n, allocation.page_size)),)
        results = yield Pass(indices(0, n), indices(0, n), spans, self.measures, (n - 1,))
        tail = run.slice(n, run.length, allocation.page_size)
        return Plan(spans, tail, "full", report(prompt, {}), results[Measure.LOGITS][0])

    def finish(self, prompt: Prompt, plan: Plan, generated: Tokens, allocation: Allocation) -> None:
        """Nothing is kept."""
