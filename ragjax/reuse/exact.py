"""full and prefix, which are exact: all tokens, or all behind the longest cached prefix (RAGCache, section 5.1).

KV computed on exactly the same tokens before it is reused as it is; everything behind the first difference is
computed. The outcome is full attention's.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Causal, Outlook
from ragjax.cache.match import Totals
from ragjax.cache.node import raw_of
from ragjax.core import Measure, Pass, Plan, Prefill, Prompt, Span, Tokens
from ragjax.reuse.base import Allocation, Strategy, indices, match_spans, report


class Full(Strategy):
    """Computes every token of the prompt; every other strategy is compared with it."""

    name = "full"
    exact = True

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        n = len(prompt)
        run = allocation.reserve_with_tail(n)
        spans = (Span.consecutive(0, run.slice(0, n, allocation.page_size)),)
        results = yield Pass(indices(0, n), indices(0, n), spans, self.measures, (n - 1,))
        tail = run.slice(n, run.length, allocation.page_size)
        return Plan(spans, tail, "full", report(prompt, {}), results[Measure.LOGITS][0])


class Prefix(Strategy):
    """Reuses the longest cached prefix and keeps what it computes, answers too, as far as `keep` of the cache says."""

    name = "prefix"
    exact = True

    def outlook(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        return Outlook((leading_part(prompt, tenant, prompt.kept(cache.keep)),))

    def work(self, prompt: Prompt, cache: KnowledgeCache, tenant: str, ratio: float | None = None) -> int:
        return super().work(prompt, cache, tenant) + len(prompt) - prompt.kept(cache.keep)

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        """One pass over the tokens behind the prefix; the last token is always computed, for its logits."""
        n, tokens = len(prompt), prompt.tokens
        match = allocation.prefix(tokens[: n - 1])
        runs, hit = allocation.leading(match, n + allocation.decode_tokens)
        run = allocation.reserve_with_tail(n - hit)
        fresh = run.slice(0, n - hit, allocation.page_size)
        spans = (*match_spans(match, 0, runs=runs), Span.consecutive(hit, fresh))
        results = yield Pass(indices(hit, n), indices(hit, n), spans, self.measures, (n - 1,))
        kept = prompt.kept(allocation.cache.keep)
        if hit < kept:
            kept_run = fresh.slice(0, kept - hit, allocation.page_size)
            allocation.cache.admitter.admit_prefix(
                match, tokens[:kept], hit, kept_run, cuts(prompt, kept), min(prompt.public, kept), Totals(hit, n - hit)
            )
        tail = run.slice(n - hit, run.length, allocation.page_size)
        reused = {i: min(max(hit - start, 0), len(prompt.segments[i])) for i, start in enumerate(prompt.starts[:-1])}
        tiers = {i: match.tier(prompt.starts[i], prompt.starts[i] + used) for i, used in reused.items()}
        exact_to: Literal["full"] | None = None if match.lossy and hit else "full"
        return Plan(spans, tail, exact_to, report(prompt, reused, tiers), results[Measure.LOGITS][0])

    def finish(self, prompt: Prompt, plan: Plan, generated: Tokens, allocation: Allocation) -> None:
        """Keep the finished turn, so that the next one finds it.

        Its tokens count as computed at the cost of the prompt's: the price of a step for each of the few tokens that an
        answer has would make it worth more than any document (RAGCache's formula 3 is about what a prefill computes).
        """
        if prompt.kept(allocation.cache.keep) < len(prompt):
            return
        context = allocation.prefix(prompt.tokens, quiet=True)
        if not context.complete or not len(generated):
            return
        run = plan.tail.slice(0, len(generated), allocation.page_size)
        tokens = np.concatenate([prompt.tokens, generated])
        totals = Totals(sum(part.reused for part in plan.reports), sum(part.recomputed for part in plan.reports))
        allocation.cache.admitter.admit_prefix(context, tokens, len(prompt), run, (), prompt.public, totals)


def leading_part(prompt: Prompt, tenant: str, length: int) -> Causal:
    return Causal(raw_of(prompt.tokens[:length]), cuts(prompt, length), tenant, min(prompt.public, length))


def cuts(prompt: Prompt, length: int) -> tuple[int, ...]:
    return tuple(start for start in prompt.starts if start <= length)
