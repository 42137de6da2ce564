"""Steps on the device, and what their results mean for the requests that have rows in them.

A step is launched without waiting for it. While the device works, the engine's thread does all else, text included.
Then the step lands: its tokens are waited for, and become the rows of the next step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import Answer, Chosen, DeviceFullError, Draw, Notice, Plan, Timings
from ragjax.engine.depkv import KeptKV
from ragjax.quality.contract import Contract
from ragjax.runner.runner import Runner, StepResult
from ragjax.runner.sampling import Logits, Sampled
from ragjax.schedule import decoding
from ragjax.schedule.batch import Batch
from ragjax.schedule.requests import Requests, age
from ragjax.schedule.rows import PendingMove
from ragjax.schedule.scheduler import Scheduler
from ragjax.schedule.state import RequestState

_log = logging.getLogger(__name__)

TICK = 0.005
"""Seconds between two looks at loads that were given up and have not ended yet."""

REPEATED = Notice("the answer repeated itself and was ended; with max_tokens it is not", "repeated")


@dataclass(frozen=True)
class Flight:
    """A step that was launched."""

    batch: Batch
    began: float
    outcome: StepResult
    logits: Logits | None  # of `batch.logit_rows`
    wanted: Sequence[bool]  # which of them are wanted on the host
    sampled: Sampled | None


@dataclass(eq=False)
class Execution:
    """Carries out moves and steps, and has requests go on with what came back.

    A fault of a step hits its members alone; after the loss of the device's memory all running requests start again.
    """

    requests: Requests
    runner: Runner
    cache: KnowledgeCache
    scheduler: Scheduler
    contract: Contract
    kept: KeptKV
    _flight: Flight | None = None
    _untold: list[RequestState] = field(default_factory=list)  # those with tokens whose text is not made yet

    def move(self) -> None:
        """Carry out moves and compactions of requests whose KV has arrived, until each has rows to compute."""
        for state in self.scheduler.moving():
            while state.can_move and (move := state.move) is not None:
                try:
                    if isinstance(move, PendingMove):
                        self.runner.move(move.source_N, move.target_N, move.offset_N, move.layers)
                    else:
                        asked, source_N, offset_N = move.asked, move.source_N, move.offset_N
                        measured = (asked.query_LWHD, asked.mass_LN)
                        self.runner.compact(asked.compression, source_N, offset_N, move.target_B, *measured)
                except Exception as error:
                    if self._failed([state], error):
                        return
                    break
                self._guarded(state, partial(self._go_on, moved=True))

    def launch(self, batch: Batch) -> None:
        assert self._flight is None
        began, waited_s = time.perf_counter(), self.runner.waited_s
        try:
            outcome, logits, sampled = self.runner.step(batch.step), None, None
            if batch.logit_rows:
                logits, draws = self.runner.predict(outcome, batch.logit_rows), decoding.draws(batch)
                if any(draw is not None for draw in draws):
                    sampled = self.runner.sample(logits, [draw or Draw() for draw in draws])
            wanted = [part.reads_logits for part in batch.parts for _ in part.logit_rows]
            self._flight = Flight(batch, began, outcome, logits, wanted, sampled)
        except Exception as error:
            self._failed(batch.states, error)
        for state in batch.states:
            state.times.note_compiled(self.runner.waited_s - waited_s)

    def land(self) -> bool:
        flight, self._flight = self._flight, None
        if flight is None:
            return False
        batch = flight.batch
        try:
            measured = flight.outcome.measured
            logits = None if flight.logits is None else flight.logits.read(flight.wanted)
            chosen = None if flight.sampled is None else flight.sampled.read()
            if all(state.background for state in batch.states):
                flight.outcome.wait()  # a request that comes meanwhile waits for one step of theirs, not for several
        except Exception as error:
            self._failed(batch.states, error)
            return True
        elapsed = time.perf_counter() - flight.began
        self.requests.counters.steps += 1
        self.scheduler.preload.note(batch, elapsed)
        for state in batch.states:
            state.times.stop_waiting(flight.began)  # for a stage; if it waits for the next one, that is noted later
            state.times.compute_ms += elapsed * 1e3
        for state in batch.deliver(logits, measured, flight.outcome.x_TE, chosen):
            self._guarded(state, self._advance)
        return True

    def begin(self, state: RequestState) -> None:
        self._guarded(state, self._go_on)

    def tell(self) -> None:
        untold, self._untold = self._untold, []
        for state in untold:
            if not state.ended:
                self._guarded(state, self._tell)

    def recover(self, error: Exception) -> None:
        """Make the device's memory anew, which was lost, and start all running requests again.

        Those before their first token are computed again; others continue after the tokens that went out, with what
        host memory and disk hold (RAGCache, section 6: fault tolerance).
        """
        requests = self.requests
        requests.counters.device_losses += 1
        _log.error("the device's memory was lost; running requests start again", exc_info=error)
        # each is put in front of the line: the oldest last
        for state in sorted(requests.running, key=lambda state: state.times.admitted, reverse=True):
            requests.retry(state, "the device's memory was lost; the request was computed again", error)
        self.kept.drop_all("the KV was lost with the device's memory: compute it again")
        self.runner.reset()
        self.cache.give_up()
        while self.cache.loading:
            self.cache.poll()
            time.sleep(TICK)
        self.cache.lose_device()

    def _failed(self, states: Sequence[RequestState], error: Exception) -> bool:
        """A step failed; True if the device's memory was lost with it.

        Its members start again, each in steps of its own. So the one at fault shows: it fails alone, with its error,
        and the others go on. One that finds the device full by itself ends: it would take the pool from all others.
        """
        error = self.runner.explained(error)
        if self.runner.lost:
            for state in states if isinstance(error, DeviceFullError) else ():
                if state.suspect and len(states) == 1:
                    self.requests.fail(state, error)
                state.suspect = True
            self.recover(error)
            return True
        if not states:
            return False
        self.requests.counters.step_failures += 1
        _log.error("a step of %d requests failed", len(states), exc_info=error)
        for state in sorted(states, key=age, reverse=True):  # put back in front of the line, the oldest last
            if state.suspect and len(states) == 1:
                self.requests.fail(state, error)
                continue
            state.suspect = True
            self.requests.retry(state, "a step failed; the request was computed again", error)
        return False

    def _guarded(self, state: RequestState, work: Callable[[RequestState], object]) -> None:
        try:
            work(state)
        except Exception as error:
            if self.runner.lost:
                self._failed([state], error)
            else:
                self.requests.fail(state, self.runner.explained(error))

    def _advance(self, state: RequestState) -> None:
        if state.plan is None:
            self._go_on(state, moved=True)
            return
        state.suspect = False  # it is past the place where a step failed
        if state.wants_scores:
            decoding.take_scores(state)
            self._take_first(state)
            return
        assert state.rows is not None
        rows = state.rows
        for i in range(len(rows.chosen)):
            if not self._take(state, rows.chosen[i], rows.logits.get(i)):
                break

    def _go_on(self, state: RequestState, moved: bool = False) -> None:
        if moved:
            state.advance({})
        if state.plan is not None:
            self._prompt_done(state)
        elif state.tells_early:
            assert state.known is not None
            state.first = self._first_of(state, state.known)
            self._push(state, state.first, state.known)
            self._tell(state)  # before the prompt is compressed

    def _prompt_done(self, state: RequestState) -> None:
        assert state.plan is not None and state.generation is not None
        if state.allocation is not None and state.allocation.gave_back:
            self.requests.free()
        if state.logits is None:
            state.logits = state.plan.logits
        if state.generation.over:  # with the first token, or before it was started again to be compressed
            self._finish(state)
        elif state.first is not None:
            decoding.decode(state, state.first.token)
        elif not decoding.score(state):
            self._take_first(state)
        elif not state.times.first_token:
            self._note_first_token(state)  # it is chosen already: scores are none of the time that it took

    def _take_first(self, state: RequestState) -> None:
        assert state.plan is not None
        self._take(state, self._first_of(state, state.plan.logits), state.plan.logits)

    def _first_of(self, state: RequestState, logits_V: NDArray[np.float32]) -> Chosen:
        """The token behind the prompt: the step that computed the prompt's last row chose it.

        KV that was held needs no step (`engine/depkv.py`): its logits are on the host.
        """
        if state.chosen is not None:
            return state.chosen
        return self.runner.sample(self.runner.upload_logits([logits_V]), [decoding.first_draw(state)]).read()[0]

    def _take(self, state: RequestState, chosen: Chosen, logits_V: NDArray[np.float32] | None) -> bool:
        """Go on with the next token, or end; whether the one behind it is there already."""
        assert state.generation is not None
        self._push(state, chosen, logits_V)
        if state.generation.over:
            self._finish(state)
            return False
        self._untold.append(state)
        if state.rows is not None and decoding.accept(state, chosen.token):
            return True
        decoding.decode(state, chosen.token)
        return False

    def _push(self, state: RequestState, chosen: Chosen, logits_V: NDArray[np.float32] | None) -> None:
        """The next token is chosen by these logits, which are kept for a replay."""
        assert state.generation is not None
        if state.wants_logits and state.shadowed is not None:
            assert logits_V is not None
            state.shadowed.append(logits_V)
        state.generation.push(chosen)

    def _finish(self, state: RequestState) -> None:
        self._tell(state)
        decoding.note_proposal(state)
        answer = make_answer(state, self.contract, self.runner.fallbacks)
        state.keep()
        tenant, tokens = state.request.tenant, state.prompt.tokens
        kept = [self.cache.keep_longer(tenant, tokens[:n], seconds) for n, seconds in state.kept if seconds]
        if not all(kept):
            told = "the prompt is not kept longer: other prompts take all the room for it"
            answer = replace(answer, notices=(*answer.notices, told))
        self.requests.finish(state, answer)

    def _tell(self, state: RequestState) -> None:
        assert state.generation is not None
        for delta in state.generation.deltas():
            state.sink(delta if state.cited else replace(delta, sources=state.sources))
            state.cited = True
        if not state.times.first_token:
            self._note_first_token(state)

    def _note_first_token(self, state: RequestState) -> None:
        times = state.times
        times.first_token = time.perf_counter()
        if not state.background:  # such a one waits for all others
            ttft_ms = (times.first_token - times.arrival) * 1e3
            self.requests.counters.overhead_ms_last = ttft_ms - times.retrieve_ms - times.compute_ms


def make_answer(state: RequestState, contract: Contract, fallbacks: Iterable[str]) -> Answer:
    """The answer of a request whose generation has ended. fallbacks: why attention ran by other backends."""
    plan, generation = state.plan, state.generation
    assert plan is not None and generation is not None and generation.finish_reason is not None
    tokens, reports, scores = state.prompt.tokens, state.reports, state.scores
    if state.request.echo:
        if state.request.continuation is not None:
            tokens = np.concatenate([tokens, state.request.continuation])
        reports = (replace(reports[0], tokens=len(tokens), recomputed=len(tokens) - reports[0].reused),)
        given = generation.echo(tokens, np.zeros((0, 1), np.float32) if scores is None else scores)
        generation.logprobs, scores = [*given], None
    cached = sum(report.reused for report in reports)
    times, figures, lookup = state.times, {**plan.figures}, state.lookup
    waited_s = times.lacked_ms / 1e3
    if times.pauses:
        figures["pauses"] = float(times.pauses)
    if lookup is not None and lookup.proposed:
        figures["tokens_per_step"] = lookup.per_step
    exact, fused = state.exact_to == "full", state.prompt.preprocessed and not plan.unfused
    predicted = None
    if exact or not state.lossy:
        predicted = contract.predicted(state.setting, exact, state.prompt.chunks, fused)
    return Answer(
        text=generation.text,
        finish_reason=generation.finish_reason,
        stop=generation.stop,
        tokens=tuple(generation.tokens),
        prompt_tokens=len(tokens),
        cached_tokens=cached,
        written=max(0, max((n for n, _ in state.kept), default=len(tokens)) - cached),
        strategy=state.strategy.name,
        exact_to=state.exact_to,
        segments=reports,
        timings=Timings(
            retrieve=times.retrieve_ms,
            search_exposed=times.retrieve_ms,
            compile=times.lacked_ms + times.compiled_ms,
            load=times.load_ms,
            prefill=times.prefill_ms,
            ttft=times.ttft_ms,
            total=(time.perf_counter() - times.arrival) * 1e3,
        ),
        logprobs=tuple(generation.logprobs),
        logits=state.logits if state.request.want_logits else None,
        notices=(
            *state.notices,
            *_unlike_measured(state, plan),
            *(() if state.sampler is None else state.sampler.notices),
            *(contract.notices if state.picked or (state.by_default and contract.faulted) else ()),
            *(f"attention not by {refused}" for refused in fallbacks),
            *([f"programs were compiled for this request, which waited {waited_s:.1f} s for them"] if waited_s else []),
            *([REPEATED] if generation.round else []),
        ),
        recompute_ratio=state.ratio,
        predicted=predicted,
        scores=scores,
        figures=figures,
        facts=state.facts,
        sources=state.sources,
        compression=state.compression,
        kept=None if state.compression is None else len(state.prompt) if plan.kept is None else plan.kept,
        prompt=state.prompt.tokens if state.request.rag is not None and state.request.rag.detail else None,
    )


def _unlike_measured(state: RequestState, plan: Plan) -> Iterator[str]:
    if state.exact_to == "full":
        return
    if state.picked and state.lossy:
        rounded = "some that was found lost precision at rest (--at-rest raw keeps it)"
        yield f"the quality budget was measured with KV at full precision, and {rounded}"
    if state.strategy.preprocessed and plan.unfused:
        found = f"{plan.unfused} of {state.prompt.chunks} chunks were not preprocessed"
        yield f"{found}: the answer is farther from full attention than {state.strategy.name} was measured to be"
