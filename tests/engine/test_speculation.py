"""Speculative retrieval in the engine: the same answers, nothing out before it is confirmed, nothing left behind."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ragjax.core import (
    Answer,
    ClosedError,
    Delta,
    Document,
    Event,
    Hit,
    Message,
    OverloadError,
    Rag,
    Request,
    RequestError,
    Sampling,
)
from ragjax.engine import Engine
from ragjax.engine.speculation import Pipeline
from ragjax.retrieval import index
from ragjax.retrieval.knowledge import KnowledgeBase, Query, SearchStage
from ragjax.reuse import strategies
from ragjax.schedule.state import RequestState
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.matrix import few
from tests.support.pace import Hold, failing, lasting, resting
from tests.support.pace import until as _until

KINDS = pytest.mark.parametrize("kind", list(index.IndexKind))
GOODS = ("salt", "honey", "copper", "silk", "tar", "wool", "amber", "rope", "figs", "ink")
DOCUMENTS = [
    Document(f"d{i}", f"Isle {i} sells {GOODS[i % 10]} and {GOODS[(i * 7 + i // 10) % 10]}, pier {i % 4}.")
    for i in range(80)
]
QUESTIONS = [f"Which isle sells {a} and {b}?" for a, b in zip(GOODS, GOODS[3:] + GOODS[:3], strict=True)]
ONE, TWO, THREE, LONG = ("d1",), ("d1", "d2"), ("d1", "d3"), tuple(f"d{i}" for i in range(40))
LONGER = LONG[:8]


def _engine(stages: int = 4, **options: Any) -> Engine:
    made = tiny.engine(speculate=stages, **options)
    made.add_documents(DOCUMENTS)
    return made


def _request(question: str = "Which?", tokens: int = 4, **rag: Any) -> Request:
    return Request((Message("user", question),), sampling=Sampling(max_tokens=tokens), rag=Rag(**rag))


@dataclass
class Script:
    """A search whose stages find given documents. `gate(number)` is called before each, in the search's thread."""

    stages: Sequence[tuple[str, ...]]
    gate: Callable[[int], object] = lambda number: None
    asked: list[int] = field(default_factory=list)

    def __call__(self, base: KnowledgeBase, query: object, k: int, n: int) -> Iterator[SearchStage]:
        for number, names in enumerate(self.stages):
            self.gate(number)
            self.asked.append(number)
            hits = tuple(Hit(chunk, 0.5) for name in names for chunk in base.document(name))
            yield SearchStage(hits, number == len(self.stages) - 1)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Script]:
    def install(*stages: tuple[str, ...], gate: Callable[[int], object] = lambda number: None) -> Script:
        script = Script(stages, gate)
        monkeypatch.setattr(KnowledgeBase, "stages", lambda base, *asked: script(base, *asked))
        return script

    return install


def _offers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[RequestState]:
    """Generations that are begun on a guess from now on."""
    offered: list[RequestState] = []
    start = Pipeline._start_offered
    monkeypatch.setattr(Pipeline, "_start_offered", lambda one, state: (offered.append(state), start(one, state))[1])
    return offered


def _counted(engine: Engine) -> tuple[int, int, int]:
    """Speculations that were hit, wrong and skipped."""
    engine._loop.call(lambda: None)  # an answer may be out before the engine's thread has counted it
    seen = engine.stats()["speculations_total"]
    return seen.get("hit", 0), seen.get("wrong", 0), seen.get("skipped", 0)


def _is_clean(engine: Engine) -> bool:
    loop = engine._loop
    _until(lambda: not loop.requests.live and not loop.requests.limit.counted and not loop.requests.offered)
    audit_engine(engine)
    return True


def _same(a: Answer, b: Answer) -> bool:
    """Equal but for times, and how much came from the cache."""
    np.testing.assert_allclose(a.logits, b.logits, atol=2e-4)
    whose = [(s.id, s.tokens, s.score) for s in a.segments] == [(s.id, s.tokens, s.score) for s in b.segments]
    return whose and (a.tokens, a.text, a.strategy, a.exact_to) == (b.tokens, b.text, b.strategy, b.exact_to)


