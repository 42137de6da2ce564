"""The engine as a whole, on the miniature model: concurrency, cancellation, failures, accounting."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ragjax.cache.cache import KnowledgeCache
from ragjax.core import (
    ClosedError,
    ConfigError,
    Document,
    Event,
    Grid,
    Kind,
    Message,
    OverloadError,
    Place,
    Prompt,
    Rag,
    Request,
    RequestError,
    Sampling,
    Segment,
)
from ragjax.engine import Engine
from ragjax.engine.build import _compile
from ragjax.engine.provision import least
from ragjax.reuse import strategies
from ragjax.reuse.exact import Full, Prefix
from ragjax.runner.runner import Runner
from ragjax.schedule.batch import Batch
from ragjax.schedule.generation import AnswerText
from ragjax.store.transfer import KVTransfer
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.pace import Hold, lasting, resting, until

DOCUMENTS = [
    Document("ferry", "The ferry to Orlan leaves at nine in the morning.", "Ferry"),
    Document("bakery", "The bakery of Marn sells rye bread and plum cake.", "Bakery"),
    Document("tower", "The tower on the hill was built by Ida Quell.", "Tower"),
]


@pytest.fixture
def engine(engine: Engine) -> Engine:
    engine.add_documents(DOCUMENTS)
    return engine


def ask(text: str, **options: object) -> Request:
    rag = options.pop("rag", Rag(top_k=2))
    return Request((Message("user", text),), sampling=Sampling(**options), rag=rag)


def test_an_answer_accounts_for_everything(engine: Engine) -> None:
    async def collect() -> list[Event]:
        return [event async for event in engine.submit(ask("When does the ferry to Orlan leave?", max_tokens=9))]

    *deltas, answer = asyncio.run(collect())
    assert "".join(delta.text for delta in deltas) == answer.text and len(answer.tokens) <= 9
    assert [s.id for s in answer.segments][:2] == ["system", "ferry#0"]
    assert answer.segments[1].score is not None
    assert sum(s.tokens for s in answer.segments) == answer.prompt_tokens
    assert all(s.tokens == s.reused + s.recomputed for s in answer.segments)
    again = engine.answer("When does the ferry to Orlan leave?", top_k=2, max_tokens=9)
    assert again.cached_tokens == answer.prompt_tokens - 1 and again.tokens == answer.tokens
    times = again.timings
    assert 0 < times.retrieve < times.ttft <= times.total and times.prefill > 0
    stats = engine.stats()
    assert stats["requests_total"] == {"prefix": 2}
    assert stats["reused_tokens_total"] == again.cached_tokens
    assert stats["prompt_tokens_total"] == 2 * answer.prompt_tokens


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 40))])
def test_concurrent_requests_answer_as_they_do_alone(seed: int) -> None:
    names = ["full", "prefix", "naive"]
    jobs = [
        (
            tiny.prompt(seed * 100 + i % 4, chunks=(20 + i, 35)),
            {"strategy": names[i % 3], "max_tokens": 5 + 3 * (i % 4)},
        )
        for i in range(9)
    ]
    alone = tiny.alone(jobs)
    with tiny.engine() as engine, ThreadPoolExecutor(len(jobs)) as pool:
        with Hold(engine):
            futures = [pool.submit(engine.answer_prompt, prompt, **options) for prompt, options in jobs]
            until(lambda: len(engine._loop.requests.limit.counted) == len(jobs))
        assert [future.result(60).tokens for future in futures] == alone
        audit_engine(engine)
        steps = engine.stats()["steps_total"]
    assert steps < sum(options["max_tokens"] for _, options in jobs), "requests were batched"


def test_a_fallback_of_attention_shows_in_the_answer() -> None:
    made = tiny.make_runner(attention="triton")
    with tiny.engine() as plain, tiny.engine(made) as wishful:
        first, second = (engine.answer_prompt(tiny.prompt(0), max_tokens=2) for engine in (plain, wishful))
        stats = wishful.stats()
    assert first.tokens == second.tokens
    assert first.notices == ()
    assert second.notices == ("attention not by triton: it runs on GPUs, not on cpu",)
    assert stats["attention_calls_total"].keys() == {"cpu"}
    assert stats["attention_fallbacks_total"]["triton: it runs on GPUs, not on cpu"] > 0


def test_exact_under_eviction_pressure() -> None:
    """A pool for one request and a half: everything is evicted all the time, and answers stay the same."""
    prompts = [tiny.prompt(i, chunks=(40, 50)) for i in range(4)]
    with tiny.engine() as roomy:
        expected = [roomy.answer_prompt(p, strategy="full", max_tokens=6).tokens for p in prompts]
    with tiny.engine(pages=17) as tight:
        for _ in range(3):
            for prompt, tokens in zip(prompts, expected, strict=True):
                assert tight.answer_prompt(prompt, strategy="prefix", max_tokens=6).tokens == tokens
                audit_engine(tight)
        assert tight.stats()["evicted_tokens_total"] > 0
        naive = [tight.answer_prompt(p, strategy="naive", max_tokens=6).tokens for p in prompts]
        assert naive == [tight.answer_prompt(p, strategy="naive", max_tokens=6).tokens for p in prompts]


def test_who_stands_behind_a_cancelled_request_is_served() -> None:
    with tiny.engine(pages=40, strategy="full") as engine:
        long = lasting(engine, tiny.prompt(1), max_tokens=300)
        large = engine.begin_prompt(tiny.prompt(2, 20, (200, 200, 87)), max_tokens=50)
        small = engine.begin_prompt(tiny.prompt(3, 5, (5,), 5), max_tokens=1)
        until(lambda: engine._loop.requests.blocked)
        large.cancel()
        assert small.result(60).tokens and not long.done()
        long.cancel()


def test_background_requests_cost_others_no_room() -> None:
    """A beginning that was made piece by piece lies on as many pages; it is moved together, whoever else ran."""
    text = tiny.prompt(0, 900, (), 1).tokens[:900]

    def begin(n: int) -> Prompt:
        return Prompt((Segment("text", Kind.QUERY, text[:n]),))

    with tiny.engine(pages=60) as engine:
        for n in range(8, 64, 4):
            engine.answer_prompt(begin(n), max_tokens=1)
        prompt = tiny.prompt(9, 20, (10,), 10)
        background = lasting(engine, prompt, strategy="full", max_tokens=300, background=True)
        assert len(engine.answer_prompt(begin(900), max_tokens=2).tokens) == 2
        background.cancel()


def test_cancelled_requests_give_everything_back(engine: Engine) -> None:
    async def abandon() -> None:
        stream = engine.submit(ask("When does the ferry leave?", max_tokens=400))
        async for _ in stream:
            break
        await stream.aclose()

    with resting(engine, lambda state: len(state.decoded) > 30):
        asyncio.run(abandon())
    engine.answer("Who built the tower?", max_tokens=2)  # the loop has passed a boundary since
    audit_engine(engine)
    stats = engine.stats()
    assert stats["cancelled_total"] == 1 and stats["running"] == 0


def test_an_answer_without_a_limit_that_repeats_itself_is_ended_and_says_so(engine: Engine) -> None:
    asked: dict[str, Any] = {"top_k": 0, "logit_bias": {104: 100.0}}
    answer = engine.answer("When?", max_tokens=None, **asked)
    assert (len(answer.tokens), answer.finish_reason) == (256, "length")
    assert [getattr(notice, "code", None) for notice in answer.notices].count("repeated") == 1
    limited = engine.answer("When?", max_tokens=300, **asked)
    assert limited.tokens == (104,) * 300 and not any("repeated" in notice for notice in limited.notices)


def test_requests_that_cannot_be_served_say_why(engine: Engine) -> None:
    with pytest.raises(RequestError, match="unknown strategy 'magic'"):
        engine.answer("Hello?", strategy="magic")
    with pytest.raises(RequestError, match="unknown strategy 'prefixx'; did you mean prefix"):
        engine.answer("Hello?", strategy="prefixx")
    with pytest.raises(RequestError, match="unknown strategy ''"):
        engine.answer("Hello?", strategy="")
    with pytest.raises(RequestError, match="unknown knowledge base 'moon'"):
        engine.answer("Hello?", knowledge="moon")
    for rag in ({"top_k": 0}, {"documents": [Document("d", "words")]}):
        with pytest.raises(RequestError, match="unknown knowledge base 'moon'"):
            engine.answer("Hello?", knowledge="moon", **rag)
    with pytest.raises(RequestError, match="context holds 1024"):
        engine.answer("x" * 2000, top_k=0)
    with pytest.raises(RequestError, match="no message is the user"):
        engine.answer([Message("assistant", "Hi")])
    with pytest.raises(RequestError, match="max_tokens"):
        engine.answer("Hello?", max_tokens=0)
    with pytest.raises(RequestError, match="no text"):
        engine.answer("Hello?", documents=[Document("d", "  ")])
    assert engine.stats()["running"] == 0


@pytest.mark.parametrize("asked", [{"shadow_rate": 0.5}, {"quality_budget": "KL=0.1"}])
def test_what_may_turn_to_full_attention_needs_that_strategy(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"the strateg.* full"):
        Engine.load("none", strategies={"prefix": Prefix()}, **asked)


def test_a_long_raw_prompt_is_named_as_such(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"2000 tokens; .*Shorten it$") as refused:
        tiny.answer(engine, Request(prompt="x" * 2000))
    assert refused.value.param == "prompt"


def test_what_goes_on_from_a_raw_prompt_keeps_its_first_space(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizers that put a space in front of a text leave it out where an answer begins, not within a text."""
    monkeypatch.setattr(engine.tokenizer._form, "strips_space", True)
    push = AnswerText.push
    monkeypatch.setattr(AnswerText, "push", lambda self, chosen: push(self, replace(chosen, token=ord(" "))))
    assert tiny.answer(engine, Request(prompt="The sea is", sampling=Sampling(2))).text == "  "
    assert tiny.answer(engine, ask("How is the sea?", max_tokens=2)).text == " "


