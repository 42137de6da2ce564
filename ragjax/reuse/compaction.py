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

from ragjax.core import (
    NEVER,
    Asked,
    Compaction,
    Compression,
    Known,
    Measure,
    Pass,
    Plan,
    Prefill,
    Prompt,
    RequestError,
    Results,
    Run,
    Span,
)
from ragjax.core.compression import BY_LAYER, BY_MASS, BY_QUERIES
from ragjax.core.passes import LayerLayout, most_containers
from ragjax.reuse.base import Allocation, Strategy

QUERIES = frozenset({Measure.QUERY})
MASS = frozenset({Measure.KEY_SCORE})


def measures_of(compression: Compression) -> frozenset[Measure]:
    return (QUERIES if compression.method in BY_QUERIES else frozenset()) | (
        MASS if compression.method in BY_MASS else frozenset()
    )


def check(compression: Compression, strategy: Strategy) -> None:
    reason, param = "", "rag.compression.method"
    if compression.method in BY_MASS and compression.heads == "each":
        reason = f"{compression.method} looks at attention by layer, the mean over heads; choose all, or another method"
        param = "rag.compression.heads"
    elif compression.method in BY_MASS and strategy.measures - {Measure.LOGITS}:
        reason = (
            f"{compression.method} has to measure what the strategy {strategy.name} has no room to; choose another "
            "method, or the strategy full, prefix or naive"
        )
    if reason:
        raise RequestError(f"compression: {reason}", param=param, code="invalid_value")


def compressed(prefill: Prefill, prompt: Prompt, allocation: Allocation, compression: Compression) -> Prefill:
    """Carry a prefill out, then keep what the compression keeps of a prompt that is above its budget.

    Its slots are reserved before the first pass, so that no request stops half-way for want of pages.
    """
    size = compression.budget
    watch = _Watch(len(prompt), compression.method in BY_MASS)
    with closing(prefill):
        limits = allocation.limits  # lower while the prefill matches, so that a step has room for the window's rows
        allocation.limits = replace(limits, entries=limits.entries - limits.entries_for(compression.window, 1))
        try:
            first = _begin(prefill)
        finally:
            allocation.limits = limits
        if isinstance(first, Plan) and watch.measures:
            reason = (
                f"{compression.method} measures the prompt's passes, and KV that is held needs none; choose another"
            )
            raise RequestError(f"compression: {reason}", param="rag.compression.method", code="invalid_value")
        room = _reserve(allocation, compression, len(prompt))
        plan = first if isinstance(first, Plan) else (yield from watch.rest(prefill, first))
    yield Known(plan.logits)
    query_LWHD = None
    if compression.method in BY_QUERIES:
        target = room.kept.slice(0, compression.window, allocation.page_size)
        results = yield _window(plan, watch.position_N, target)
        query_LWHD = results[Measure.QUERY]
    asked = compression.asked_by(len(prompt.segments[-1]))
    found = yield Compaction(asked, len(prompt), plan.spans, room.kept, query_LWHD, watch.mass_LN)
    span = _keep(allocation, room, found)
    return replace(plan, spans=(span,), tail=room.tail, exact_to=None, kept=size)


@dataclass(frozen=True)
class _Room:
    """Where kept tokens go. run: the request's own, which begins with them and ends with the tail. spare: pages that
    layers with other numbers of tokens may need behind the run's, a run each.
    """

    kept: Run
    tail: Run
    run: Run
    spare: tuple[Run, ...] = ()


def _reserve(allocation: Allocation, compression: Compression, tokens: int) -> _Room:
    size, page_size = compression.budget, allocation.page_size
    if compression.method not in BY_LAYER:
        run = allocation.reserve_with_tail(size, instead=True)
        return _Room(run.slice(0, size, page_size), run.slice(size, run.length, page_size), run)
    least = -(-size // page_size)
    most = most_containers(size, compression.window, tokens, allocation.stages[-1], allocation.reach, page_size)
    run = allocation.reserve_with_tail(least * page_size, instead=True)
    spare = tuple(allocation.reserve(page_size) for _ in range(most - least))
    pages = (*run.pages[:least], *(page for one in spare for page in one.pages))
    tail = run.slice(least * page_size, run.length, page_size)
    return _Room(Run(pages, 0, most * page_size), tail, run, spare)


def _keep(allocation: Allocation, room: _Room, found: Results) -> Span:
    if Measure.KEPT not in found:
        allocation.keep_only(room.run)
        return Span.consecutive(0, room.kept)
    page_size = allocation.page_size
    layout = LayerLayout(found[Measure.KEPT].astype(np.int32), allocation.reach)
    needed = layout.containers(page_size)
    least = len(room.kept.pages) - len(room.spare)
    allocation.keep_only(room.run, *room.spare[: needed - least])
    return Span.laid(layout, room.kept.pages[:needed], page_size)


def _begin(prefill: Prefill) -> Asked | Plan:
    try:
        return next(prefill)
    except StopIteration as stop:
        plan: Plan = stop.value
        return plan


def _window(plan: Plan, position_N: NDArray[np.int32], run: Run) -> Pass:
    """The prompt's last rows once more, for their queries. Their KV goes to slots of the request's own, since what they
    are computed into may be shared.
    """
    n = len(position_N)
    first = n - run.length
    rows = np.arange(first, n, dtype=np.int32)

    def before(span: Span) -> Span:
        return replace(span, indices=np.where(span.indices < first, span.indices, NEVER))

    spans = tuple(before(span) for span in plan.spans if (span.indices < first).any())
    return Pass(rows, position_N[rows], (*spans, Span.consecutive(first, run)), QUERIES)


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

    def rest(self, prefill: Prefill, asked: Asked) -> Generator[Asked, Results, Plan]:
        while True:
            results = yield self._asked(asked)
            try:
                asked = prefill.send(self._seen(asked, results))
            except StopIteration as stop:
                plan: Plan = stop.value
                return plan

    def _asked(self, asked: Asked) -> Asked:
        if not isinstance(asked, Pass):
            return asked
        self.position_N[asked.rows] = asked.positions
        return replace(asked, measures=asked.measures | MASS) if self.measures else asked

    def _seen(self, asked: Asked, results: Results) -> Results:
        if not (self.measures and isinstance(asked, Pass)):
            return results
        mass_LN = results[Measure.KEY_SCORE]
        self.mass_LN = mass_LN if self.mass_LN is None else self.mass_LN + mass_LN
        return {what: value for what, value in results.items() if what in asked.measures}
