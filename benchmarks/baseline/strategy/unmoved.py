"""Reuse at stale positions: keys are read where they were rotated, while the question has its own positions.

`unmoved` is `naive` so (FusionRAG, section 1.1; DepCache's "without repositioning"): every chunk was computed alone
behind the system prompt, and all overlap there. `craft-unmoved` is `craft` so (Cache-Craft, Table 3): a chunk lies
where it stood in an earlier prompt, and the tokens that are mended have the positions of this one.
"""

from __future__ import annotations

from dataclasses import replace

from ragjax.core import Pass, Plan, Prefill, Prompt, Results, Span
from ragjax.reuse import STRATEGIES, ModelTraits
from ragjax.reuse.base import Allocation
from ragjax.reuse.craft import Craft
from ragjax.reuse.naive import Naive


class Unmoved(Naive):
    name = "unmoved"

    def chunk_prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None) -> Prefill:
        return (yield from _unmoved(super().chunk_prefill(prompt, allocation, ratio)))


class UnmovedCraft(Craft):
    def chunk_prefill(self, prompt: Prompt, allocation: Allocation, ratio: float | None) -> Prefill:
        return (yield from _unmoved(super().chunk_prefill(prompt, allocation, ratio)))


def _unmoved(prefill: Prefill) -> Prefill:
    """The same passes and plan, over spans without offsets."""
    try:
        asked = next(prefill)
        while True:
            assert isinstance(asked, Pass)
            results: Results = yield replace(asked, spans=_stale(asked.spans))
            asked = prefill.send(results)
    except StopIteration as done:
        plan: Plan = done.value
        return replace(plan, spans=_stale(plan.spans))
    finally:
        prefill.close()


def _stale(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    return tuple(replace(span, offset=0) for span in spans)


@STRATEGIES.register("unmoved")
def unmoved(model: ModelTraits) -> Unmoved:
    return Unmoved()


STRATEGIES.add("craft-unmoved", lambda model: UnmovedCraft("craft-unmoved"))