def test_texts_that_are_clearly_too_long_are_refused_before_they_are_all_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokenizer, "encode", lambda *_, **__: pytest.fail("it was all encoded"))
    text = "words and words " * 50_000
    for request, param in ((Request(prompt=text), "prompt"), (Request((Message("user", text),)), "messages")):
        with pytest.raises(RequestError, match=r"more than 1024 tokens.*Shorten") as refused:
            tiny.answer(engine, request)
        assert (refused.value.param, refused.value.code) == (param, "context_length_exceeded")


def test_a_request_larger_than_the_pool_is_refused_at_once() -> None:
    with tiny.engine(pages=8) as engine, pytest.raises(RequestError, match="device cache"):
        engine.answer_prompt(tiny.prompt(chunks=(100, 100)), max_tokens=4)


def test_more_passages_than_a_step_can_read_are_refused_at_once(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"202 passages.*fewer passages") as refused:
        engine.answer_prompt(tiny.prompt(chunks=(2,) * 200), max_tokens=4)
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.slow
def test_what_the_default_strategy_runs_is_compiled_before_any_request() -> None:
    """Its passes that end within a stage, too (CacheBlend's two layers)."""
    made = Runner(tiny.decoder(), pages=100, page_size=tiny.PAGE, grid=Grid(((2, 2), (128, 16)), (64,), (2,)))
    _compile(made, least(made, [strategies()["blend"]], None, whole=True), progress=False)
    before = set(made._programs.compiled)
    with tiny.engine(made, pages=100, strategy="blend") as engine:
        assert engine.answer_prompt(tiny.prompt(), max_tokens=3).strategy == "blend"
    assert set(made._programs.compiled) == before


