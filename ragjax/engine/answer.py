"""The answer to a request, put together from what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ragjax.core import Answer, Plan, SegmentReport, Timings
from ragjax.quality.contract import Contract
from ragjax.schedule.state import RequestState


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
            *(contract.notices_of(state.prompt.preprocessed) if _by_setting(state, contract) else ()),
            *(f"attention not by {refused}" for refused in fallbacks),
        ),
        recompute_ratio=state.ratio,
        predicted=contract.predicted(state.setting, state.exact_to == "full", state.chunks, state.prompt.preprocessed),
        scores=state.scores,
        figures={**plan.figures, **_figures(state)},
        facts=state.facts,
        compression=state.compression,
        kept=_kept(state, plan),
    )


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
    """Whether the contract's setting served a request: those for a graph have a default of their own."""
    return state.by_default and (contract.faulted or not state.has_graph)


def _figures(state: RequestState) -> dict[str, float]:
    """What there is to tell of its decoding: pauses, and tokens of a step if any were proposed."""
    found, lookup = {}, state.lookup
    if state.times.pauses:
        found["pauses"] = float(state.times.pauses)
    if lookup is not None and lookup.proposed:
        found["tokens_per_step"] = lookup.per_step
    return found