# ------------------------------------------------------------------------------------------------- answers


@pytest.mark.slow
@KINDS
def test_answers_are_those_without_speculation(kind: index.IndexKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "TRAIN_AT", 40)
    asked = {"max_tokens": 3, "want_logits": True, "top_k": 2}
    with _engine(0, index=str(kind)) as engine:
        plain = [engine.answer(question, **asked) for question in QUESTIONS]
        assert _counted(engine) == (0, 0, 0)
    with _engine(4, index=str(kind)) as engine:
        whole = KnowledgeBase.stages

        def slow(base: KnowledgeBase, question: str, k: int, n: int) -> Iterator[SearchStage]:
            for stage in whole(base, question, k, n):
                engine._loop.call(lambda: None)  # what was offered before has arrived
                _until(lambda: not engine._loop.requests.offered)
                yield stage

        monkeypatch.setattr(KnowledgeBase, "stages", slow)
        guessed = [engine.answer(question, **asked) for question in QUESTIONS]
        hit, wrong, _ = _counted(engine)
        assert bool(hit) is (kind is not index.IndexKind.FLAT), "it is searched in one stage"
        assert bool(wrong) is (kind is index.IndexKind.IVF), "few vectors: a short list of candidates finds all"
        stats = engine.stats()
        assert stats["requests_total"] == {"prefix": len(QUESTIONS)}
        assert _is_clean(engine)
    assert all(_same(a, b) for a, b in zip(plain, guessed, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(strategies().keys() - {"dependency", "dependency-preorder"}))
def test_every_strategy_answers_as_without(
    name: str, scripted: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong guess that runs to its end comes first. What depends on earlier requests is not begun on a guess."""
    steady = strategies()[name].steady
    answers: list[Answer] = []
    for stages in (0, 3):
        with _engine(stages) as engine:
            offered = _offers(engine, monkeypatch)

            def ended(number: int, engine: Engine = engine, offered: list[RequestState] = offered) -> None:
                if number:
                    _until(lambda: len(offered) == number and offered[-1].ended)

            hits = tuple(Hit(chunk, 0.5) for name in TWO for chunk in engine.knowledge_base().document(name))
            monkeypatch.setattr(KnowledgeBase, "search", lambda base, question, k, hits=hits, **_: hits)
            scripted(THREE, TWO, TWO, gate=ended)
            answers.append(engine.answer("Which?", strategy=name, max_tokens=3, want_logits=True))
            assert _is_clean(engine)
            assert _counted(engine) == ((1, 1, 0) if steady and stages else (0, 0, 0))
    assert _same(*answers)


def test_figure_11(scripted: Callable[..., Script]) -> None:
    with _engine() as engine, ExitStack() as rest:
        rest.enter_context(resting(engine))
        started: list[object] = []

        def begun(number: int) -> None:
            running = engine._loop.requests
            if number in (1, 2):  # what was offered last has started
                _until(lambda: running.running and running.running[0] not in started)
                started.append(running.running[0])
            if number == 2:
                rest.close()

        scripted(THREE, TWO, TWO, TWO, gate=begun)
        answer = engine.answer("Which?", max_tokens=200)
        assert [s.id for s in answer.segments[1:-1]] == ["d1#0", "d2#0"]
        assert _counted(engine) == (1, 1, 0) and len(started) == 2
        timings = answer.timings
        assert 0 < timings.search_exposed < timings.retrieve <= timings.ttft <= timings.total
        assert engine.stats()["requests_total"] == {"prefix": 1}
        assert _is_clean(engine)


def test_a_wrong_guess_that_was_answered_is_counted_as_nothing_but_waste(
    scripted: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    with _engine() as engine:
        offered = _offers(engine, monkeypatch)

        def ended(number: int) -> None:
            if number == 1:
                _until(lambda: offered[0].ended)
                assert engine.stats()["requests_total"] == {}

        scripted(THREE, TWO, gate=ended)
        answer = engine.answer("Which?", max_tokens=3)
        stats = engine.stats()
        assert _counted(engine) == (0, 1, 0) and stats["requests_total"] == {"prefix": 1}
        wasted = len(offered[0].prompt) + 2
        assert stats["speculative_wasted_tokens_total"] == wasted, "the prompt, and the answer but its last token"
        assert (stats["prompt_tokens_total"], stats["generated_tokens_total"]) == (answer.prompt_tokens, 3)
        assert answer.timings.search_exposed == answer.timings.retrieve
        assert answer.cached_tokens > 0, "what was finished for the wrong guess stays"
        assert _is_clean(engine)


def test_nothing_is_out_before_the_documents_are_confirmed(
    scripted: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    confirmed = threading.Event()
    with _engine() as engine:
        offered = _offers(engine, monkeypatch)
        scripted(TWO, TWO, gate=lambda number: number and confirmed.wait(60))
        seen: list[Event] = []

        async def client() -> None:
            async def read() -> None:
                async for event in engine.submit(_request()):
                    seen.append(event)

            reading = asyncio.create_task(read())
            await asyncio.to_thread(_until, lambda: offered and offered[0].ended)  # the whole answer is there
            await asyncio.sleep(0.05)
            assert not seen and not reading.done()
            confirmed.set()
            await reading

        asyncio.run(client())
        assert [type(event) for event in seen[:-1]] == [Delta] * (len(seen) - 1) and isinstance(seen[-1], Answer)
        timings = seen[-1].timings
        assert engine.inventory().requests[0].ttft == timings.ttft
        assert min(timings.retrieve, timings.ttft, timings.total) >= 50
        assert 0 < timings.search_exposed < timings.retrieve - 50  # it computed while the search went on
        assert _counted(engine) == (1, 0, 0)
        _until(lambda: engine.stats()["requests_total"] == {"prefix": 1})
        assert _is_clean(engine)


@pytest.mark.parametrize(
    "request_",
    [
        Request(prompt="Some text", sampling=Sampling(max_tokens=2)),
        _request(documents=("d1",)),
        _request(top_k=0),
        Request((Message("user", "Which?"),), sampling=Sampling(max_tokens=2), rag=None),
        _request(strategy="craft"),
        _request(strategy="set-cache"),
    ],
    ids=["text", "documents", "none", "no rag", "craft", "set-cache"],
)
def test_requests_that_are_not_begun_on_a_guess(request_: Request, scripted: Callable[..., Script]) -> None:
    script = scripted(ONE, TWO)
    with _engine() as engine:
        assert tiny.answer(engine, request_).tokens
        assert _counted(engine) == (0, 0, 0) and not script.asked


async def _read(engine: Engine, request: Request) -> Answer:
    events = [event async for event in engine.submit(request)]
    assert isinstance(events[-1], Answer)
    return events[-1]


def test_a_guess_that_cannot_be_served_does_no_harm(scripted: Callable[..., Script]) -> None:
    with _engine() as engine:

        def begun(number: int) -> None:
            if number == 2:
                engine._loop.call(lambda: None)
                _until(lambda: not engine._loop.requests.offered)

        scripted(LONG, TWO, TWO, gate=begun)
        assert engine.answer("Which?", max_tokens=2).tokens and _counted(engine) == (1, 0, 0)
        scripted(TWO, LONG)
        with pytest.raises(RequestError, match="context"):
            engine.answer("Which?", max_tokens=2)
        assert _is_clean(engine)


def test_a_guess_that_fails_in_the_engine_is_computed_anew(
    scripted: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    with _engine() as engine:
        failing(monkeypatch, engine._runner, "step", 1, 2)  # it is started again once

        def failed(number: int) -> None:
            if number:
                _until(lambda: engine.stats()["step_failures_total"] == 2 and not engine._loop.requests.live)
                engine._loop.call(lambda: None)  # the guess is told

        scripted(TWO, TWO, gate=failed)
        assert engine.answer("Which?", max_tokens=2).tokens
        assert _counted(engine)[0] == 0 and _is_clean(engine)
        assert engine.stats()["errors_total"] == 0, "the request was answered"


# --------------------------------------------------------------------------------------- the pool, the queue


def test_a_full_pool_begins_no_guess(scripted: Callable[..., Script]) -> None:
    with _engine(max_running=1) as engine:
        busy = [lasting(engine, tiny.prompt(0), max_tokens=300)]
        busy += [engine.begin_prompt(tiny.prompt(i), max_tokens=300) for i in range(1, 5)]
        _until(lambda: engine.stats()["queue_depth"] == 4)
        scripted(THREE, TWO, TWO, gate=lambda number: _until(lambda: engine.stats()["steps_total"]))
        answering = ThreadPoolExecutor(1).submit(engine.answer, "Which?", max_tokens=2)
        _until(lambda: sum(_counted(engine)) == 2)
        for future in busy:
            future.cancel()
        assert answering.result(60).tokens and _counted(engine) == (0, 0, 2)
        assert _is_clean(engine)


def test_a_guess_begins_when_the_pool_has_room(
    scripted: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    with _engine(max_running=1) as engine:
        offered = _offers(engine, monkeypatch)
        busy = [lasting(engine, tiny.prompt(0), max_tokens=500)]
        busy += [engine.begin_prompt(tiny.prompt(i), max_tokens=500) for i in range(1, 5)]
        _until(lambda: engine.stats()["queue_depth"] == 4)

        def room(number: int) -> None:
            if number == 1:
                _until(lambda: engine._loop.requests.offered)
                for future in busy:
                    future.cancel()
                _until(lambda: offered[0].running or offered[0].ended)

        scripted(TWO, TWO, gate=room)
        assert engine.answer("Which?", max_tokens=2).tokens and _counted(engine) == (1, 0, 0)
        assert _is_clean(engine)


def test_a_guess_is_in_no_queue_until_it_is_confirmed(scripted: Callable[..., Script]) -> None:
    """With a full queue one that runs goes on when it is confirmed; one that waits is refused before any event."""
    confirmed = threading.Event()
    with _engine(max_queue=1, max_running=1) as engine:
        scripted(TWO, TWO, gate=lambda number: number and confirmed.wait(60))
        with ThreadPoolExecutor(2) as pool:
            with resting(engine):
                first = pool.submit(engine.answer, "Which?", max_tokens=400)
                _until(lambda: engine._loop.running)
                second = pool.submit(engine.answer, "Which other?", max_tokens=400)
                _until(lambda: engine._loop.waiting)
                assert not engine._loop.requests.limit.counted
                with Hold(engine):
                    others = [engine.begin_prompt(tiny.prompt(i), max_tokens=1) for i in range(2)]
                    with pytest.raises(OverloadError):
                        engine.begin_prompt(tiny.prompt(5), max_tokens=1)
                    confirmed.set()
                    with pytest.raises(OverloadError):
                        second.result(60)
            assert len(first.result(60).tokens) > 1
        assert all(future.result(60).tokens for future in others)
        assert _is_clean(engine) and engine.stats()["cancelled_total"] == 0


def test_the_final_documents_respect_the_queue(scripted: Callable[..., Script]) -> None:
    held = threading.Event()
    with _engine(max_queue=1) as engine:

        def fill(number: int) -> None:
            if number == 1:
                engine._loop._inbox.put(lambda: held.wait(60) and None)
                for i in range(2):
                    engine.begin_prompt(tiny.prompt(i), max_tokens=1)

        scripted(THREE, TWO, gate=fill)
        with pytest.raises(OverloadError):
            tiny.answer(engine, _request())
        held.set()
        assert _is_clean(engine)


# ------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("running", [True, False], ids=["running", "at once"])
@pytest.mark.parametrize("number", range(4))
def test_client_that_leaves_during_a_stage(number: int, running: bool, scripted: Callable[..., Script]) -> None:
    reached, gone = threading.Event(), threading.Event()
    with _engine() as engine, resting(engine):

        def gate(at: int) -> None:
            if at == number:
                if at and running:
                    _until(lambda: engine._loop.running)
                reached.set()
                assert gone.wait(60)

        script = scripted(THREE, TWO, TWO, THREE, gate=gate)

        async def client() -> None:
            first: asyncio.Task[Any] = asyncio.create_task(anext(engine.submit(_request(tokens=500))))
            assert await asyncio.to_thread(reached.wait, 60)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            gone.set()

        asyncio.run(client())
        engine._preparers.shutdown()  # the search's thread has ended
        assert script.asked[-1] == number, "the search goes on"
        assert _is_clean(engine) and engine.stats()["requests_total"] == {}


def test_client_that_leaves_when_its_documents_are_confirmed(
    scripted: Callable[..., Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the confirmation, in the search's thread, and the first event."""
    with _engine() as engine, resting(engine):
        gone, reached = threading.Event(), threading.Event()
        confirm = Pipeline._confirm

        def confirmed(pipeline: Pipeline, state: Any) -> None:
            confirm(pipeline, state)
            reached.set()
            assert gone.wait(60)

        monkeypatch.setattr(Pipeline, "_confirm", confirmed)
        scripted(TWO, TWO, gate=lambda number: number and _until(lambda: engine._loop.running))

        async def client() -> None:
            first: asyncio.Task[Any] = asyncio.create_task(anext(engine.submit(_request(tokens=500))))
            assert await asyncio.to_thread(reached.wait, 60)
            first.cancel()
            threading.Timer(0.05, gone.set).start()
            with pytest.raises(asyncio.CancelledError):
                await first

        asyncio.run(client())
        engine._preparers.shutdown()  # the search's thread has ended
        assert _is_clean(engine) and engine.stats()["cancelled_total"] == 1


def test_engine_that_closes_during_a_search(scripted: Callable[..., Script]) -> None:
    closed = threading.Event()
    engine = _engine()

    def gate(number: int) -> None:
        if number == 1:
            _until(lambda: engine._loop.requests.live)
            closed.set()
            _until(lambda: engine._loop.closed and not engine._loop._thread.is_alive())

    scripted(TWO, TWO, gate=gate)
    with ThreadPoolExecutor(1) as pool, resting(engine):
        answering = pool.submit(engine.answer, "Which?", max_tokens=500)
        assert closed.wait(60)
        engine._loop.close()
        with pytest.raises(ClosedError):
            answering.result(60)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(4), [0]))
