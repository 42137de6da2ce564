"""The head of a prompt: all that stands before its first chunk, system prompt and earlier turns.

It sees no chunk, so its KV is full attention's whatever a strategy does behind it. It is kept as an exact prefix, which
every strategy reads. A prompt without chunks is all head: strategies of chunks serve it as `prefix` does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Outlook
from ragjax.cache.match import Match, Totals
from ragjax.core import Kind, Plan, Prefill, Prompt, RequestError, Run, Span, Tokens
from ragjax.core.tiers import Tier
from ragjax.reuse.base import Allocation, Strategy, segments_of
from ragjax.reuse.exact import Prefix, cuts, leading_part


class ChunkStrategy(Strategy):
    """A strategy of chunks; a prompt without any is served as `prefix` does, and its finished turn is kept."""

    @abstractmethod
    def chunk_outlook(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Outlook: ...

    @abstractmethod
    def chunk_prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None) -> Prefill: ...

    def outlook(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        if is_plain(prompt):
            return Prefix().outlook(prompt, cache, tenant)
        return self.chunk_outlook(prompt, cache, tenant)

    def work(self, prompt: Prompt, cache: KnowledgeCache, tenant: str, ratio: float | None = None) -> int:
        behind = [i for i in segments_of(prompt, Kind.QUERY) if prompt.starts[i] >= head_length(prompt)]
        leading = leading_part(prompt, tenant, head_length(prompt))
        head = sum(cache.peek(Outlook((leading,))).missing.values())
        return head + sum(len(prompt.segments[i]) for i in behind)

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        if is_plain(prompt):
            return Prefix().prefill(prompt, allocation)
        return self.chunk_prefill(prompt, allocation, ratio)

    def finish(self, prompt: Prompt, plan: Plan, generated: Tokens, allocation: Allocation) -> None:
        """Answers over chunks depend on all of them at once and are not kept."""
        if is_plain(prompt):
            Prefix().finish(prompt, plan, generated, allocation)


def is_plain(prompt: Prompt) -> bool:
    return all(segment.kind in (Kind.SYSTEM, Kind.QUERY) for segment in prompt.segments)


def system_length(prompt: Prompt) -> int:
    """Tokens of the leading system segments; RequestError: one comes after another kind."""
    system = segments_of(prompt, Kind.SYSTEM)
    if system != tuple(range(len(system))):
        raise RequestError("system segments come first in a prompt", param="prompt", code="invalid_value")
    return prompt.starts[len(system)]


def head_length(prompt: Prompt) -> int:
    return prompt.starts[_segments(prompt)]


def match_head(prompt: Prompt, allocation: Allocation) -> tuple[Match, Match]:
    """The match on the head, and the match on the system prompt alone, behind which chunks are kept."""
    system, length = system_length(prompt), head_length(prompt)
    matched = allocation.prefix(prompt.tokens[:length])
    return matched, matched if system == length else allocation.prefix(prompt.tokens[:system], quiet=True)


def cut_head(spans: Iterable[Span], at: int, hidden: tuple[int, int], page_size: int) -> tuple[Span, ...]:
    """Spans of a head, with consecutive indexes, for a pass in which some rows see the first `at` tokens alone.

    hidden: the indexes of those rows.
    """
    found: list[Span] = []
    for span in spans:
        seen = min(max(at - int(span.indices[0]), 0), span.run.length)
        first, rest = span.run.slice(0, seen, page_size), span.run.slice(seen, span.run.length, page_size)
        if first.length:
            found.append(replace(span, indices=span.indices[:seen], run=first))
        if rest.length:
            found.append(replace(span, indices=span.indices[seen:], run=rest, hidden=hidden))
    return tuple(found)


def keep_leading(
    prompt: Prompt,
    allocation: Allocation,
    matched: Match,
    hit: int,
    run: Run,
    length: int,
    totals: Totals | None = None,
) -> Match:
    """Admit the first `length` tokens, which lie in `run` from `hit` on; return a match on the system prompt alone."""
    tokens, public = prompt.tokens[:length], min(prompt.public, length)
    allocation.cache.admitter.admit_prefix(matched, tokens, hit, run, cuts(prompt, length), public, totals)
    return allocation.prefix(prompt.tokens[: system_length(prompt)], quiet=True)


def head_account(prompt: Prompt, matched: Match, hit: int) -> tuple[dict[int, int], dict[int, Tier | None]]:
    """Tokens of each segment of the head that were reused, of the first `hit`, and the tier they came from."""
    reused: dict[int, int] = {}
    tiers: dict[int, Tier | None] = {}
    for i in range(_segments(prompt)):
        begin, end = prompt.bounds(i)
        reused[i] = max(0, min(end, hit) - begin)
        tiers[i] = matched.tier(begin, begin + reused[i])
    return reused, tiers


def _segments(prompt: Prompt) -> int:
    kinds = (i for i, segment in enumerate(prompt.segments) if segment.kind in (Kind.CHUNK, Kind.NODE))
    return next(kinds, len(prompt.segments))
