"""full: causal attention over everything, nothing read from the cache and nothing left in it. The reference."""

from __future__ import annotations

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import Conversation, Pass, Plan, Prompt, Span, Tokens, Want
from ragjax.reuse.base import Holding, orders, report


class Full:
    """Computes every token of the prompt: what every other strategy is measured against."""

    name = "full"
    wants = frozenset({Want.LOGITS})
    selective = False

    def keys(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        """It uses nothing."""
        return ()

    def carry_out(self, prompt: Prompt, holding: Holding, ratio: float | None = None) -> Conversation:
        """One pass over all tokens."""
        n = len(prompt)
        run = holding.reserve(n + holding.decode_tokens)
        spans = (Span.consecutive(0, run.slice(0, n, holding.page_size)),)
        results = yield Pass(orders(0, n), orders(0, n), spans, self.wants, (n - 1,))
        tail = run.slice(n, run.length, holding.page_size)
        return Plan(spans, tail, "full", report(prompt, {}), results[Want.LOGITS][0])

    def finish(self, prompt: Prompt, plan: Plan, generated: Tokens, holding: Holding) -> None:
        """Nothing is kept."""
