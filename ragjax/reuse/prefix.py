"""prefix: the exact prefix of the knowledge tree (RAGCache, section 5.1), at token granularity.

KV computed on exactly the same tokens before it is reused as it is; everything behind the first difference is
computed. The outcome is full attention's.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import Conversation, Pass, Plan, Prompt, Span, Tokens, Want
from ragjax.reuse.base import Holding, lease_spans, orders, report, usable


class Prefix:
    """Reuses the longest cached prefix and keeps what it computes, answer included."""

    name = "prefix"
    wants = frozenset({Want.LOGITS})
    selective = False

    def keys(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        """The path of the whole prompt, cut at its segments."""
        return cache.keys_of(prompt.tokens, prompt.starts, tenant)

    def carry_out(self, prompt: Prompt, holding: Holding, ratio: float | None = None) -> Conversation:
        """One pass over the tokens behind the prefix; the last token is always computed, for its logits."""
        n, tokens = len(prompt), prompt.tokens
        lease = holding.prefix(tokens[: n - 1])
        runs, hit = usable(lease, n + holding.decode_tokens, holding.slots, holding.page_size)
        run = holding.reserve(n - hit + holding.decode_tokens)
        fresh = run.slice(0, n - hit, holding.page_size)
        spans = (*lease_spans(lease, 0, runs=runs), Span.consecutive(hit, fresh))
        results = yield Pass(orders(hit, n), orders(hit, n), spans, self.wants, (n - 1,))
        holding.cache.admit_prefix(lease, tokens, hit, fresh, prompt.starts, prompt.public)
        tail = run.slice(n - hit, run.length, holding.page_size)
        reused = {i: min(max(hit - start, 0), len(prompt.segments[i])) for i, start in enumerate(prompt.starts[:-1])}
        tiers = {i: lease.tier(prompt.starts[i], prompt.starts[i] + used) for i, used in reused.items()}
        exact_to: Literal["full"] | None = None if lease.lossy and hit else "full"
        return Plan(spans, tail, exact_to, report(prompt, reused, tiers), results[Want.LOGITS][0])

    def finish(self, prompt: Prompt, plan: Plan, generated: Tokens, holding: Holding) -> None:
        """Keep the finished turn, so that the next one finds it."""
        context = holding.prefix(prompt.tokens)
        if not context.complete or not len(generated):
            return
        run = plan.tail.slice(0, len(generated), holding.page_size)
        tokens = np.concatenate([prompt.tokens, generated])
        holding.cache.admit_prefix(context, tokens, len(prompt), run, (), prompt.public)
