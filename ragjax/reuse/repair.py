"""Selective recompute: cached chunks side by side, and chosen tokens recomputed (FusionRAG, section 2.2.2, eq. 9).

A selective strategy is a source of KV and a selector of tokens: `Selective("fusion+blend", Fused(), Deviation())`. To
add a selection, write a `Selector`; what it measures comes back from the passes it yields:

    class Newest(Selector):
        def choose(self, stitched, count):
            yield from ()  # no pass
            return stitched.chunks[-count:]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.outlook import Outlook
from ragjax.core import Kind, Measure, Move, Pass, Prefill, Prompt, Results, Tokens
from ragjax.reuse.base import Allocation, segments_of
from ragjax.reuse.condense import Condensed
from ragjax.reuse.head import ChunkStrategy
from ragjax.reuse.select import share
from ragjax.reuse.stitch import LOGITS, Source, Stitched, keys, outlook, prepare

RATIO = 0.15
"""Share of the chunks' tokens that the papers recompute (FusionRAG, section 5)."""

Choice = Generator[Pass | Move, Results, Tokens]
"""A selector at work: it yields passes and returns the chosen token indexes, ascending."""


class Selector(ABC):
    """A way to choose tokens.

    measures: what its passes may measure. early_end: as `Strategy.early_end`.
    """

    measures: frozenset[Measure] = frozenset()
    early_end: int = 0

    def scratch(self, prompt: Prompt) -> int:
        """Tokens for which it needs slots while it measures (`Stitched.scratch`)."""
        return 0

    @abstractmethod
    def choose(self, stitched: Stitched, count: int) -> Choice:
        """Choose `count` of the chunks' tokens; `count` lies strictly between none and all."""


class Selective(ChunkStrategy):
    """A strategy of a source and a selector.

    ratio: share of the chunks' tokens to recompute unless a request says so, in [0, 1].
    """

    selective = True

    def __init__(self, name: str, source: Source, selector: Selector, ratio: float = RATIO):
        self.name = name
        self.ratio = ratio
        self.measures = LOGITS | source.measures | selector.measures
        self.early_end = selector.early_end
        self.condensed = isinstance(source, Condensed)
        self._source = source
        self._selector = selector

    def chunk_keys(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        """The path of the head, and each chunk as its source's candidates."""
        return keys(prompt, cache, tenant, self._source)

    def chunk_outlook(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        """The same, each chunk by itself."""
        return outlook(prompt, cache, tenant, self._source)

    def chunk_prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None) -> Prefill:
        """What is missing, the selector's passes, and one pass over the chosen tokens and the query segments."""
        total = chunk_tokens(prompt)
        count = share(self.ratio if ratio is None else ratio, total)
        choosing = 0 < count < total
        scratch = self._selector.scratch(prompt) if choosing else 0
        stitched = yield from prepare(prompt, allocation, self._source, repaired=count, scratch=scratch)
        if not count:
            results = yield stitched.ask()
            return stitched.plan(stitched.spans, results[Measure.LOGITS][0])
        chosen = stitched.chunks
        if choosing:
            chosen = yield from self._selector.choose(stitched, count)
        if scratch:
            allocation.free(stitched.scratch)
        last = stitched.repair(chosen)
        results = yield last
        return stitched.plan(last.spans, results[Measure.LOGITS][0], chosen)


def chunk_tokens(prompt: Prompt) -> int:
    """Tokens of all chunks."""
    return sum(len(prompt.segments[i]) for i in segments_of(prompt, Kind.CHUNK))
