"""streaming: attention to the first tokens and to the last ones before each row (StreamingLLM, arXiv 2309.17453).

A row sees 4 sinks and a window before it, here a share of the prompt, in whole pages: from `window` keys up to a page
more. Keys keep their places in the prompt, which lies within the model's context; the paper counts places within its
cache so that texts can be longer than that. Generated tokens see the sinks and the prompt's last window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from ragjax.core import NEVER, Measure, Pass, Plan, Prefill, Prompt, Run, Span
from ragjax.reuse.base import Allocation, Strategy, indices, report

SINKS = 4
SHARE = 0.2


class Streaming(Strategy):
    """Nothing is reused and nothing kept. share: of the prompt's tokens, the window."""

    name = "streaming"

    def __init__(self, share: float = SHARE):
        self._share = share

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        n = len(prompt)
        run, window = allocation.reserve_with_tail(n), max(1, math.ceil(self._share * n))
        spans = tuple(windowed(run, n, window, allocation.page_size))
        results = yield Pass(indices(0, n), indices(0, n), spans, self.measures, (n - 1,))
        tail = run.slice(n, run.length, allocation.page_size)
        return Plan(spans, tail, None, report(prompt, {}), results[Measure.LOGITS][0])


def windowed(run: Run, n: int, window: int, page_size: int) -> Iterator[Span]:
    """The sinks, and each page's other tokens, hidden from the rows more than `window` tokens behind its last one.

    Rows behind the prompt see what its last row does.
    """
    cuts = sorted({0, min(SINKS, n), *range(page_size, n, page_size), n})
    for begin, end in pairwise(cuts):
        first = end - 1 + window  # that must not see it
        hidden = (first, int(NEVER)) if begin and first < n else (0, 0)
        yield Span.consecutive(begin, run.slice(begin, end, page_size), 0, hidden)