def test_no_more_requests_run_than_may() -> None:
    most: list[tuple[int, int]] = []
    with tiny.engine(max_running=2) as engine:
        loop, launch = engine._loop, engine._loop._execution.launch

        def watched(batch: Batch) -> None:
            most.append((loop.running, loop.waiting))
            launch(batch)

        loop._execution.launch = watched
        with Hold(engine):
            running = [engine.begin_prompt(tiny.prompt(i), max_tokens=20) for i in range(6)]
        assert [len(future.result(60).tokens) for future in running] == [20] * 6
        assert max(at_once for at_once, _ in most) == 2 and max(waiting for _, waiting in most) >= 4


@pytest.mark.parametrize("busy", [True, False])
def test_as_many_requests_wait_as_may(busy: bool) -> None:
    """While the engine's thread is held, behind a request that runs or before one that is about to."""
    with tiny.engine(max_queue=2) as engine:
        first = lasting(engine, tiny.prompt(0), max_tokens=700) if busy else None
        with Hold(engine):
            waiting = [engine.begin_prompt(tiny.prompt(i), max_tokens=1) for i in range(2 if busy else 3)]
            with pytest.raises(OverloadError, match="2 requests wait"):
                engine.begin_prompt(tiny.prompt(9), max_tokens=1)
        if first is not None:
            first.cancel()
        assert all(future.result().tokens for future in waiting)


