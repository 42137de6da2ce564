"""Faults under load: failing steps, clients that leave, and a full queue."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any

import numpy as np
import pytest

from ragjax.core import Answer, OverloadError, Prompt, Request, Sampling, Step
from ragjax.core.overload import Overload
from ragjax.engine import Engine
from ragjax.engine.depkv import Resumed
from ragjax.engine.prepare import Preparation
from ragjax.schedule.batch import Batch
from ragjax.schedule.state import RequestState
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.pace import Hold, failing, lasting, until

NAMES = ("full", "prefix", "naive", "blend", "craft")
POISON = 259
"""A token that the tokenizer never makes; a step that has four in a row fails."""


def poisoned(prompt: Prompt) -> Prompt:
    """The prompt, ending with the poison."""
    prompt.segments[-1].tokens[-4:] = POISON
    return Prompt(prompt.segments)


@contextmanager
def steps(engine: Engine, patched: Callable[[Callable[[Step], Any], Step], Any]) -> Iterator[None]:
    """Every step runs through `patched(step function, step)`."""
    runner = engine._runner
    original = runner.step
    runner.step = lambda step: patched(original, step)
    try:
        yield
    finally:
        del runner.step


def failing_on_poison(run: Callable[[Step], Any], step: Step) -> Any:
    if (np.lib.stride_tricks.sliding_window_view(step.token_T, min(4, len(step.token_T))) == POISON).all(1).any():
        raise RuntimeError("the step failed")
    return run(step)


@pytest.mark.smoke
@pytest.mark.slow
def test_the_request_at_fault_fails_alone() -> None:
    jobs = [(tiny.prompt(i, 20, (30,), 12 + i), {"strategy": NAMES[i], "max_tokens": 12}) for i in range(5)]
    alone = tiny.alone(jobs)
    with tiny.engine() as engine, steps(engine, failing_on_poison):
        with Hold(engine):
            bad = engine.begin_prompt(poisoned(tiny.prompt(9, 20, (), 12)), strategy="full", max_tokens=5)
            futures = [engine.begin_prompt(prompt, **given) for prompt, given in jobs]
        with pytest.raises(RuntimeError, match="the step failed"):
            bad.result()
        answers = [future.result() for future in futures]
        audit_engine(engine)
        stats = engine.stats()
    assert [answer.tokens for answer in answers] == alone
    assert stats["errors_total"] == 1 and stats["step_failures_total"] >= 2
    assert any("a step failed" in notice for answer in answers for notice in answer.notices)
    assert sum(stats["requests_total"].values()) == 5


def test_requests_that_fail_once_go_on_where_they_were() -> None:
    """Failures at several steps of many requests: the tokens are those of an engine without faults."""
    jobs = [
        (tiny.prompt(i, 20, (30,), 12), {"strategy": ("full", "prefix")[i % 2], "max_tokens": 25}) for i in range(4)
    ]
    alone = tiny.alone(jobs)
    together = failed = 0

    def sometimes(run: Callable[[Step], Any], step: Step) -> Any:
        nonlocal together, failed
        together += len(set(step.request_T.tolist())) > 2  # padding is one of them
        if together >= (2, 7, 12, len(jobs) * 25)[failed]:
            failed += 1
            raise RuntimeError("now and then")
        return run(step)

    with tiny.engine() as engine, steps(engine, sometimes):
        with Hold(engine):
            futures = [engine.begin_prompt(prompt, **given) for prompt, given in jobs]
        assert [future.result().tokens for future in futures] == alone
    assert failed == 3


def test_what_a_request_kept_before_it_was_started_again_is_not_reused_from_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny.prompt()
    failing(monkeypatch, engine._runner, "step", 8)  # some tokens are out
    answer = engine.answer_prompt(prompt, strategy="prefix", max_tokens=12)
    stats = engine.stats()
    assert answer.notices and answer.cached_tokens == 0
    assert [(one.id, one.recomputed) for one in answer.segments] == [(s.id, len(s)) for s in prompt.segments]
    assert (stats["reused_tokens_total"], stats["recomputed_tokens_total"]) == (0, len(prompt))


def test_what_is_in_the_background_is_in_no_figure_of_requests(engine: Engine) -> None:
    engine.answer_prompt(tiny.prompt(), max_tokens=2)
    overhead = engine.stats()["overhead_ms_last"]
    engine.answer_prompt(tiny.prompt(1), max_tokens=2, background=True)
    with steps(engine, failing_on_poison), pytest.raises(RuntimeError, match="the step failed"):
        engine.answer_prompt(poisoned(tiny.prompt(2)), strategy="full", max_tokens=2, background=True)
    lasting(engine, tiny.prompt(3), strategy="full", max_tokens=500, background=True)
    engine._loop.call(lambda: engine._loop.cancel(engine._loop.requests.live[0]))
    until(lambda: not engine._loop.running)
    stats = engine.stats()
    assert stats["step_failures_total"] and stats["overhead_ms_last"] == overhead
    assert (stats["errors_total"], stats["cancelled_total"]) == (0, 0)


def test_what_is_generated_from_kept_kv_goes_on_after_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.engine() as engine, engine.compute_depkv(tiny.prompt(3)) as kv:
        alone = engine.generate_with_depkv(kv, max_tokens=30)
        failing(monkeypatch, engine._runner, "step", 12)
        again = engine.answer_prompt(kv.prompt, strategy=Resumed(kv), max_tokens=30)
        assert again.tokens == alone.tokens and len(again.segments) == len(alone.segments)
        assert "a step failed" in again.notices[0]


def test_the_time_in_which_programs_are_compiled_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = tiny.runner()._programs
    monkeypatch.setattr(programs, "compiled", {})
    monkeypatch.setattr(programs, "_compile", lambda *name: time.sleep(0.01) or name)
    before = programs.waited_s
    assert programs.get("any", 1) == programs.get("any", 1) == ("any", 1)
    assert programs.waited_s - before >= 0.01
    monkeypatch.setattr(programs, "_compile", lambda *_: time.sleep(0.01) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        programs.get("other", 1)
    assert programs.waited_s - before >= 0.02


# -------------------------------------------------------------------------------------- who leaves


@pytest.mark.parametrize("where", ["decoding", "prompt", "queued", "paused"])
def test_nothing_is_held_within_one_step_after_a_client_left(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves while a step begins."""
    after: list[bool] = []  # of each step that began since: whether anything was held for it
    with tiny.engine(pages=26, max_running=1 if where == "queued" else 0) as engine:
        requests, launch = engine._loop.requests, engine._loop._execution.launch

        def reached() -> bool:
            if where in ("queued", "paused"):
                return len(requests.queue if where == "queued" else requests.paused) == 1
            return len(requests.running) == 2 and (requests.running[-1].decoding or where == "prompt")

        def watched(batch: Batch) -> None:
            if leaves.cancelled():
                after.append(len(requests.live) > 1)
            elif reached():
                leaves.cancel()
            launch(batch)

        with Hold(engine):
            monkeypatch.setattr(engine._loop._execution, "launch", watched)
            stays = engine.begin_prompt(tiny.prompt(0), strategy="full", max_tokens=150)
            chunks = (80,) if where == "prompt" else ()
            leaves = engine.begin_prompt(tiny.prompt(1, 20, chunks, 20), strategy="full", max_tokens=150)
        until(lambda: len(after) >= 4)
        assert sum(after) <= 1, "it was computed on"
        audit_engine(engine)
        assert engine.stats()["cancelled_total"] == 1
        stays.cancel()


