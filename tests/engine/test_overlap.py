"""The engine's thread works while the device does, and the tokens are those of taking turns."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from ragjax.engine import Engine
from ragjax.runner.sampling import Logits, Sampled
from ragjax.schedule.batch import Batch
from ragjax.schedule.state import RequestState
from tests.support import tiny
from tests.support.audit import audit_cache, holders
from tests.support.pace import Hold, failing, until

SAMPLED: dict[str, Any] = {
    **{"temperature": 0.9, "top_p": 0.95, "top_k": 60, "seed": 11},
    **{"presence_penalty": 0.3, "repetition_penalty": 1.1, "logit_bias": {257: -9.0}},
}


def prompts(n: int) -> list[Any]:
    return [tiny.prompt(seed, 20, (30,), 12 + seed) for seed in range(n)]


def alone(n: int, **options: Any) -> list[tuple[int, ...]]:
    with tiny.engine() as engine:
        return [engine.answer_prompt(prompt, strategy="full", **options).tokens for prompt in prompts(n)]


def test_text_goes_out_while_the_device_computes_the_next_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: list[bool] = []
    execution = engine._loop._execution
    tell = execution._tell

    def told(state: Any) -> None:
        under_way.append(execution._flight is not None)
        tell(state)

    monkeypatch.setattr(execution, "_tell", told)
    answer = engine.answer_prompt(tiny.prompt(0), strategy="full", max_tokens=12)
    assert len(answer.tokens) == 12 and under_way == [True] * 11 + [False]


def test_tokens_alone_cross_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first one is chosen on the device; the logits that it is chosen by come only to those who want them."""
    fetched: list[int] = []
    read = Logits.read

    def watched(logits: Logits, wanted: Any = None) -> Any:
        found = read(logits, wanted)
        fetched.append(len(found))
        return found

    monkeypatch.setattr(Logits, "read", watched)
    with tiny.engine() as engine:
        answer = engine.answer_prompt(tiny.prompt(0), strategy="full", max_tokens=20, logprobs=3)
        assert len(answer.tokens) == len(answer.logprobs) > 5
        assert sum(fetched) == 0 and len(fetched) >= len(answer.tokens)
        wanting = engine.answer_prompt(tiny.prompt(0), strategy="full", max_tokens=20, logprobs=3, want_logits=True)
    assert sum(fetched) == 1 and wanting.tokens == answer.tokens and wanting.logprobs == answer.logprobs
    assert int(wanting.logits.argmax()) == answer.tokens[0]


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("fails_at", "lost"), [((), False), ((6, 17), False), ((12,), True)], ids=["none", "errors", "a lost device"]
)
def test_a_batch_says_what_each_says_alone_whatever_shows_when_tokens_are_waited_for(
    fails_at: tuple[int, ...], lost: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The members of a step that fails start again, and end with the tokens they would have had."""
    expected = alone(3, max_tokens=24, **options)
    with tiny.engine() as engine:
        failing(monkeypatch, Sampled, "read", *fails_at, lose=lost)
        with Hold(engine):
            futures = [engine.begin_prompt(prompt, strategy="full", max_tokens=24, **options) for prompt in prompts(3)]
        answers = [future.result() for future in futures]
        stats = engine.stats()
    assert [answer.tokens for answer in answers] == expected
    assert (stats["step_failures_total"], stats["device_losses_total"]) == ((0, 1) if lost else (len(fails_at), 0))
    said = "memory was lost" if lost else "a step failed"
    assert any(said in notice for answer in answers for notice in answer.notices) == bool(fails_at)


@pytest.mark.parametrize("how", ["end", "restart"])
@pytest.mark.parametrize("decoding", [True, False])
def test_who_leaves_while_the_device_computes_is_left_out(
    how: str, decoding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, or is started again, between the launch of a step and its landing; the others never notice."""
    expected = alone(3, max_tokens=24, **SAMPLED)
    with tiny.engine() as engine:
        loop, execution = engine._loop, engine._loop._execution
        land, left = execution.land, list[RequestState]()

        def landed() -> bool:
            flight = execution._flight
            if flight is not None and not left and flight.batch.logit_rows and loop.requests.counters.steps > 1:
                found = [part.state for part in flight.batch.parts if part.state.decoding is decoding]
                for state in found[:1]:
                    left.append(state)
                    if how == "end":
                        loop.requests.end(state, RuntimeError("it left"))
                    else:
                        loop.requests.restart(state)
            return land()

        monkeypatch.setattr(execution, "land", landed)
        with Hold(engine):
            futures = [engine.begin_prompt(prompt, strategy="full", max_tokens=24, **SAMPLED) for prompt in prompts(3)]
        found: list[Any] = []
        for future in futures:
            error = future.exception()
            found.append(str(error) if error else future.result().tokens)
    assert len(left) == 1 and found.count("it left") == (how == "end")
    assert all(one == other for one, other in zip(found, expected, strict=True) if one != "it left")


def test_stop_strings_end_an_answer_before_its_next_token_is_computed(engine: Engine) -> None:
    whole = engine.answer_prompt(tiny.prompt(6), strategy="full", max_tokens=40)
    before = engine.stats()["steps_total"]
    stop = whole.text[5:7]
    cut = engine.answer_prompt(tiny.prompt(6), strategy="full", max_tokens=40, stop=(stop,))
    took = engine.stats()["steps_total"] - before
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    assert took <= len(cut.tokens) + 4  # those of the prompt, and of each token but the last


def test_the_first_token_s_time_is_that_of_its_text(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow tokenizer delays what the client sees."""
    engine.answer_prompt(tiny.prompt(0), max_tokens=2)
    execution = engine._loop._execution
    tell = execution._tell

    def slow(state: Any) -> None:
        time.sleep(0.2)
        tell(state)

    monkeypatch.setattr(execution, "_tell", slow)
    answer = engine.answer_prompt(tiny.prompt(1), max_tokens=3)
    assert answer.timings.ttft >= 200


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_place_that_is_free_is_taken_at_once(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sleeps while a request waits for it, and no step is made without it."""
    slept: list[int] = []
    idle: list[int] = []
    with tiny.engine(max_running=1) as engine:
        loop = engine._loop
        drain, following = loop._drain_inbox, loop._scheduler.next_batch

        def drained(busy: bool) -> bool:
            if not busy:
                slept.append(len(loop.requests.live))
            return drain(busy)

        def watched() -> Any:
            batch = following()
            if batch is None:
                idle.append(loop.waiting)
            return batch

        monkeypatch.setattr(loop, "_drain_inbox", drained)
        monkeypatch.setattr(loop._scheduler, "next_batch", watched)
        with Hold(engine):
            futures = [engine.begin_prompt(prompt, strategy="full", max_tokens=tokens) for prompt in prompts(6)]
        assert all(len(future.result().tokens) == tokens for future in futures)
    assert slept and not any((*slept, *idle))


def test_what_is_called_in_the_engine_s_thread_finds_all_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a step is under way: pages, pins and labels add up."""
    under_way: list[bool] = []
    with tiny.engine() as engine, ThreadPoolExecutor(1) as caller:
        loop, execution = engine._loop, engine._loop._execution
        launch, calls = execution.launch, list[Future[None]]()

        def audit() -> None:
            under_way.append(execution._flight is not None)
            audit_cache(engine._cache, holders(engine))

        def launched(batch: Batch) -> None:
            launch(batch)
            waiting = loop._inbox.qsize()
            calls.append(caller.submit(loop.call, audit))
            until(lambda: loop._inbox.qsize() > waiting)

        monkeypatch.setattr(execution, "launch", launched)
        with Hold(engine):
            futures = [engine.begin_prompt(prompt, strategy="prefix", max_tokens=60) for prompt in prompts(3)]
        assert all(future.result(60).tokens for future in futures)
        for call in calls:
            call.result(60)
    assert len(under_way) > 60 and all(under_way)