def test_documents_given_with_the_request(engine: Engine) -> None:
    answer = engine.answer("Who?", documents=["tower", Document("mine", "Bo has a red kite.", "Kite")], max_tokens=2)
    assert [s.id for s in answer.segments[1:-1]] == ["tower#0", "mine#0"]
    assert "mine" not in engine.document_ids(), "documents of a request are not stored"
    with pytest.raises(RequestError, match="nowhere"):
        engine.answer("Who?", documents=["nowhere"])


def test_an_answer_says_where_its_passages_are_from() -> None:
    keeper = Document("keeper", "The keeper climbed the tower.", "Log", (Place(0, 12, "Tower > Stairs"),), "log.pdf")
    boat = Document("boat", "A boat came in with the tide.", "Harbour")
    with tiny.engine() as engine:
        engine.add_documents([keeper, boat], "harbour")
        answer = engine.answer("The keeper climbed", knowledge="harbour", top_k=2, max_tokens=1)
        first, second = answer.sources
        assert [answer.segments[one.segment].id for one in answer.sources] == ["keeper#0", "boat#0"]
        assert (first.knowledge, first.file_id, first.filename, first.title) == ("harbour", "keeper", "log.pdf", "Log")
        assert (first.page, first.heading) == (12, "Tower > Stairs") and "climbed" in first.text
        assert first.score == answer.segments[first.segment].score
        assert (second.filename, second.page, second.heading) == ("Harbour", None, None)
        given = engine.answer("Who?", knowledge="harbour", documents=["keeper", Document("n", "A note.")], max_tokens=1)
        known = [(one.knowledge, one.filename, one.page, one.score) for one in given.sources]
        assert known == [("harbour", "log.pdf", 12, None), (None, "n", None, None)]
        assert engine.answer("Who?", top_k=0, max_tokens=1).sources == ()


