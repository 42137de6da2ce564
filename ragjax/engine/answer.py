"""The answer to a request, put together from what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ragjax.core import Answer, Divergence, Plan, SegmentReport, Timings
from ragjax.quality.contract import Contract
from ragjax.reuse.budget import EXPECTED, RATIO
from ragjax.schedule.state import RequestState

AS_FITTED = "the KV of preprocessed chunks at full precision, and not all of it"
"""What quality was measured with, and what a prompt lacks of it."""


def reports_of(state: RequestState) -> tuple[SegmentReport, ...]:
    """The account of every segment of the prompt as it was asked."""
    assert state.plan is not None
    added = len(state.reader.prompt.segments) - len(state.prompt.segments)  # what it said before a restart
    return state.plan.reports[: len(state.plan.reports) - added]


def make_answer(state: RequestState, contract: Contract, fallbacks: Iterable[str]) -> Answer:
    """The answer of a request whose generation has ended.

    fallbacks: why attention did not run by the preferred backends.
    """
    plan, generation, reports = state.plan, state.generation, reports_of(state)
    assert plan is not None and generation is not None and generation.finish_reason is not None
    return Answer(
        text=generation.text,
        finish_reason=generation.finish_reason,
        tokens=tuple(generation.tokens),
        prompt_tokens=len(state.prompt),
        cached_tokens=sum(report.reused for report in reports),
        strategy=state.strategy.name,
        exact_to=state.exact_to,
        segments=reports,
        timings=_timings(state),
        logprobs=tuple(generation.logprobs),
        logits=state.logits if state.request.want_logits else None,
        notices=(
            *state.notices,
            *_missed(state, plan),
            *_unmeasured(state, plan, contract),
            *(() if state.sampler is None else state.sampler.notices),
            *(contract.notices_of(state.prompt.preprocessed) if _by_setting(state, contract) else ()),
            *(f"attention not by {refused}" for refused in fallbacks),
        ),
        recompute_ratio=plan.figures.get(RATIO, state.ratio),
        predicted=_predicted(state, plan, contract),
        scores=state.scores,
        figures={**plan.figures, **_figures(state)},
        facts=state.facts,
        compression=state.compression,
        kept=_kept(state, plan),
        prompt=state.prompt.tokens if state.request.rag is not None and state.request.rag.detail else None,
    )


def _missed(state: RequestState, plan: Plan) -> tuple[str, ...]:
    """What an answer has to say if no ratio below 1 is known to keep its budget."""
    ratio = plan.figures.get(RATIO)
    if ratio is not None and EXPECTED not in plan.figures:
        redone = (f"quality was measured with {AS_FITTED} was found: all chunks were recomputed",)
        lossy = ("quality is not promised: KV of the prompt's beginning lost precision at rest",)
        return (redone if ratio == 1.0 else ()) + (lossy if state.exact_to != "full" else ())
    if ratio != 1.0:
        return ()
    kl = None if state.request.rag is None else state.request.rag.kl
    return (f"no recompute ratio below 1 is forecast to keep KL within {kl:g}: all was recomputed",)


def _unmeasured(state: RequestState, plan: Plan, contract: Contract) -> tuple[str, ...]:
    """What an answer has to say if its setting was measured with KV that its chunks should have, and do not."""
    if not _by_setting(state, contract) or not contract.budgeted or state.exact_to == "full":
        return ()
    if plan.fused or not contract.takes_preprocessed(state.setting):
        return ()
    return (f"the quality budget was measured with {AS_FITTED} was found (python -m ragjax.preprocess computes it)",)


def _predicted(state: RequestState, plan: Plan, contract: Contract) -> Divergence | None:
    """Divergence to expect; none but 0 of a request with a budget, whose figures have what is forecast.

    Of recognised passages nothing was measured.
    """
    exact = state.exact_to == "full"
    if (RATIO in plan.figures or state.prompt.recognised) and not exact:
        return None
    return contract.predicted(state.setting, exact, state.chunks, state.prompt.preprocessed and plan.fused)


def _kept(state: RequestState, plan: Plan) -> int | None:
    if state.compression is None:
        return None
    return len(state.prompt) if plan.kept is None else plan.kept


def _timings(state: RequestState) -> Timings:
    times = state.times
    return Timings(
        retrieve=times.retrieve_ms,
        search_exposed=times.retrieve_ms,
        load=times.load_ms,
        prefill=(times.first_token - times.admitted) * 1e3 - times.load_ms,
        ttft=(times.first_token - times.arrival) * 1e3,
        total=(time.perf_counter() - times.arrival) * 1e3,
    )


def _by_setting(state: RequestState, contract: Contract) -> bool:
    """Whether the contract's setting served a request: one for a graph, or with a budget, has a default of its own."""
    return state.by_default and (contract.faulted or not (state.has_graph or state.has_budget))


def _figures(state: RequestState) -> dict[str, float]:
    """What there is to tell of its decoding: pauses, and tokens of a step if any were proposed."""
    found, lookup = {}, state.lookup
    if state.times.pauses:
        found["pauses"] = float(state.times.pauses)
    if lookup is not None and lookup.proposed:
        found["tokens_per_step"] = lookup.per_step
    return found