# ---------------------------------------------------------------------------------------- overload


def test_a_full_queue_refuses_before_anything_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.engine(max_queue=1, max_running=1) as engine:
        futures = [lasting(engine, tiny.prompt(0), max_tokens=300), engine.begin_prompt(tiny.prompt(1), max_tokens=1)]
        monkeypatch.setattr(Preparation, "state", lambda *_, **__: pytest.fail("it was prepared"))

        async def ask() -> None:
            async for _ in engine.submit(Request(prompt="Hello")):
                pass

        with pytest.raises(OverloadError, match="1 requests wait") as refused:
            asyncio.run(ask())
        assert refused.value.retry_after is not None and refused.value.retry_after > 0
        for future in futures:
            future.cancel()


async def _answer_of(engine: Engine) -> Answer:
    async with aclosing(engine.submit(Request(prompt="Hello", sampling=Sampling(max_tokens=2)))) as events:
        return [event async for event in events][-1]


def _count(wanted: int, test: Callable[[], int]) -> Any:
    async def wait() -> None:
        async with asyncio.timeout(60):
            while test() != wanted:
                await asyncio.sleep(0.001)

    return wait()


def test_requests_in_preparation_take_places_of_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves gives its place back at once, also while a thread still prepares its request."""
    released, begun, prepare = threading.Event(), list[int](), Preparation.state

    def held(*arguments: Any) -> RequestState:
        begun.append(1)
        released.wait(60)
        return prepare(*arguments)

    monkeypatch.setattr(Preparation, "state", held)

    async def run(engine: Engine) -> None:
        first, second = (asyncio.create_task(_answer_of(engine)) for _ in range(2))
        await _count(2, lambda: len(begun))
        with pytest.raises(OverloadError, match="1 requests wait"):
            await _answer_of(engine)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        third = asyncio.create_task(_answer_of(engine))
        await _count(3, lambda: len(begun))
        released.set()
        assert all(len(answer.tokens) for answer in await asyncio.gather(second, third))
        assert (await _answer_of(engine)).tokens

    with tiny.engine(max_queue=1) as engine:
        asyncio.run(run(engine))
        assert engine.stats()["errors_total"] == 0


def test_requests_are_prepared_by_threads_of_their_own() -> None:
    """Others that do not end hold up no request."""
    held, before = threading.Event(), threading.enumerate()

    async def run(engine: Engine) -> Answer:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        other = loop.run_in_executor(None, held.wait, 60)
        try:
            async with asyncio.timeout(30):
                return await _answer_of(engine)
        finally:
            held.set()
            await other

    with tiny.engine() as engine:
        assert asyncio.run(run(engine)).tokens
    new = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in new if thread.name.startswith("ragjax-prepare") and _lives(thread)]


def _lives(thread: threading.Thread) -> bool:
    thread.join(20)
    return thread.is_alive()


class Simulated:
    """A server of one place and a queue, in which every request takes `seconds`; time goes on by `until`."""

    def __init__(self, seconds: float, most: int):
        self.overload, self.seconds, self.most = Overload(), seconds, most
        self.now, self.ends = 0.0, []

    def until(self, now: float) -> None:
        while self.ends and self.ends[0] <= now:
            self.overload.end(self.ends.pop(0))
        self.now = now

    def arrive(self) -> float | None:
        """None if it is taken in, or when to come again."""
        if len(self.ends) > self.most:
            return self.overload.retry_after(self.now)
        self.overload.begin(self.now)
        self.ends.append(max(self.now, self.ends[-1] if self.ends else self.now) + self.seconds)
        return None


def test_who_comes_again_when_told_finds_a_place() -> None:
    """A burst of clients, each of which comes again when it was told: hardly one comes in vain, and none waits long."""
    for seconds, most in ((2.0, 5), (0.3, 20), (7.0, 3)):
        server = Simulated(seconds, most)
        for _ in range(3):  # something has ended, so the rate is known
            assert server.arrive() is None
        server.until(4 * seconds)
        while server.arrive() is None:
            pass
        events, vain, late = [(server.now, 0) for _ in range(most)], 0, 0.0
        while events:
            events.sort()
            now, times = events.pop(0)
            server.until(now)
            idle = not server.ends
            after = server.arrive()
            if after is None:
                late += idle and times > 0
                continue
            vain += times > 0
            assert 0 < after <= (most + 2) * seconds * 1.5, "nobody is sent further than all who are present take"
            events.append((now + after + 1e-6, times + 1))
            assert times < 6
        assert vain <= most and late <= 1


def test_the_rate_is_that_of_the_time_in_which_somebody_was_there() -> None:
    overload = Overload()
    assert overload.retry_after(0.0) == 1.0, "unknown"
    overload.begin(100.0)
    overload.end(101.0)
    overload.begin(1000.0)  # nobody was there for a quarter of an hour
    assert overload.rate(1001.0) == 1.0
    for end in range(1001, 1100):
        overload.begin(float(end) - 0.5)
        overload.end(float(end))
    assert overload.rate(1099.0) == pytest.approx(1.0, rel=0.05)


def test_many_refused_at_once_are_not_sent_to_the_same_place() -> None:
    overload = Overload()
    for end in range(1, 11):
        overload.begin(end - 1.0)
        overload.begin(end - 0.5)
        overload.end(float(end))
    told = [overload.retry_after(10.0) for _ in range(15)]
    assert told[:3] == pytest.approx([1.0, 2.0, 3.0])
    assert max(told) == pytest.approx(10.0), "all ten who are present have ended by then"
    assert all(isinstance(answer, float) for answer in told)