@pytest.mark.parametrize(
    "documents",
    [[Document("d", "word " * 300_000)], [Document(f"d{i}", "word " * 100) for i in range(300)], ["tower"] * 10_000],
)
def test_documents_that_are_too_long_are_refused_before_they_are_all_read(
    engine: Engine, documents: list[str | Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preparation cannot be cancelled, and holds up those of others."""
    encoded: list[int] = []
    preparation = engine._preparation
    grounding = preparation.composer.grounding
    encode = grounding.chunker.encode
    spy = replace(grounding.chunker, encode=lambda text: encoded.append(len(text)) or encode(text))
    composer = replace(preparation.composer, grounding=replace(grounding, chunker=spy))
    monkeypatch.setattr(engine, "_preparation", replace(preparation, composer=composer))
    with pytest.raises(RequestError, match="more than 1024 tokens") as refused:
        engine.answer("Who?", documents=documents)
    assert (refused.value.param, refused.value.code) == ("rag.documents", "context_length_exceeded")
    assert max(encoded, default=0) <= 10_000 and sum(encoded) < 100_000


def test_white_space_that_cutting_drops_makes_no_document_too_long(engine: Engine) -> None:
    airy = Document("airy", "It begins." + "\n" * 1500 + "It ends.")
    assert engine.answer("Who?", documents=[airy], max_tokens=1).prompt_tokens < 300


def test_an_empty_knowledge_base_is_an_error() -> None:
    with tiny.engine() as engine:
        engine.add_documents([])
        with pytest.raises(RequestError, match="empty"):
            engine.answer("Hello?", max_tokens=1)
        assert engine.answer("Hello?", top_k=0, max_tokens=1).tokens


class Thoughtless(Full):
    """Fails before its request is admitted."""

    name = "thoughtless"

    def keys(self, prompt: Prompt, cache: KnowledgeCache, tenant: str) -> tuple[bytes, ...]:
        raise ZeroDivisionError("no keys")


def test_a_strategy_that_fails_on_arrival_takes_nobody_along() -> None:
    with tiny.engine(extra=[Thoughtless()]) as engine:
        with pytest.raises(ZeroDivisionError):
            engine.answer_prompt(tiny.prompt(0), strategy="thoughtless", max_tokens=1)
        assert engine.answer_prompt(tiny.prompt(0), max_tokens=1).tokens


def test_closing_ends_running_requests() -> None:
    engine = tiny.engine()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            engine.answer_prompt(tiny.prompt(), max_tokens=600)
        except ClosedError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    with resting(engine):
        thread.start()
        until(lambda: engine.stats()["running"])
        engine.close()
    thread.join()
    assert len(failures) == 1
    engine.close()
    with pytest.raises(ClosedError, match="closed"):
        engine.answer_prompt(tiny.prompt())


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.answer("x", strategy="full", max_tokens=1),
        lambda engine: engine.answer_prompt(tiny.prompt(), max_tokens=1),
        lambda engine: engine.clear_cache(),
        lambda engine: engine.close(),
    ],
)
def test_the_engines_own_thread_cannot_wait_for_it(call: Callable[[Engine], object]) -> None:
    """A callback of a future runs there; it would wait for ever, and everybody with it."""
    told: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    with tiny.engine() as engine:

        def follow(_: object) -> None:
            try:
                call(engine)
                told.put(None)
            except BaseException as error:
                told.put(error)

        with Hold(engine):  # of a future that is done, the callback runs here
            engine.begin_prompt(tiny.prompt(), max_tokens=1).add_done_callback(follow)
        error = told.get(timeout=60)
        assert isinstance(error, RequestError) and "own thread" in str(error)
        engine.answer_prompt(tiny.prompt(), max_tokens=1)


def test_a_close_that_was_interrupted_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, closed = tiny.engine(), list[str]()
    join, library = engine._loop._thread.join, engine.library.close

    def interrupted() -> None:
        monkeypatch.setattr(engine._loop._thread, "join", join)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._loop._thread, "join", interrupted)
    monkeypatch.setattr(engine.library, "close", lambda: (closed.append("library"), library()))
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert not closed
    engine.close()
    engine.close()
    assert closed == ["library"] and not engine._loop._thread.is_alive()


@pytest.mark.parametrize("closed", [False, True])
def test_an_engine_that_is_dropped_says_so_unless_it_was_closed(closed: bool) -> None:
    engine = tiny.engine()
    assert engine.answer_prompt(tiny.prompt(), max_tokens=2).tokens
    with engine.compute_depkv(tiny.prompt()) as kv:
        assert engine.generate_with_depkv(kv, max_tokens=2).tokens
    del kv
    loop = engine._loop
    if closed:
        engine.close()
    gc.collect()  # what other tests dropped
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del engine
        gc.collect()
    loop.close()
    found = [str(one.message) for one in told if one.category is ResourceWarning]
    assert len(found) == (not closed) and all("'tiny' was not closed: " in one for one in found)


def test_an_engine_that_cannot_be_made_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[KVTransfer] = []
    monkeypatch.setattr("ragjax.engine.api.Preparation", lambda *_: 1 / 0)
    monkeypatch.setattr(KVTransfer, "close", lambda transfer: closed.append(transfer))
    before = set(threading.enumerate())  # of which some may end meanwhile
    with pytest.raises(ZeroDivisionError):
        tiny.engine()
    assert len(closed) == 1 and set(threading.enumerate()) <= before


def test_a_process_that_was_forked_off_has_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with tiny.engine() as engine, monkeypatch.context() as forked:
        forked.setattr("os.getpid", lambda: -1)
        with pytest.raises(ClosedError, match="load one in this process"):
            engine.answer_prompt(tiny.prompt(), max_tokens=1)
        engine.close()
        forked.undo()
        engine.answer_prompt(tiny.prompt(), max_tokens=1)


def test_a_strategy_that_ends_its_thread_ends_its_request_alone() -> None:
    class Ends(Full):
        name = "ends"

        def prefill(self, *_: Any, **__: Any) -> Any:
            raise SystemExit("enough")

    with tiny.engine() as engine:
        with pytest.raises(RuntimeError, match="enough"):
            engine.answer_prompt(tiny.prompt(), strategy=Ends(), max_tokens=1)
        engine.answer_prompt(tiny.prompt(), max_tokens=1)


def test_one_text_is_no_list_of_texts() -> None:
    with tiny.engine() as engine:
        engine.add_documents([Document(id, "a few words", id) for id in ("1", "2")])
        for call in (
            lambda: engine.delete_documents("12"),
            lambda: engine.embed("12"),
            lambda: engine.answer("x", documents="12", max_tokens=1),
        ):
            with pytest.raises(RequestError, match=r"must be a list, such as \['12'\]"):
                call()
        assert engine.document_ids() == {"1", "2"}


def test_what_comes_while_the_engine_closes_is_told() -> None:
    """A close that begins between a request's check and its place in the queue must not leave it there for ever."""
    engine = tiny.engine()
    inbox, closing = engine._loop._inbox, threading.Thread(target=engine.close)

    class Slow:
        get = inbox.get

        def put(self, message: object) -> None:
            if not closing.ident:
                closing.start()
                time.sleep(0.2)
            inbox.put(message)

    engine._loop._inbox = Slow()
    told: list[str] = []

    def run() -> None:
        engine.clear_cache()
        told.append("done")

    caller = threading.Thread(target=run, daemon=True)
    caller.start()
    caller.join(30)
    closing.join(30)
    assert told == ["done"] and not closing.is_alive()


@pytest.mark.parametrize("rounds", [25, pytest.param(1000, marks=pytest.mark.long)])
def test_cached_pages_are_never_written(rounds: int) -> None:
    """After every request of a random workload the KV of every node is, to the bit, what it was when admitted."""
    random = np.random.default_rng(7)
    system = tiny.prompt(0).segments[0]
    chunks = [tiny.prompt(i).segments[1] for i in range(5)]
    with tiny.engine(pages=40) as engine:
        seen: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
        for round_ in range(rounds):
            chosen = [chunks[i] for i in random.choice(5, random.integers(1, 4), replace=False)]
            question = Segment("question", Kind.QUERY, random.integers(0, 256, 9).astype(np.int32))
            parts = [replace(c, id=f"{c.id}{i}") for i, c in enumerate(chosen)]
            strategy = ("full", "prefix", "naive")[round_ % 3]
            engine.answer_prompt(Prompt((system, *parts, question)), strategy=strategy, max_tokens=3)
            audit_engine(engine)
            kept = {}
            for node in engine._cache.tree.nodes():
                if node.run is None:
                    continue
                now = engine._runner.read(node.run.slots(tiny.PAGE))
                assert np.abs(now[0]).max() > 0
                before = seen.get(node.key)
                if before is not None:
                    np.testing.assert_array_equal(now[0], before[0])
                    np.testing.assert_array_equal(now[1], before[1])
                kept[node.key] = now
            seen = kept
