"""Selective recompute: cached chunks side by side, and chosen tokens recomputed (FusionRAG, section 2.2.2, eq. 9).

A selective strategy is a source of KV and a selector of tokens: `Selective("fusion+blend", Fused(), Deviation())`. To
add a selection, write a `Selector`; what it measures comes back from the passes it yields:

    class Newest(Selector):
        def choose(self, stitched, count):
            yield from ()  # no pass
            return stitched.chunks[-count:]
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import Kind, Measure, Move, Pass, Prefill, Prompt, Results, Tokens
from ragjax.reuse.base import LOGITS, Allocation, segments_of
from ragjax.reuse.exact import Prefix
from ragjax.reuse.head import is_plain
from ragjax.reuse.stitch import Isolated, SourceStrategy, Stitched, led, prepare

RATIO = 0.15
"""Share of the chunks' tokens that the papers recompute (FusionRAG, section 5)."""

Choice = Generator[Pass | Move, Results, Tokens]
"""A selector at work: it yields passes and returns the chosen token indexes, whole numbers [n]."""


class Selector(ABC):
    """A way to choose tokens.

    measures: what its passes may measure. early_end: as `Strategy.early_end`.
    """

    measures: frozenset[Measure] = frozenset()
    early_end: int = 0

    def scratch(self, prompt: Prompt) -> int:
        return 0

    @abstractmethod
    def choose(self, stitched: Stitched, count: int) -> Choice:
        """Choose `count` of the chunks' tokens, or fewer; `count` lies strictly between none and all."""


class Selective(SourceStrategy):
    """A strategy of a source and a selector; it recomputes `RATIO` of the chunks' tokens unless a request says else."""

    selective = True

    def __init__(self, name: str, source: Isolated, selector: Selector):
        self.name = name
        self.measures = LOGITS | selector.measures
        self.early_end = selector.early_end
        self.preprocessed = source.preprocessed
        self._leads = source.leads
        self.steady = not source.leads
        self._source = source
        self._selector = selector

    def work(self, prompt: Prompt, cache: KnowledgeCache, tenant: str, ratio: float | None = None) -> int:
        """The chosen tokens besides; the passes that choose them are not counted."""
        count = share(RATIO if ratio is None else ratio, chunk_tokens(prompt))
        return super().work(prompt, cache, tenant) + count

    def chunk_prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None) -> Prefill:
        if self._leads:
            prompt = led(prompt, allocation.cache, allocation.tenant)
            if is_plain(prompt):  # all chunks are kept as the prompt has them
                return (yield from Prefix().prefill(prompt, allocation))
        total = chunk_tokens(prompt)
        count = share(RATIO if ratio is None else ratio, total)
        choosing = 0 < count < total
        scratch = self._selector.scratch(prompt) if choosing else 0
        stitched = yield from prepare(prompt, allocation, self._source, repaired=count, scratch=scratch)
        if not count:
            results = yield stitched.ask()
            return stitched.plan(stitched.spans, results[Measure.LOGITS][0])
        chosen = stitched.chunks
        if choosing:
            chosen = yield from _choice(self._selector, stitched, count)
        if scratch:
            allocation.free(stitched.scratch)
        last = stitched.repair(chosen)
        results = yield last
        return stitched.plan(last.spans, results[Measure.LOGITS][0], chosen)


def _choice(selector: Selector, stitched: Stitched, count: int) -> Choice:
    """Run a selector and check its choice: at most `count` of the chunks' tokens, int32, ascending and distinct."""
    name = f"{type(selector).__name__}.choose"
    work = selector.choose(stitched, count)
    if not isinstance(work, Generator):
        raise TypeError(f"{name} must be a generator: write `yield from ()` in it if it needs no pass")
    given = yield from work
    if not isinstance(given, np.ndarray) or given.ndim != 1 or not np.issubdtype(given.dtype, np.integer):
        kind = f"{given.dtype} {list(given.shape)}" if isinstance(given, np.ndarray) else type(given).__name__
        raise TypeError(f"{name} must return token indexes, a NumPy array [n] of whole numbers, not {kind}")
    chosen = np.unique(given)
    if len(chosen) > count:
        raise ValueError(f"{name} chose {len(chosen)} tokens; at most {count} may be recomputed")
    strange = np.setdiff1d(chosen, stitched.chunks)
    if len(strange):
        raise ValueError(f"{name} chose token {strange[0]}, which is in no chunk: choose some of stitched.chunks")
    return chosen.astype(np.int32)


def chunk_tokens(prompt: Prompt) -> int:
    return sum(len(prompt.segments[i]) for i in segments_of(prompt, Kind.CHUNK))


def share(ratio: float, tokens: int) -> int:
    """Tokens that a ratio in [0, 1] stands for: ceil(ratio * tokens), for what the ratio says in decimal."""
    return min(tokens, math.ceil(ratio * tokens - 1e-9))


def shares(raw_SN: NDArray[np.float64]) -> NDArray[np.float64]:
    sum_S1 = raw_SN.sum(1, keepdims=True)
    share_SN: NDArray[np.float64] = np.divide(raw_SN, sum_S1, out=np.zeros_like(raw_SN), where=sum_S1 > 0)
    return share_SN


def top(scores: NDArray[np.floating], candidates: Tokens, count: int) -> Tokens:
    """The `count` candidates (token indexes, ascending, int32 [n]) of highest score, ascending; the earlier of ties."""
    best = np.argsort(-np.asarray(scores, np.float64), kind="stable")[:count]
    return candidates[np.sort(best)]
