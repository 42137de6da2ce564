"""Steps on the device, and what their results mean for the requests that have rows in them."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Answer
from ragjax.engine.answer import make_answer
from ragjax.engine.counters import Counters
from ragjax.engine.fault import Faults, note_progress
from ragjax.quality.contract import STEPS, Contract
from ragjax.runner.runner import Runner
from ragjax.schedule import decoding
from ragjax.schedule.batch import Batch
from ragjax.schedule.scheduler import Scheduler
from ragjax.schedule.state import RequestState


class Execution:
    """Carries out moves and steps, and has requests go on with what came back.

    recover: the device's memory is lost. fail: end a request with an error. answer: a request has its answer.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        contract: Contract,
        counters: Counters,
        faults: Faults,
        *,
        recover: Callable[[Exception], None],
        fail: Callable[[RequestState, Exception], None],
        answer: Callable[[RequestState, Answer], None],
    ):
        self._runner = runner
        self._scheduler = scheduler
        self._contract = contract
        self._counters = counters
        self._faults = faults
        self._recover = recover
        self._fail = fail
        self._answer = answer

    def move(self) -> None:
        """Carry out the moves of requests whose KV has arrived, until each has rows to compute."""
        for state in self._scheduler.moving():
            while state.can_move and (move := state.move) is not None:
                try:
                    self._runner.move(move.source_N, move.target_N, move.offset_N, move.layers)
                except Exception as error:
                    if self._runner.lost:
                        self._recover(error)
                        return
                    self._faults.step_failed([state], error)
                    break
                self._guarded(state, self._advance)

    def step(self, batch: Batch) -> None:
        """Compute a batch, and have its requests go on."""
        began = time.perf_counter()
        try:
            outcome = self._runner.step(batch.step)
            logits = self._runner.logits(outcome, batch.logit_rows) if batch.logit_rows else None
        except Exception as error:
            if self._runner.lost:
                self._recover(error)
                return
            self._faults.step_failed(batch.states, error)
            return
        elapsed = time.perf_counter() - began
        self._counters.steps += 1
        note_progress(batch.states)
        self._scheduler.preload.note(batch, elapsed)
        for state in batch.states:
            state.times.stop_waiting(began)  # for a stage; if it waits for the next one, that is noted later
            state.times.compute_ms += elapsed * 1e3
        for state in batch.deliver(logits, outcome.measured, outcome.residual):
            self._guarded(state, self._advance)

    def begin_decoding(self, state: RequestState) -> None:
        """A request was started whose prompt needs no pass, or no further one."""
        self._guarded(state, self._prompt_done)

    def _guarded(self, state: RequestState, work: Callable[[RequestState], None]) -> None:
        """Do something for one request; an error ends it alone."""
        try:
            work(state)
        except Exception as error:
            self._fail(state, error)

    def _advance(self, state: RequestState) -> None:
        """A pass, a move or a decode step of the request is done."""
        if state.plan is not None:
            state.suspect = False  # it is past the place where a step failed
            for logits in decoding.next_logits(state):
                if not self._push(state, logits):
                    break
            return
        state.advance()
        if state.plan is not None:
            self._prompt_done(state)

    def _prompt_done(self, state: RequestState) -> None:
        """The prompt's KV and last logits are there."""
        assert state.plan is not None
        if not state.times.first_token:
            self._note_first_token(state)
            state.logits = state.plan.logits
        if not decoding.score(state):
            self._push(state, state.plan.logits)

    def _note_first_token(self, state: RequestState) -> None:
        times = state.times
        times.first_token = time.perf_counter()
        ttft_ms = (times.first_token - times.arrival) * 1e3
        self._counters.overhead_ms_last = ttft_ms - times.retrieve_ms - times.compute_ms

    def _push(self, state: RequestState, logits: NDArray[np.float32]) -> bool:
        """Choose the next token by these logits [V], and go on or end; whether its own logits are there already."""
        assert state.generation is not None
        if state.shadowed is not None and len(state.shadowed) < STEPS:
            state.shadowed.append(logits)
        delta = state.generation.push(logits)
        if delta is not None:
            state.sink(delta)
        if state.generation.finish_reason is None:
            token = state.generation.tokens[-1]
            if state.rows is not None and decoding.accept(state, token):
                return True
            decoding.decode(state, token)
            return False
        decoding.note_proposal(state)
        answer = make_answer(state, self._contract, self._runner.fallbacks)
        state.keep()
        self._answer(state, answer)
        return False
