"""KV of a prompt that outlives its request: computed once, generated from any number of times (DepCache, section 5).

    prompt = DepPrompt((LinearNode("system", s), TreeNode("Ada", paths), LinearNode("task", q)))
    with engine.compute_depkv(prompt) as kv:
        print(engine.generate_with_depkv(kv, max_tokens=32).text)

What it holds stays on the device, pinned, until it is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.lookahead import Outlook
from ragjax.core import Measure, Pass, Plan, Prefill, Prompt, RequestError, SegmentReport, Span, Timings
from ragjax.reuse.base import LOGITS, Allocation, Strategy, indices, report
from ragjax.schedule.requests import Requests


@dataclass(eq=False)
class DepKV:
    """A prompt whose KV is held."""

    prompt: Prompt = field(repr=False)  # as the strategy has the model read it
    strategy: str
    tenant: str
    plan: Plan = field(repr=False)
    allocation: Allocation = field(repr=False)
    label: str  # under which name it is held
    release: Callable[[DepKV], None] = field(repr=False)
    closed: str = ""  # why it cannot be used any more
    timings: Timings = field(default_factory=Timings)  # of the request that made it, up to its first token

    @property
    def reports(self) -> tuple[SegmentReport, ...]:
        return self.plan.reports

    def close(self) -> None:
        """Give it back; RequestError while something is generated from it."""
        self.release(self)

    def __enter__(self) -> DepKV:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class KeptKV(dict[str, DepKV]):
    """KV that outlives its request, by label; changed in the engine's thread alone."""

    def __init__(self, requests: Requests):
        self._requests = requests

    def drop(self, kv: DepKV, reason: str) -> None:
        del self[kv.label]
        kv.closed = reason
        kv.allocation.close()
        self._requests.blocked = False

    def drop_all(self, reason: str) -> None:
        for kv in list(self.values()):
            self.drop(kv, reason)


class Keeping(Strategy):
    """Another strategy, whose plan and allocation go to `keep` and outlive the request; it generates nothing."""

    reads_logits = True  # the first token of every answer is chosen by them

    def __init__(self, inner: Strategy, keep: Callable[[Plan, Allocation], None]):
        self.name, self.measures, self.selective = inner.name, inner.measures, inner.selective
        self.early_end = inner.early_end
        self._inner, self._keep = inner, keep

    def dress(self, prompt: Prompt) -> Prompt:
        return self._inner.dress(prompt)

    def outlook(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> Outlook:
        return self._inner.outlook(prompt, cache, tenant)

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        plan = yield from self._inner.prefill(prompt, allocation, ratio)
        self._keep(plan, allocation.hand_over())
        return plan


class Resumed(Strategy):
    """Goes on from KV that is held; nothing of the prompt is computed."""

    measures: frozenset[Measure] = frozenset()

    def __init__(self, kv: DepKV):
        self.name = kv.strategy
        self.kv = kv

    def prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None = None) -> Prefill:
        if self.kv.closed:
            raise RequestError(self.kv.closed, param="kv")
        plan, begin, end = self.kv.plan, len(self.kv.prompt), len(prompt)
        own = allocation.reserve_with_tail(end - begin)
        reused = (replace(r, reused=r.tokens, recomputed=0, tier="device", recomputed_at=()) for r in plan.reports)
        reports = tuple(reused)
        tail = own.slice(end - begin, own.length, allocation.page_size)
        if begin == end:
            return replace(plan, tail=tail, reports=reports)
        # it was started again: what it had said is computed behind the rest
        said = Span.consecutive(begin, own.slice(0, end - begin, allocation.page_size))
        rows, spans = indices(begin, end), (*plan.spans, said)
        results = yield Pass(rows, rows, spans, LOGITS, (end - 1,))
        reports += report(prompt, {})[len(self.kv.prompt.segments) :]
        return replace(plan, spans=spans, tail=tail, reports=reports, logits=results[Measure.LOGITS][0])
