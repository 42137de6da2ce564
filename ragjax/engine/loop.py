"""The engine's thread: it admits, steps and cancels requests at pass boundaries, and alone touches cache and pool."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import (
    Answer,
    ClosedError,
    Event,
    OutOfPages,
    OverloadError,
    Plan,
    RequestError,
    SegmentReport,
    Timings,
)
from ragjax.engine.depkv import DepKV
from ragjax.engine.trace import Recorder
from ragjax.quality.contract import STEPS, Contract
from ragjax.reuse.base import Allocation
from ragjax.runner.runner import Runner
from ragjax.schedule.scheduler import Batch, Scheduler, Task
from ragjax.schedule.state import RESTARTS, Counters, Ticket
from ragjax.store.transfer import KVTransfer

_log = logging.getLogger(__name__)

REPLICATE_STEPS = 64
"""Steps after which hot nodes are copied to the tiers below even though requests are running."""

BACKGROUND = 8
"""Background requests that run at a time."""

TICK = 0.02
"""Seconds between two looks at whether a load takes too long, while there is nothing else to do."""


class Loop:
    """Requests between their arrival and their end, and the thread that serves them.

    Args:
        replay: the request that runs a finished one again for comparison, or None.
        max_queue: requests that may wait. load_timeout: seconds that a request waits for KV before it computes it.

    Attributes:
        counters: what has happened so far.
        kept: KV that outlives its request, by label; changed in this thread alone.
    """

    def __init__(
        self,
        runner: Runner,
        cache: KnowledgeCache,
        contract: Contract,
        replay: Callable[[Ticket, Answer], Ticket | None],
        *,
        max_queue: int,
        load_timeout: float,
        transfer: KVTransfer | None = None,
        recorder: Recorder | None = None,
    ):
        self.counters = Counters()
        self.kept: dict[str, DepKV] = {}
        self._runner = runner
        self._cache = cache
        self._contract = contract
        self._replay = replay
        self._max_queue = max_queue
        self._load_timeout = load_timeout
        self._transfer = transfer
        self._recorder = recorder
        self._scheduler = Scheduler(runner.grid, runner.page_size)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Ticket] = deque()
        self._background: deque[Ticket] = deque()
        self._resting: list[Task] = []
        self._running: dict[int, Ticket] = {}
        self._pending = 0
        self._lock = threading.Lock()
        self._closed = False
        self._blocked = False
        self._stalled: float | None = None
        if transfer is not None:
            transfer.notify = self._wake
        self._thread = threading.Thread(target=self._run, name="ragjax-engine", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------- in any thread

    @property
    def waiting(self) -> int:
        """Requests that wait to be admitted; background ones do not count."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that were admitted."""
        return len(self._running)

    @property
    def closed(self) -> bool:
        """Whether nothing is served any more."""
        return self._closed

    def holders(self) -> set[str]:
        """Labels under which requests, and what outlives them, hold KV."""
        return {ticket.id for ticket in self._running.values()} | set(self.kept)

    def fits(self, pieces: int, tokens: int) -> bool:
        """Whether a step can take a prompt of so many pieces, and so many tokens with its answer."""
        return self._scheduler.fits(pieces, tokens)

    def enqueue(self, ticket: Ticket) -> None:
        """Have a request served.

        Raises:
            OverloadError: if the queue is full.
            ClosedError: if nothing is served any more.
        """
        with self._lock:
            self._check_open()
            running = sum(not other.request.background for other in list(self._running.values()))
            waiting = self._pending - max(running, 1)  # while none runs, one of them is about to
            if not ticket.request.background:
                if waiting >= self._max_queue:
                    raise OverloadError(f"the queue is full: {waiting} requests wait; try again later")
                self._pending += 1
            self._inbox.put(lambda: self._arrive(ticket))

    def cancel(self, ticket: Ticket) -> None:
        """End a request at the next pass boundary, without a word to its owner; nothing happens if it has ended."""
        ticket.cancelled = True
        self._wake()

    def call(self, function: Callable[[], object]) -> None:
        """Run a function in this thread and wait for it; its errors are raised.

        Raises:
            ClosedError: if nothing is served any more.
        """
        done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                function()
                done.put(None)
            except BaseException as error:
                done.put(error)

        with self._lock:
            self._check_open()
            self._inbox.put(run)
        error = done.get()
        if error is not None:
            raise error

    def close(self) -> None:
        """Stop: running requests end with an error, and what only memory holds goes to disk. Safe to call twice."""
        with self._lock:  # what was taken in before is served or told; nothing comes behind the end
            self._closed = True
            self._inbox.put(None)
        self._thread.join()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")

    def _wake(self) -> None:
        """Have the loop look around, if it sleeps. Callable in any thread."""
        self._inbox.put(lambda: None)

    # -------------------------------------------------------------------------------- in this thread

    def tickets(self) -> list[Ticket]:
        """Requests of every kind, waiting and running."""
        return [*self._waiting, *self._background, *self._running.values()]

    def drop(self, kv: DepKV, reason: str) -> None:
        """Give back KV that was kept."""
        del self.kept[kv.label]
        kv.closed = reason
        kv.allocation.close()
        self._blocked = False

    def _run(self) -> None:
        busy = True
        while self._drain_inbox(busy):
            try:
                busy = self._turn()
            except Exception as error:  # a defect of ours must not take the other clients' server down
                for ticket in self.tickets():
                    self._fail(ticket, error)
        for ticket in self.tickets():
            self._end(ticket, ClosedError("the engine was closed"))
        self._put_away()

    def _turn(self) -> bool:
        """One look at everything; whether anything was done."""
        self._drop_cancelled()
        moved = self._cache.poll()
        self._blocked = self._blocked and not moved
        self._check_loads()
        self._check_stall()
        self._admit()
        self._move()
        batch = self._scheduler.next_batch()
        if batch is not None:
            self._step(batch)
        # copies ahead of need take turns with steps only if there is no end of these
        copied = (batch is None or self.counters.steps % REPLICATE_STEPS == 0) and self._cache.replicate()
        return moved or copied or batch is not None

    def _drain_inbox(self, busy: bool) -> bool:
        """Run what other threads asked for; sleeps while there is nothing to do. False: stop."""
        wait = TICK if self.tickets() else None
        while True:
            try:
                message = self._inbox.get(block=not busy, timeout=wait)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()
            busy = True

    def _put_away(self) -> None:
        """At the end: what only memory holds goes to disk."""
        if self._transfer is None:
            return
        try:
            while self._cache.flush():
                self._transfer.flush()
                self._cache.poll()
        except Exception:
            _log.exception("not everything was put on disk")

    def _arrive(self, ticket: Ticket) -> None:
        if ticket.request.background:
            self._background.append(ticket)
            return
        self._waiting.append(ticket)
        try:
            keys = ticket.strategy.keys(ticket.prompt, self._cache, ticket.request.tenant)
            self._cache.announce(ticket.id, keys)
        except Exception as error:
            self._fail(ticket, error)

    def _drop_cancelled(self) -> None:
        for ticket in [t for t in self.tickets() if t.cancelled]:
            self.counters.cancelled += 1
            self._end(ticket, None)

    def _check_loads(self) -> None:
        """Requests whose KV arrived go on; those whose KV will not, or not in time, begin anew and compute it."""
        now = time.perf_counter()
        for ticket in [t for t in self._running.values() if t.task is not None and not t.task.decoding]:
            assert ticket.task is not None
            allocation = ticket.task.allocation
            if allocation.broken is not None:
                self._fall_back(ticket, "failed", f"KV could not be loaded and was computed anew: {allocation.broken}")
            elif allocation.ready:
                ticket.stop_waiting(now)
            elif ticket.waits_since is None:
                ticket.waits_since = now
            elif now - ticket.waits_since > self._load_timeout:
                self._fall_back(ticket, "slow", f"loading KV took over {self._load_timeout:g} s; it was computed anew")

    def _check_stall(self) -> None:
        """Loads that are not done in time, and that nobody waits for, give back their pages if these are what lacks."""
        now = time.perf_counter()
        if self._running or not (self._waiting or self._background) or not self._cache.loading:
            self._stalled = None
        elif self._stalled is None:
            self._stalled = now
        elif now - self._stalled > self._load_timeout and self._cache.give_up():
            self._stalled, self._blocked = None, False

    def _fall_back(self, ticket: Ticket, reason: str, notice: str) -> None:
        if not self.counters.load_fallbacks[reason]:
            _log.warning("%s", notice)
        self.counters.load_fallbacks[reason] += 1
        ticket.cold = False  # once is enough: a disk that always fails must not be asked for ever
        self._begin_anew(ticket, notice)

    def _begin_anew(self, ticket: Ticket, notice: str) -> None:
        task = ticket.task
        assert task is not None
        self._leave(task)
        ticket.begin_anew(notice)
        self._blocked = False
        (self._background if ticket.request.background else self._waiting).appendleft(ticket)

    def _leave(self, task: Task) -> None:
        (self._resting if task in self._resting else self._scheduler.tasks).remove(task)
        del self._running[id(task)]

    def _admit(self) -> None:
        """Start waiting requests, oldest first, while they have room."""
        while self._waiting and not self._blocked:
            ticket = self._waiting[0]
            try:
                self._blocked = not self._start(ticket)
            except Exception as error:
                self._fail(ticket, error)
                continue
            if not self._blocked:
                self._waiting.popleft()
                self._cache.withdraw(ticket.id)
        self._admit_background()

    def _admit_background(self) -> None:
        """Background requests rest while others run or wait, and go on, a few at a time, while none does."""
        busy = bool(self._waiting) or any(not t.request.background for t in self._running.values())
        if busy:
            self._resting += [t for t in self._scheduler.tasks if self._running[id(t)].request.background]
            self._scheduler.tasks = [t for t in self._scheduler.tasks if t not in self._resting]
            return
        self._scheduler.tasks += self._resting
        self._resting = []
        while self._background and len(self._running) < BACKGROUND:
            ticket = self._background.popleft()
            try:
                if self._start(ticket):
                    continue
            except Exception as error:
                self._fail(ticket, error)
                continue
            self._background.appendleft(ticket)
            return

    def _stop_background(self) -> bool:
        """Have background requests give back what they hold; whether there were any."""
        tasks = [ticket.task for ticket in self._running.values() if ticket.request.background]
        for task in tasks:
            assert task is not None
            self._begin_anew(self._running[id(task)], "")
        return bool(tasks)

    def _start(self, ticket: Ticket) -> bool:
        """Match and reserve for a request; False if it has to wait for others to end.

        Raises:
            RequestError: if it is alone and still has no room.
        """
        vacated = False
        while True:
            now = time.perf_counter()
            task = self._task(ticket)
            try:
                task.start()
            except OutOfPages as error:
                if not ticket.request.background and self._stop_background():
                    continue
                if self._running or self._cache.loading:
                    return False
                if not vacated:  # what it would reuse may lie scattered over more pages than it needs
                    self._cache.vacate()
                    vacated = True
                    continue
                param = "messages" if ticket.request.prompt is None else "prompt"
                raise RequestError(str(error), param=param, code="context_length_exceeded") from error
            except BaseException:
                task.close()
                raise
            break
        ticket.task, ticket.waits_since = task, now
        if not ticket.first_token:
            ticket.admitted = now
        if task.allocation.ready:
            ticket.stop_waiting(time.perf_counter())
        self._running[id(task)] = ticket
        self._scheduler.tasks.append(task)
        if task.plan is not None:
            try:
                self._planned(ticket, task, task.plan)
            except Exception as error:  # it is among the running ones by now
                self._fail(ticket, error)
        return True

    def _task(self, ticket: Ticket) -> Task:
        prompt = ticket.whole_prompt
        allocation = Allocation(
            self._cache,
            tenant=ticket.request.tenant,
            label=ticket.id,
            decode_tokens=ticket.decode_tokens - len(ticket.generation.tokens),
            entries=self._runner.grid.entries[-1],
            stages=self._runner.stages,
            cold=ticket.cold,
        )
        return Task(prompt, ticket.strategy, allocation, ticket.id, ticket.ratio)

    def _move(self) -> None:
        """Carry out the moves of tasks whose KV has arrived, until each has rows to compute."""
        for task in self._scheduler.moving():
            ticket = self._running[id(task)]
            try:
                while task.moving is not None and task.ready:
                    move = task.moving
                    self._runner.move(move.source_N, move.target_N, move.offset_N, move.layers)
                    self._advance(ticket, task)
            except Exception as error:
                if self._runner.lost:
                    self._recover(error)
                    return
                self._fail(ticket, error)

    def _step(self, batch: Batch) -> None:
        members = [self._running[id(piece.task)] for piece in batch.pieces]
        began = time.perf_counter()
        try:
            outcome = self._runner.step(batch.step)
            logits = self._runner.logits(outcome, batch.logit_rows) if batch.logit_rows else None
        except Exception as error:
            if self._runner.lost:
                self._recover(error)
                return
            for ticket in members:
                self._fail(ticket, error)
            return
        elapsed_ms = (time.perf_counter() - began) * 1e3
        self.counters.steps += 1
        for ticket in members:
            ticket.compute_ms += elapsed_ms
        for task in batch.deliver(logits, outcome.measured, outcome.residual):
            ticket = self._running[id(task)]
            try:
                self._advance(ticket, task)
            except Exception as error:
                self._fail(ticket, error)

    def _recover(self, error: Exception) -> None:
        """The device's pool is gone: begin anew with what host memory and disk hold (RAGCache, section 6).

        Requests before their first token are computed again; others continue behind the tokens that went out.
        """
        self.counters.device_losses += 1
        _log.error("the device's memory was lost; running requests begin anew", exc_info=error)
        for ticket in reversed(list(self._running.values())):
            if ticket.restarts >= RESTARTS:
                self._fail(ticket, error)
            else:
                self._begin_anew(ticket, "the device's memory was lost; the request was computed anew")
        for kv in list(self.kept.values()):
            self.drop(kv, "the KV was lost with the device's memory: compute it anew")
        self._runner.reset()
        self._cache.give_up()
        while self._cache.loading:
            self._cache.poll()
            time.sleep(TICK)
        self._cache.lose_device()

    def _advance(self, ticket: Ticket, task: Task) -> None:
        """A pass or a decode step of the task is done."""
        if task.plan is None:
            task.pass_done()
            if task.plan is not None:
                self._planned(ticket, task, task.plan)
            return
        if ticket.wants_scores:
            ticket.take_scores()
            logits = task.plan.logits
        else:
            assert task.work is not None
            logits = task.work.logits[0]
        self._push(ticket, task, logits)

    def _planned(self, ticket: Ticket, task: Task, plan: Plan) -> None:
        """The prompt's KV and last logits are there."""
        if not ticket.first_token:
            self._note_first_token(ticket)
            ticket.logits = plan.logits
        if not ticket.force():
            self._push(ticket, task, plan.logits)

    def _push(self, ticket: Ticket, task: Task, logits: NDArray[np.float32]) -> None:
        """Choose the next token by these logits [V], and go on or end."""
        if ticket.shadowed is not None and len(ticket.shadowed) < STEPS:
            ticket.shadowed.append(logits)
        delta = ticket.generation.push(logits)
        if delta is not None:
            ticket.sink(delta)
        if ticket.generation.finish_reason is None:
            task.decode(ticket.generation.tokens[-1])
            return
        answer = self._answer(ticket, task)
        task.finish()
        self._end(ticket, answer)
        again = self._replay(ticket, answer)
        if again is not None:
            self._arrive(again)

    def _note_first_token(self, ticket: Ticket) -> None:
        ticket.first_token = time.perf_counter()
        ttft_ms = (ticket.first_token - ticket.arrival) * 1e3
        self.counters.overhead_ms_last = ttft_ms - ticket.retrieve_ms - ticket.compute_ms

    def _answer(self, ticket: Ticket, task: Task) -> Answer:
        plan, generation = task.plan, ticket.generation
        assert plan is not None and generation.finish_reason is not None
        now = time.perf_counter()
        added = len(task.prompt.segments) - len(ticket.prompt.segments)  # what it said before it began anew
        reports = plan.reports[: len(plan.reports) - added]
        reused = sum(report.reused for report in reports)
        if not ticket.request.background:
            self._count(ticket, reports)
        exact = plan.exact_to == "full"
        return Answer(
            text=generation.text,
            finish_reason=generation.finish_reason,
            tokens=tuple(generation.tokens),
            prompt_tokens=len(ticket.prompt),
            cached_tokens=reused,
            strategy=ticket.strategy.name,
            exact_to=plan.exact_to,
            segments=reports,
            timings=Timings(
                retrieve=ticket.retrieve_ms,
                load=ticket.load_ms,
                prefill=(ticket.first_token - ticket.admitted) * 1e3 - ticket.load_ms,
                ttft=(ticket.first_token - ticket.arrival) * 1e3,
                total=(now - ticket.arrival) * 1e3,
            ),
            logprobs=tuple(generation.logprobs),
            logits=ticket.logits if ticket.request.want_logits else None,
            notices=(
                *ticket.notices,
                *(self._contract.notices_of(ticket.prompt.preprocessed) if self._by_setting(ticket) else ()),
                *(f"attention not by {refused}" for refused in self._runner.fallbacks),
            ),
            recompute_ratio=ticket.ratio,
            predicted=self._contract.predicted(ticket.setting, exact, ticket.chunks, ticket.prompt.preprocessed),
            scores=ticket.scores,
            figures=plan.figures,
            facts=ticket.facts,
        )

    def _by_setting(self, ticket: Ticket) -> bool:
        """Whether the contract's setting served a request: those for a graph have a default of their own."""
        return ticket.by_default and (self._contract.faulted or not ticket.has_graph)

    def _count(self, ticket: Ticket, reports: Sequence[SegmentReport]) -> None:
        counters, generated = self.counters, len(ticket.generation.tokens)
        counters.requests[ticket.strategy.name] += 1
        counters.prompt_tokens += len(ticket.prompt)
        counters.reused_tokens += sum(report.reused for report in reports)
        counters.recomputed_tokens += sum(report.recomputed for report in reports)
        counters.generated_tokens += generated
        if self._recorder is not None:
            self._recorder.add(ticket.arrival, ticket.request.tenant, ticket.strategy.name, ticket.prompt, generated)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        self.counters.errors += 1
        if not isinstance(error, RequestError):
            _log.error("request failed", exc_info=error)
        self._end(ticket, error)

    def _end(self, ticket: Ticket, last: Event | BaseException | None) -> None:
        """Take a request out of the engine, give back what it holds, and tell its owner."""
        if ticket.task is not None:
            ticket.task.close()
            self._leave(ticket.task)
            self._blocked = False
        elif ticket in self._background:
            self._background.remove(ticket)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
            self._cache.withdraw(ticket.id)
            self._blocked = False
        if not ticket.request.background:
            with self._lock:
                self._pending -= 1
        ticket.cancelled = True
        if last is not None:
            ticket.sink(last)
