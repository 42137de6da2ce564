"""A prompt of system, chunks and question on pages of its own, and the passes over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.kernels.masks import seen_pairs
from ragjax.core import NEVER, Run, Span
from ragjax.schedule.rows import PageTable

Int = NDArray[np.int32]


@dataclass(frozen=True)
class Pass:
    """Rows to compute over spans of keys, for one request; slot: where each row's KV goes."""

    order: Int
    position: Int
    slot: Int
    spans: tuple[Span, ...]

    @property
    def visible_pairs(self) -> int:
        """Pairs of a row and a key that it sees."""
        lengths = [len(span.indices) for span in self.spans]
        low, high = np.repeat([span.hidden for span in self.spans], lengths, axis=0).T
        return seen_pairs(self.order, np.concatenate([span.indices for span in self.spans]), low, high)


@dataclass(frozen=True)
class Layout:
    """See the module.

    tail: slots behind the question, for decoding. fresh: pages for what is recomputed.
    """

    context: int
    chunk: int
    question: int
    page: int
    first_page: int = 1

    @property
    def join(self) -> int:
        """Order of the question's first token."""
        return self.context - self.question

    @property
    def starts(self) -> list[int]:
        """First token of the system prompt and of each chunk, and the join."""
        return [0, *range(self.chunk - self.question, self.join, self.chunk), self.join]

    @property
    def runs(self) -> list[Run]:
        """Slots of the system prompt, of each chunk and of the question with its tail; each on pages of its own."""
        lengths = [*np.diff(self.starts).tolist(), self.question + self.page]
        found, page = [], self.first_page
        for length in lengths:
            count = -(-length // self.page)
            found.append(Run(tuple(range(page, page + count)), 0, length))
            page += count
        return found

    @property
    def pages(self) -> int:
        """Pages in use, those of recomputed tokens not counted."""
        return sum(len(run.pages) for run in self.runs)

    @property
    def fresh_page(self) -> int:
        """The first page behind the prompt's."""
        return self.first_page + self.pages

    def _asked(self) -> tuple[Int, Span]:
        run = self.runs[-1].slice(0, self.question, self.page)
        return indices(self.join, self.context), Span.consecutive(self.join, run)

    def full(self) -> Pass:
        """Plain causal attention over everything."""
        spans = [Span.consecutive(start, run) for start, run in zip(self.starts, self.runs[:-1], strict=False)]
        order = indices(0, self.context)
        every = (*spans, self._asked()[1])
        return Pass(order, order, np.concatenate([s.run.slots(self.page) for s in every]), every)

    def chunks(self) -> Pass:
        """System prompt and chunks, each chunk at the position right behind the system prompt, hidden from others."""
        starts, system = self.starts, self.starts[1]
        spans = [Span.consecutive(0, self.runs[0])]
        position = [indices(0, system)]
        for begin, end, run in zip(starts[1:], starts[2:], self.runs[1:], strict=False):
            spans.append(Span.consecutive(begin, run, 0, (end, self.join)))
            position.append(indices(system, system + end - begin))
        slot = np.concatenate([s.run.slots(self.page) for s in spans])
        return Pass(indices(0, self.join), np.concatenate(position), slot, tuple(spans))

    def _cached(self, stale: Int | None = None) -> list[Span]:
        """Keys of the chunks at their places in the prompt."""
        system, spans = self.starts[1], []
        for begin, run in zip(self.starts, self.runs[:-1], strict=False):
            order = indices(begin, begin + run.length)
            if stale is not None:
                order = np.where(np.isin(order, stale), NEVER, order)
            spans.append(Span(order, run, 0 if begin == 0 else begin - system))
        return spans

    def naive(self) -> Pass:
        """The question over cached chunks."""
        order, asked = self._asked()
        return Pass(order, order, asked.run.slots(self.page), (*self._cached(), asked))

    def recompute(self, share: float, seed: int = 0) -> Pass:
        """The question and `share` of the context, which goes to fresh pages; what it replaces is hidden."""
        count = round(share * self.join)
        stale = np.sort(np.random.default_rng(seed).choice(self.join, count, replace=False)).astype(np.int32)
        first = self.fresh_page
        fresh = Span(stale, Run(tuple(range(first, first + -(-count // self.page))), 0, count))
        question, asked = self._asked()
        order = np.concatenate([stale, question])
        slot = np.concatenate([fresh.run.slots(self.page), asked.run.slots(self.page)])
        return Pass(order, order, slot, (*self._cached(stale), fresh, asked))

    def table(self, spans: Sequence[Span]) -> tuple[PageTable, Int]:
        """Entries of the prompt's spans and of a tail for generated tokens, not shown yet; and the tail's slots."""
        tail = self.runs[-1].slice(self.question, self.runs[-1].length, self.page)
        hidden = Span(np.full(tail.length, NEVER, np.int32), tail)
        return PageTable([*spans, hidden], self.page), tail.slots(self.page)


def indices(begin: int, end: int) -> Int:
    """Consecutive orders."""
    return np.arange(begin, end, dtype=np.int32)