def test_random_searches_and_clients(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many at once, with stages at random times; some clients leave. The others get the answers of a plain engine."""
    rng = random.Random(seed)
    lists = [ONE, TWO, THREE, ("d4", "d1"), ("d2", "d1")]
    scripts = {
        f"Which {i}?": [rng.choice(lists) for _ in range(rng.randint(1, 5))] + [rng.choice(lists)] for i in range(40)
    }
    leaves = {question: rng.random() * 0.3 if rng.random() < 0.3 else None for question in scripts}
    pauses = {question: rng.random() * 0.06 for question in scripts}

    def stages(base: KnowledgeBase, query: Query, k: int, n: int) -> Iterator[SearchStage]:
        return Script(scripts[query.text], lambda number: time.sleep(pauses[query.text]))(base, query, k, n)

    def final(base: KnowledgeBase, query: Query, k: int, **_: object) -> tuple[Hit, ...]:
        (stage,) = Script(scripts[query.text][-1:])(base, query, k, 1)
        return stage.hits

    monkeypatch.setattr(KnowledgeBase, "stages", stages)
    monkeypatch.setattr(KnowledgeBase, "search", final)
    with _engine(0) as engine:
        plain = {question: engine.answer(question, max_tokens=6) for question in scripts}
    told: dict[str, Answer] = {}

    async def client(engine: Engine, question: str) -> None:
        await asyncio.sleep(rng.random() * 2)
        try:
            asked = _read(engine, _request(question, 6))
            told[question] = await asyncio.wait_for(asked, leaves[question])
        except TimeoutError:
            pass

    async def clients(engine: Engine) -> None:
        await asyncio.gather(*(client(engine, question) for question in scripts))

    with _engine(4, pages=100, max_running=rng.choice([0, 2])) as engine:
        asyncio.run(clients(engine))
        assert _is_clean(engine)
        assert any(_counted(engine))  # hit, wrong or skipped: which, depends on the machine
    assert len(told) >= 20
    for question, answer in told.items():
        assert answer.tokens == plain[question].tokens and answer.timings.search_exposed <= answer.timings.retrieve
