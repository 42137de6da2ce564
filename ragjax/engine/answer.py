"""The answer to a request, put together from what came of it."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ragjax.core import Answer, Divergence, Plan, Timings
from ragjax.quality.contract import Contract
from ragjax.schedule.state import RequestState


def make_answer(state: RequestState, contract: Contract, fallbacks: Iterable[str]) -> Answer:
    """The answer of a request whose generation has ended.

    fallbacks: why attention did not run by the preferred backends.
    """
    plan, generation = state.plan, state.generation
    assert plan is not None and generation is not None and generation.finish_reason is not None
    return Answer(
        text=generation.text,
        finish_reason=generation.finish_reason,
        tokens=tuple(generation.tokens),
        prompt_tokens=len(state.prompt),
        cached_tokens=sum(report.reused for report in state.reports),
        strategy=state.strategy.name,
        exact_to=state.exact_to,
        segments=state.reports,
        timings=_timings(state),
        logprobs=tuple(generation.logprobs),
        logits=state.logits if state.request.want_logits else None,
        notices=(
            *state.notices,
            *_unmeasured(state, plan, contract),
            *(() if state.sampler is None else state.sampler.notices),
            *(contract.notices_of(state.prompt.preprocessed) if _by_setting(state, contract) else ()),
            *(f"attention not by {refused}" for refused in fallbacks),
        ),
        recompute_ratio=state.ratio,
        predicted=_predicted(state, plan, contract),
        scores=state.scores,
        figures={**plan.figures, **_figures(state)},
        facts=state.facts,
        compression=state.compression,
        kept=_kept(state, plan),
        prompt=state.prompt.tokens if state.request.rag is not None and state.request.rag.detail else None,
    )


def _unmeasured(state: RequestState, plan: Plan, contract: Contract) -> tuple[str, ...]:
    """Notices for a setting that was measured with other KV than was found."""
    if not _by_setting(state, contract) or not contract.budgeted or state.exact_to == "full":
        return ()
    if state.lossy:
        rounded = "some that was found lost precision at rest (--at-rest raw keeps it)"
        return (f"the quality budget was measured with KV at full precision, and {rounded}",)
    if plan.fused or not contract.takes_preprocessed(state.setting):
        return ()
    measured = "the KV of preprocessed chunks at full precision, and not all of it was found"
    return (f"the quality budget was measured with {measured} (python -m ragjax.preprocess computes it)",)


def _predicted(state: RequestState, plan: Plan, contract: Contract) -> Divergence | None:
    """Divergence to expect; of recognised passages, and of KV that lost precision at rest, nothing was measured."""
    exact = state.exact_to == "full"
    if (state.prompt.recognised or state.lossy) and not exact:
        return None
    return contract.predicted(state.setting, exact, state.prompt.chunks, state.prompt.preprocessed and plan.fused)


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
        prefill=times.prefill_ms,
        ttft=times.ttft_ms,
        total=(time.perf_counter() - times.arrival) * 1e3,
    )


def _by_setting(state: RequestState, contract: Contract) -> bool:
    """True if the contract's setting served a request: one for a graph has a default of its own."""
    return state.by_default and (contract.faulted or not state.has_graph)


def _figures(state: RequestState) -> dict[str, float]:
    """Figures of its decoding: pauses, and tokens of a step if any were proposed."""
    found, lookup = {}, state.lookup
    if state.times.pauses:
        found["pauses"] = float(state.times.pauses)
    if lookup is not None and lookup.proposed:
        found["tokens_per_step"] = lookup.per_step
    return found
