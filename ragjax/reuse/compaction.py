"""A prefill whose KV is compressed when it is done, before anything is decoded (docs/compression.md).

It works on the finished plan of any strategy. What the strategy put into the cache stays there as it is; the tokens
that are kept are copied to pages of the request's own, and everything else is given back.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ragjax import core
from ragjax.core.compression import BY_MASS, BY_QUERIES
from ragjax.reuse.base import Allocation, Strategy

QUERIES = frozenset({core.Measure.QUERY})
MASS = frozenset({core.Measure.KEY_SCORE})


def measures_of(compression: core.Compression) -> frozenset[core.Measure]:
    return (QUERIES if compression.method in BY_QUERIES else frozenset()) | (
        MASS if compression.method in BY_MASS else frozenset()
    )


def check(compression: core.Compression, strategy: Strategy) -> None:
    method = f"compression: {compression.method}"
    if compression.method in BY_MASS and compression.heads == "each":
        reason = f"{method} looks at attention by layer, the mean over heads; choose all, or another method"
        raise core.invalid("rag.compression.heads", reason)
    if compression.method in BY_MASS and strategy.measures - {core.Measure.LOGITS}:
        advice = "choose another method, or the strategy full, prefix or naive"
        reason = f"{method} has to measure what the strategy {strategy.name} has no room to; {advice}"
        raise core.invalid("rag.compression.method", reason)


def compressed(
    prefill: core.Prefill, prompt: core.Prompt, allocation: Allocation, compression: core.Compression
) -> core.Prefill:
    """Carry a prefill out, then keep what the compression keeps of a prompt that is above its budget.

    Its slots are reserved before the first pass, so that no request stops half-way for want of pages.
    """
    size = compression.budget
    watch = _Watch(len(prompt), compression.method in BY_MASS)
    with closing(prefill):
        limits = allocation.limits  # lower while the prefill matches, so that a step has room for the window's rows
        allocation.limits = replace(limits, entries=limits.entries - limits.entries_for(compression.window, 1))
        first: core.Asked | core.Plan
        try:
            first = next(prefill)
        except StopIteration as stop:
            first = stop.value
        finally:
            allocation.limits = limits
        if isinstance(first, core.Plan) and watch.measures:
            reason = (
                f"{compression.method} measures the prompt's passes, and KV that is held needs none; choose another"
            )
            raise core.invalid("rag.compression.method", f"compression: {reason}")
        run = allocation.reserve_with_tail(size, instead=True)
        kept = run.slice(0, size, allocation.page_size)
        plan = first if isinstance(first, core.Plan) else (yield from watch.rest(prefill, first))
    yield core.Known(plan.logits)
    query_LWHD = None
    if compression.method in BY_QUERIES:
        target = kept.slice(0, compression.window, allocation.page_size)
        results = yield _window(plan, watch.position_N, target)
        query_LWHD = results[core.Measure.QUERY]
    asked = compression.asked_by(len(prompt.segments[-1]))
    yield core.Compaction(asked, len(prompt), plan.spans, kept, query_LWHD, watch.mass_LN)
    allocation.keep_only(run)
    tail = run.slice(size, run.length, allocation.page_size)
    return replace(plan, spans=(core.Span.consecutive(0, kept),), tail=tail, exact_to=None, kept=size)


def _window(plan: core.Plan, position_N: NDArray[np.int32], run: core.Run) -> core.Pass:
    """The prompt's last rows once more, for their queries. Their KV goes to slots of the request's own, since what they
    are computed into may be shared.
    """
    n = len(position_N)
    first = n - run.length
    rows = np.arange(first, n, dtype=np.int32)

    def before(span: core.Span) -> core.Span:
        return replace(span, indices=np.where(span.indices < first, span.indices, core.NEVER))

    spans = tuple(before(span) for span in plan.spans if (span.indices < first).any())
    return core.Pass(rows, position_N[rows], (*spans, core.Span.consecutive(first, run)), QUERIES)


@dataclass
class _Watch:
    """Records positions of rows, and the attention that tokens received, over a prefill's passes.

    Tokens without a row have their index as position.
    """

    tokens: int
    measures: bool
    mass_LN: NDArray[np.float32] | None = None
    position_N: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self.position_N = np.arange(self.tokens, dtype=np.int32)

    def rest(self, prefill: core.Prefill, asked: core.Asked) -> Generator[core.Asked, core.Results, core.Plan]:
        while True:
            if not isinstance(asked, core.Pass):
                results = yield asked
            else:
                self.position_N[asked.rows] = asked.positions
                results = yield replace(asked, measures=asked.measures | MASS) if self.measures else asked
                if self.measures:
                    mass_LN = results[core.Measure.KEY_SCORE]
                    self.mass_LN = mass_LN if self.mass_LN is None else self.mass_LN + mass_LN
                    results = {what: value for what, value in results.items() if what in asked.measures}
            try:
                asked = prefill.send(results)
            except StopIteration as stop:
                plan: core.Plan = stop.value
                return plan
