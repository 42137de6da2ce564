"""The engine's thread: it starts, steps and ends requests, and alone touches cache and pool."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from ragjax.core import ClosedError, EngineOptions, RequestError, StepLimits
from ragjax.engine.build import Parts
from ragjax.engine.depkv import KeptKV
from ragjax.engine.execution import Execution
from ragjax.engine.provision import needed
from ragjax.engine.replay import Replays
from ragjax.schedule.admission import Admission, Allocations
from ragjax.schedule.order import make_order
from ragjax.schedule.pause import Pauses
from ragjax.schedule.requests import Requests
from ragjax.schedule.scheduler import Scheduler
from ragjax.schedule.state import RequestState

_log = logging.getLogger(__name__)

T = TypeVar("T")

REPLICATE_STEPS = 64
"""Steps after which hot nodes are copied to the tiers below even though requests are running."""

OWN_THREAD = "the engine's own thread cannot wait for the engine: call it from another one"

TICK = 0.02
"""Seconds between two looks at whether a load takes too long, while there is nothing else to do."""

QUIET_S = 0.1
"""Seconds after an answer in which nothing runs in the background: a program that was answered often asks again."""


class Loop:
    """The thread that serves requests between their arrival and their end. replays: run finished ones again."""

    def __init__(self, parts: Parts, options: EngineOptions, replays: Replays):
        runner, cache = parts.runner, parts.cache
        self._supply, self._tuning = parts.supply, parts.tuning
        self.requests = Requests(cache, max_queue=options.max_queue, order=make_order(options.order), lacks=self._lacks)
        self.kept = KeptKV(self.requests)
        self._runner = runner
        self._cache = cache
        self._replays = replays
        self._transfer = parts.transfer
        self._scheduler = Scheduler(self.requests, runner.grid, runner.page_size, parts.budget, runner.shapes_for)
        allocations = Allocations(self.requests, cache, self._scheduler.limits, runner.stages)
        self._admission = Admission(self.requests, cache, allocations, max_running=options.max_running)
        self._pauses = Pauses(self.requests, cache, allocations, runner)
        self._execution = Execution(self.requests, runner, cache, self._scheduler, parts.contract, self.kept)
        self._load_timeout = options.storage.load_timeout
        self._stalled: float | None = None  # since when requests wait, none runs, and loads are under way
        self._inbox: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # over _closed and _inbox: nothing is put in after the end
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="ragjax-engine", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Requests that wait to be started or to go on; background ones are not counted."""
        return len(self.requests.unready) + len(self.requests.queue) + len(self.requests.paused)

    @property
    def running(self) -> int:
        """Requests that were started; background ones are not counted."""
        return len(self.requests.in_front)

    @property
    def tuned(self) -> bool:
        return self._tuning is None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def left_open(self) -> bool:
        """True if it serves on in this process: nobody closed it, and it was not forked off."""
        return not self._closed and self._thread.is_alive()

    @property
    def limits(self) -> StepLimits:
        return self._scheduler.limits

    def enqueue(self, state: RequestState, place: object = None) -> None:
        self.post(partial(self.requests.arrive, state), None if state.background else state, place)

    def post(self, work: Callable[[], object], entering: RequestState | None = None, place: object = None) -> None:
        """Run something in this thread soon. entering: a request that takes its place in the queue first."""
        with self._lock:
            self._check_open()
            if entering is not None:
                self.requests.limit.enter(entering, place)
            self._inbox.put(work)

    def hold_place(self) -> object:
        """Hold a place in the queue for a request that is to be prepared, until it is enqueued or gone."""
        self._check_open()
        return self.requests.limit.hold_place()

    def check_room(self) -> None:
        self._check_open()
        self.requests.limit.check_room()

    def cancel(self, state: RequestState) -> None:
        """End a request before the next step, without a word to its owner; nothing happens if it has ended."""
        state.cancelled = True
        self.wake()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in this thread and wait for what it returns; its errors are raised."""
        self.check_caller()
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self.post(run)
        return done.result()

    def close(self) -> None:
        """Stop: running requests end with an error, and what only memory holds goes to disk. Safe to call twice."""
        if threading.current_thread() is self._thread:
            raise RequestError(OWN_THREAD)
        if os.getpid() != self._process:  # the thread is the other process's
            return
        with self._lock:  # what came before is served or told; nothing comes after the end
            self._closed = True
            self._inbox.put(None)
        self._thread.join()

    def check_caller(self) -> None:
        """Raise RequestError in this thread, which would wait for itself, and ClosedError in a process forked off."""
        if threading.current_thread() is self._thread:
            raise RequestError(OWN_THREAD)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
        if os.getpid() != self._process:
            raise ClosedError("the engine belongs to the process that loaded it: load one in this process")

    def wake(self) -> None:
        """Wake the loop if it sleeps. Any thread may call it."""
        self._inbox.put(lambda: None)

    def busy(self) -> bool:
        return bool(self.requests.in_front)

    def _run(self) -> None:
        busy = True
        while self._drain_inbox(busy):
            try:
                moved = self._receive()
                self._start()
                if not self.requests.paused:
                    self._admission.prefetch()  # KV of the next ones is loaded ahead
                landed = self._land()  # until then the device computes the last step
                if landed and not self._inbox.empty():  # who came meanwhile shares the next one
                    busy = True
                    continue
                busy = self._launch() or landed or moved or self._tune()
            except BaseException as error:  # no defect, and no strategy that ends its thread, takes down the others
                told = error if isinstance(error, Exception) else RuntimeError(f"{error!r} in the engine's thread")
                for state in self.requests.live:
                    self.requests.fail(state, self._runner.explained(told))
        for state in self.requests.live:
            self.requests.end(state, ClosedError("the engine was closed"))
        try:
            while self._transfer is not None and self._cache.flush():
                self._transfer.flush()
                self._cache.poll()
        except Exception:
            _log.exception("not everything was put on disk")

    def _receive(self) -> bool:
        """Let text out, end requests whose clients left, and take in KV that arrived; whether any was."""
        self._execution.tell()
        self.requests.end_cancelled()
        released = self.requests.release()
        moved = self._cache.poll()
        if moved:
            self.requests.blocked = False
        self._check_loads(time.perf_counter())
        return moved or released

    def _start(self) -> None:
        self._copying(self._pauses.resume)
        if self.requests.paused:
            return
        for state, error in self._admission.start_waiting():
            if error is None:
                self._execution.begin(state)
            else:
                self.requests.fail(state, self._runner.explained(error))

    def _land(self) -> bool:
        self.requests.freed = False
        landed = self._execution.land()
        self._execution.move()
        if self.requests.freed:  # another can start in the next step already
            self._start()
        for state, answer in self.requests.take_answered():
            if (again := self._replays.of(state, answer)) is not None:
                self.requests.arrive(again)
        return landed

    def _launch(self) -> bool:
        self._copying(self._pauses.make_room)
        rests = not self.requests.in_front and self.requests.quiet_s < QUIET_S
        batch = None if rests else self._scheduler.next_batch()
        if batch is not None:
            self._execution.launch(batch)
        # copies ahead of need take turns with steps only if steps do not end
        turn = batch is None or (self.requests.counters.steps + 1) % REPLICATE_STEPS == 0
        copied = turn and self._cache.replicate()
        return batch is not None or copied

    def _tune(self) -> bool:
        """Measure a step for the budget while there is nothing else to do; true if one was."""
        if self._tuning is None or self.requests.live or (self._supply is not None and self._supply.left):
            return False
        try:
            budget = next(self._tuning)
        except Exception as error:
            self._tuning = None
            _log.warning("the budget of a step could not be measured", exc_info=error)
            if self._runner.lost:
                self._execution.recover(error)
            return True
        if budget is not None:
            self._scheduler.budget, self._tuning = budget, None
        return True

    def _copying(self, work: Callable[[], None]) -> None:
        """Pause or resume requests; their copies may find the device lost."""
        try:
            work()
        except Exception as error:
            if not self._runner.lost:
                raise
            self._execution.recover(error)

    def _drain_inbox(self, busy: bool) -> bool:
        """Run what other threads asked for; sleeps while there is nothing to do. False: stop."""
        wait = TICK if self.requests.live else None
        while True:
            try:
                message = self._inbox.get(block=not busy, timeout=wait)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()
            busy = True

    def _lacks(self, state: RequestState) -> bool:
        return self._supply is not None and self._supply.lacks(needed(self._runner, state))

    def _check_loads(self, now: float) -> None:
        """Requests whose KV arrived go on; those whose KV will not, or not in time, compute it instead.

        Loads that are not done in time give back their pages, for requests that wait while none runs.
        """
        requests = self.requests
        for state in [state for state in requests.running if not state.decoding]:
            assert state.allocation is not None
            if state.allocation.broken is not None:
                notice = f"KV could not be loaded and was computed instead: {state.allocation.broken}"
                self._compute_instead(state, "failed", notice)
            elif state.allocation.ready:
                state.times.stop_waiting(now)
            elif state.times.waits_since is None:
                state.times.waits_since = now
            elif now - state.times.waits_since > self._load_timeout:
                notice = f"loading KV took over {self._load_timeout:g} s; it was computed instead"
                self._compute_instead(state, "slow", notice)
        if requests.running or not requests.live or not self._cache.loading:
            self._stalled = None
        elif self._stalled is None:
            self._stalled = now
        elif now - self._stalled > self._load_timeout and self._cache.give_up():
            self._stalled = None
            requests.blocked = False

    def _compute_instead(self, state: RequestState, reason: str, notice: str) -> None:
        fallbacks = self.requests.counters.load_fallbacks
        if not fallbacks[reason]:
            _log.warning("%s", notice)
        fallbacks[reason] += 1
        state.may_load = False  # a disk that always fails is not asked again for this request
        self.requests.restart(state, notice)
