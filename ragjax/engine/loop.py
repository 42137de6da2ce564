"""The engine's thread: it admits, steps and cancels requests between steps, and alone touches cache and pool."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import Answer, ClosedError, Event, RequestError, StepLimits
from ragjax.engine.counters import Counters
from ragjax.engine.depkv import DepKV
from ragjax.engine.execution import Execution
from ragjax.engine.fault import Faults
from ragjax.engine.guess import Guesses
from ragjax.engine.loads import LoadWatch
from ragjax.engine.places import Places
from ragjax.engine.recent import Recent
from ragjax.engine.recovery import renew, restart_all
from ragjax.engine.trace import Recorder
from ragjax.quality.contract import Contract
from ragjax.runner.runner import Runner
from ragjax.schedule.admission import Admission
from ragjax.schedule.order import Order
from ragjax.schedule.pause import Failed, Pauses
from ragjax.schedule.scheduler import Scheduler, StepBudget
from ragjax.schedule.state import RequestState
from ragjax.store.transfer import KVTransfer

_log = logging.getLogger(__name__)

REPLICATE_STEPS = 64
"""Steps after which hot nodes are copied to the tiers below even though requests are running."""

TICK = 0.02
"""Seconds between two looks at whether a load takes too long, while there is nothing else to do."""


class Loop:
    """Requests between their arrival and their end, and the thread that serves them.

    Args:
        replay: the request that runs a finished one again for comparison, or None.
        max_queue: requests that may wait.
        max_running: requests that run at a time (0: as many as have room).
        order: in which order requests start (None: as they came).
        budget: of a step in which requests decode.
        load_timeout: seconds that a request waits for KV before it computes it.
        request_timeout: seconds without progress after which a request is started again once, then ends (0: none).

    Attributes:
        counters: what has happened so far. recent: the last requests. faults: of requests whose step failed, or that
            made no progress.
        kept: KV that outlives its request, by label; changed in this thread alone.
    """

    def __init__(
        self,
        runner: Runner,
        cache: KnowledgeCache,
        contract: Contract,
        replay: Callable[[RequestState, Answer], RequestState | None],
        *,
        max_queue: int,
        load_timeout: float,
        request_timeout: float = 0.0,
        max_running: int = 0,
        order: Order | None = None,
        budget: StepBudget | None = None,
        transfer: KVTransfer | None = None,
        recorder: Recorder | None = None,
    ):
        self.counters = Counters()
        self.recent = Recent()
        self.kept: dict[str, DepKV] = {}
        self._runner = runner
        self._cache = cache
        self._replay = replay
        self._transfer = transfer
        self._recorder = recorder
        self._scheduler = Scheduler(runner.grid, runner.page_size, budget)
        self._admission = Admission(
            cache, self._scheduler, stages=runner.stages, reach=runner.reach, max_running=max_running, order=order
        )
        self._pauses = Pauses(cache, self._scheduler, self._admission, runner)
        self.faults = Faults(request_timeout, self._restart, self._fail)
        self._guesses = Guesses(self.counters, self._arrive, self._settle, lambda state: self._end(state, None))
        self._places = Places(max_queue)
        self._execution = Execution(
            runner,
            self._scheduler,
            contract,
            self.counters,
            self.faults,
            recover=self._recover,
            fail=self._fail,
            answer=self._answered,
            freed=self._note_freed,
        )
        self._loads = LoadWatch(cache, self.counters.load_fallbacks, load_timeout, self._restart)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._process = os.getpid()
        self._freed = False  # whether a request that ran gave pages back while the last step landed
        if transfer is not None:
            transfer.notify = self.wake
        self._thread = threading.Thread(target=self._run, name="ragjax-engine", daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------------------------- in any thread

    @property
    def waiting(self) -> int:
        """Requests that wait to be admitted; background ones are not counted."""
        return self._admission.depth + len(self._pauses.waiting)

    @property
    def late(self) -> int:
        """Requests that started before the shared tier had answered all questions about them."""
        return self._admission.late

    @property
    def awaits(self) -> tuple[int, int]:
        """Requests that waited for KV which another was computing, and tokens of it that they found."""
        return self._admission.awaits, self._admission.awaited_tokens

    @property
    def pauses(self) -> Pauses:
        """Requests that gave their pages to older ones."""
        return self._pauses

    @property
    def running(self) -> int:
        """Requests that were admitted."""
        return len(self._scheduler.running)

    @property
    def closed(self) -> bool:
        """Whether nothing is served any more."""
        return self._closed

    @property
    def left_open(self) -> bool:
        """Whether it serves on in this process: nobody closed it, and it was not forked off."""
        return not self._closed and self._thread.is_alive()

    @property
    def limits(self) -> StepLimits:
        """What one step can read."""
        return self._scheduler.limits

    def prefill_seconds(self, tokens: int) -> float | None:
        """How long the prompt of a request takes that computes so many tokens; None if that is not known yet."""
        return self._scheduler.preload.seconds(tokens)

    def holders(self) -> set[str]:
        """Labels under which requests, and what outlives them, hold KV."""
        return {state.id for state in self._scheduler.running} | set(self.kept)

    def enqueue(self, state: RequestState, place: object = None) -> None:
        """Have a request served. place: that was held for it.

        Raises:
            OverloadError: if the queue is full.
            ClosedError: if nothing is served any more.
        """
        with self._lock:
            self._check_open()
            self._places.give_back(place)
            if not state.background:
                self._places.add(state)
            self._inbox.put(lambda: self._arrive(state))

    def check_room(self) -> None:
        """Refuse a request before anything is prepared for it.

        Raises:
            OverloadError: if the queue is full.
            ClosedError: if nothing is served any more.
        """
        with self._lock:
            self._check_open()
            self._places.check()

    def hold_place(self) -> object:
        """As `check_room`, and hold a place in the queue for the request, until it is enqueued or gone.

        Raises:
            OverloadError, ClosedError: as `check_room`.
        """
        with self._lock:
            self._check_open()
            return self._places.hold()

    def give_back(self, place: object) -> None:
        """A request is gone for which a place was held; nothing happens if it was enqueued."""
        with self._lock:
            self._places.give_back(place)

    def speculate(self, state: RequestState) -> None:
        """Have a request begun whose documents may turn out wrong, when there is room; it is in no queue until then.

        Its owner keeps its events back, and calls `confirm` or `refute`.

        Raises:
            ClosedError: if nothing is served any more.
        """
        with self._lock:
            self._check_open()
            state.speculative = True
            self._inbox.put(lambda: self._guesses.add(state))

    def confirm(self, state: RequestState, place: object = None) -> None:
        """The documents of a speculation are right: it is a request like any other, and starts if it has not.

        place: that was held for it.

        Raises:
            OverloadError: if it waits, and the queue is full.
            ClosedError: if nothing is served any more.
        """
        with self._lock:
            self._check_open()
            self._places.give_back(place)
            if not state.ended:
                self._places.add(state)
            state.times.confirmed = time.perf_counter()
            self._inbox.put(lambda: self._guesses.confirm(state))

    def note_unlikely(self) -> None:
        """A speculation is not begun, since it would not pay."""
        self._inbox.put(self._guesses.note_unlikely)

    def refute(self, state: RequestState) -> None:
        """The documents of a speculation are wrong: end it before the next step."""
        self._inbox.put(lambda: self._guesses.refute(state))

    def cancel(self, state: RequestState) -> None:
        """End a request before the next step, without a word to its owner; nothing happens if it has ended."""
        state.cancelled = True
        self.wake()

    def call(self, function: Callable[[], object]) -> None:
        """Run a function in this thread and wait for it; its errors are raised.

        Raises:
            ClosedError: if nothing is served any more.
            RequestError: in this thread itself.
        """
        self.check_caller()
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
        """Stop: running requests end with an error, and what only memory holds goes to disk. Safe to call twice.

        Raises:
            RequestError: in this thread itself.
        """
        if threading.current_thread() is self._thread:
            raise _own_thread()
        if os.getpid() != self._process:  # the thread is the other process's
            return
        with self._lock:  # what came before is served or told; nothing comes after the end
            self._closed = True
            self._inbox.put(None)
        self._thread.join()

    def check_caller(self) -> None:
        """Check that the caller may wait for this thread.

        Raises:
            RequestError: in this thread, which would wait for itself.
            ClosedError: if nothing is served any more, or the caller is in a process that was forked off.
        """
        if threading.current_thread() is self._thread:
            raise _own_thread()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
        if os.getpid() != self._process:
            raise ClosedError("the engine belongs to the process that loaded it: load one in this process")

    def wake(self) -> None:
        """Have the loop look around, if it sleeps. Callable in any thread."""
        self._inbox.put(lambda: None)

    # -------------------------------------------------------------------------------- in this thread

    def states(self) -> list[RequestState]:
        """Requests of every kind, waiting and running."""
        offered, paused = self._guesses.waiting, self._pauses.waiting
        waiting = (*offered, *paused, *self._admission.waiting, *self._admission.background)
        return [*waiting, *self._scheduler.running]

    def drop(self, kv: DepKV, reason: str) -> None:
        """Give back KV that was kept."""
        del self.kept[kv.label]
        kv.closed = reason
        kv.allocation.close()
        self._admission.blocked = False

    def _run(self) -> None:
        busy = True
        while self._drain_inbox(busy):
            try:
                busy = self._iterate()
            except BaseException as error:  # no defect, and no strategy that ends its thread, takes down the others
                told = error if isinstance(error, Exception) else RuntimeError(f"{error!r} in the engine's thread")
                for state in self.states():
                    self._fail(state, told)
        for state in self.states():
            self._end(state, ClosedError("the engine was closed"))
        self._put_away()

    def _iterate(self) -> bool:
        """One iteration, while the device computes the last step, and then the next; whether anything was done."""
        self._execution.tell()
        moved = self._look_after()
        self._freed = False
        landed = self._execution.land()
        self._execution.move()
        if self._freed:
            self._start()
        begun = self._execution.choose_first()
        self._refuse(self._pauses.make_room())
        batch = self._scheduler.next_batch()
        if batch is not None:
            self._execution.launch(batch)
        # copies ahead of need take turns with steps only if steps do not end
        copied = (batch is None or (self.counters.steps + 1) % REPLICATE_STEPS == 0) and self._cache.replicate()
        return moved or landed or begun or copied or batch is not None

    def _look_after(self) -> bool:
        """Whatever needs no result of the step that runs: cancel, look after loads, admit; whether KV was moved."""
        for state in [state for state in self.states() if state.cancelled]:
            self.counters.cancelled += not (state.speculative or state.background)  # no client asked for it
            self._end(state, None)
        moved = self._cache.poll()
        if moved:
            self._admission.blocked = False
        self._loads.check(self._scheduler.running)
        self.faults.excuse(self.states, self._runner.waited_s)
        self.faults.check(self.states, time.perf_counter())
        if self._loads.check_stall(bool(self._scheduler.running), bool(self.states())):
            self._admission.blocked = False
        self._start()
        if not self._pauses.waiting:
            self._admission.prefetch()
        return moved

    def _start(self) -> None:
        """Have paused requests go on, and then new ones start, as many as there is room for."""
        self._refuse(self._pauses.resume())
        if not self._pauses.waiting:
            self._guesses.start(self._pool_size())
            self._admit()

    def _drain_inbox(self, busy: bool) -> bool:
        """Run what other threads asked for; sleeps while there is nothing to do. False: stop."""
        wait = TICK if self.states() else None
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

    def _arrive(self, state: RequestState) -> None:
        state.times.progress = time.perf_counter()  # its search, which another thread does, is no waiting here
        try:
            self._admission.add(state)
        except Exception as error:
            self._fail(state, error)

    def _refuse(self, failed: Iterator[Failed]) -> None:
        """Pause or resume requests, and fail those that can never have their pages; copies may find the device lost."""
        try:
            for state, error in failed:
                self._fail(state, error)
        except Exception as error:
            if not self._runner.lost:
                raise
            self._recover(error)

    def _pool_size(self) -> int:
        """Requests in front whose prompts are not computed (RAGCache, Algorithm 2: `pool.size`)."""
        return self._admission.depth + sum(not state.decoding for state in self._scheduler.in_front)

    def _admit(self) -> None:
        for state, error in self._admission.admit():
            if error is not None:
                self._fail(state, error)
            else:
                self._execution.begin(state)

    # ------------------------------------------------------------------------------------------ restarts

    def _restart(self, state: RequestState, notice: str) -> None:
        self._scheduler.remove(state)
        state.restart(notice)
        self._admission.put_back(state)

    def _recover(self, error: Exception) -> None:
        """The device's memory is gone, and with it what was kept: requests start again."""
        self.counters.device_losses += 1
        restart_all(self._scheduler.running, error, self._restart, self._fail)
        for kv in list(self.kept.values()):
            self.drop(kv, "the KV was lost with the device's memory: compute it again")
        renew(self._runner, self._cache)

    # -------------------------------------------------------------------------------------------- ends

    def _answered(self, state: RequestState, answer: Answer) -> None:
        if state.speculative:
            state.answer = answer
            self._end(state, answer)
        else:
            self._settle(state, answer)

    def _settle(self, state: RequestState, answer: Answer) -> None:
        """Count a request that has its answer, end it, and have it replayed if it was drawn."""
        self._count(state)
        self.recent.add(state, answer)
        self._end(state, answer)
        again = self._replay(state, answer)
        if again is not None:
            self._arrive(again)

    def _count(self, state: RequestState) -> None:
        self.counters.add(state)
        if self._recorder is not None and not state.background:
            self._recorder.add(
                state.times.arrival, state.request.tenant, state.strategy.name, state.prompt, len(state.generated)
            )

    def _fail(self, state: RequestState, error: Exception) -> None:
        error = self._runner.explained(error)
        if not isinstance(error, RequestError):  # such a one is the client's
            self.counters.errors += not (state.speculative or state.background)
            _log.error("request failed", exc_info=error)
        self._end(state, error)

    def _note_freed(self) -> None:
        """A running request gave pages back: look at once whether another can start."""
        self._admission.blocked, self._freed = False, True

    def _end(self, state: RequestState, last: Event | BaseException | None) -> None:
        """Take a request out of the engine, give back what it holds, and tell its owner."""
        if state.ended:
            return
        with self._lock:
            state.ended = True
            self._places.remove(state)
        if state.running:
            self._note_freed()
        state.stop()
        self._scheduler.remove(state)
        self._admission.remove(state)
        self._pauses.remove(state)
        self._guesses.remove(state)
        if last is not None:
            state.sink(last)


def _own_thread() -> RequestError:
    return RequestError("the engine's own thread cannot wait for the engine: call it from another one")
