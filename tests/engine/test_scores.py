"""Teacher-forced scores, futures and background requests."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragjax.core import Kind as SegmentKind
from ragjax.core import Prompt, Rag, Request, RequestError, Sampling, Segment, Step
from ragjax.engine import Engine
from ragjax.reuse.exact import Full
from ragjax.runner.runner import Runner, StepResult
from ragjax.schedule import decoding
from ragjax.schedule.state import RequestState
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.forward import dense_logits
from tests.support.pace import Hold, until

FORCED = np.array([5, 17, 200, 3, 90], np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full", "prefix"])
@pytest.mark.parametrize("max_tokens", [1, 4, 9])
def test_scores_are_the_logits_that_predict_the_continuation(engine: Engine, strategy: str, max_tokens: int) -> None:
    prompt = tiny.prompt(3)
    plain = engine.answer_prompt(prompt, strategy="full", max_tokens=max_tokens)
    answer = engine.answer_prompt(prompt, strategy=strategy, continuation=FORCED, max_tokens=max_tokens)
    tokens = np.concatenate([prompt.tokens, FORCED])
    dense = np.asarray(dense_logits(tiny.decoder(), jnp.asarray(tokens)))[len(prompt) - 1 : -1]
    assert answer.scores.shape == dense.shape
    np.testing.assert_allclose(answer.scores, dense, atol=2e-4)
    assert answer.tokens == plain.tokens, "what is forced leaves nothing behind"


def test_scores_are_no_part_of_the_time_to_the_first_token(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    take = decoding.take_scores

    def noted(state: RequestState) -> None:
        taken.append(state.times.first_token)
        take(state)

    monkeypatch.setattr(decoding, "take_scores", noted)
    engine.answer_prompt(tiny.prompt(3), continuation=FORCED, max_tokens=1)
    assert len(taken) == 1 and taken[0] > 0, "the first token could be chosen before they were computed"


def test_scores_of_one_token_are_the_prompts_last_logits(engine: Engine) -> None:
    answer = engine.answer_prompt(tiny.prompt(4), continuation=FORCED[:1], want_logits=True, max_tokens=1)
    np.testing.assert_array_equal(answer.scores[0], answer.logits)


def test_a_continuation_that_does_not_fit_is_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="exceed the context"):
        engine.answer_prompt(tiny.prompt(4), continuation=np.zeros(2000, np.int32), max_tokens=1)


class Gated(Full):
    """Waits before its pass until the gate is open."""

    name = "gated"

    def __init__(self) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()

    def prefill(self, prompt: Prompt, allocation: object, ratio: float | None = None) -> object:
        self.reached.set()
        assert self.gate.wait(30)
        return (yield from super().prefill(prompt, allocation, ratio))


def test_background_requests_let_others_pass_and_are_not_counted(engine: Engine) -> None:
    ends: list[str] = []
    gated = Gated()
    first = engine.begin_prompt(tiny.prompt(0), strategy=gated, max_tokens=3)  # keeps the engine's thread busy
    assert gated.reached.wait(30)
    behind = [engine.begin_prompt(tiny.prompt(i), max_tokens=3, background=True) for i in range(12)]
    before = [engine.begin_prompt(tiny.prompt(i), max_tokens=3) for i in range(20, 24)]
    for name, futures in (("background", behind), ("other", before)):
        for future in futures:
            future.add_done_callback(lambda _, name=name: ends.append(name))
    gated.gate.set()
    wait([first, *behind, *before])
    assert ends == ["other"] * 4 + ["background"] * 12
    alone = engine.answer_prompt(tiny.prompt(5), strategy="full", max_tokens=3)
    assert behind[5].result().tokens == alone.tokens
    assert sum(engine.stats()["requests_total"].values()) == 6


def test_who_comes_waits_for_one_step_of_the_background_and_shares_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = (
        Prompt((Segment("q", SegmentKind.JOIN, np.arange(*of, dtype=np.int32)),)) for of in ((200,), (220, 225))
    )
    told: list[str] = []
    real, step = StepResult.wait, Runner.step

    def waited(result: StepResult) -> None:
        if told == ["long"]:  # somebody comes while the first step is computed
            pool.submit(engine.begin_prompt, short, strategy="full", max_tokens=1).result()
        real(result)
        told.append("done")

    def watched(runner: Runner, made: Step) -> StepResult:
        told.append("short" if 220 in made.token_T else "long")
        return step(runner, made)

    monkeypatch.setattr(StepResult, "wait", waited)
    monkeypatch.setattr(Runner, "step", watched)
    with tiny.engine() as engine, ThreadPoolExecutor() as pool:
        engine.answer_prompt(long, strategy="full", max_tokens=1, background=True)
    assert told[:3] == ["long", "done", "short"]
    assert told[3::2] == ["long"] * len(told[3::2]) and told[4::2] == ["done"] * len(told[4::2]) and len(told) > 6


def test_background_requests_make_room() -> None:
    big = Prompt((Segment("q", SegmentKind.JOIN, np.arange(200, dtype=np.int32)),))
    with tiny.engine(pages=40) as engine:
        running = Hold(engine, lambda: engine._loop.requests.in_background)
        behind = [engine.begin_prompt(big, strategy="full", max_tokens=24, background=True) for _ in range(4)]
        with running:
            first = engine.begin_prompt(tiny.prompt(0), strategy="full", max_tokens=2)
        later = [engine.answer_prompt(tiny.prompt(i), strategy="full", max_tokens=2) for i in (1, 2)]
        answers = [first.result(60), *later]
        assert all(len(answer.tokens) == 2 and not answer.notices for answer in answers)
        assert len({future.result(60).tokens for future in behind}) == 1


def test_a_cancelled_future_cancels_its_request(engine: Engine) -> None:
    gated = Gated()
    future = engine.begin_prompt(tiny.prompt(0), strategy=gated, max_tokens=500)
    assert gated.reached.wait(30)
    assert future.cancel()
    gated.gate.set()
    with pytest.raises(CancelledError):
        future.result()
    until(lambda: engine.stats()["cancelled_total"])
    audit_engine(engine)
    assert not engine.stats()["running"]


def test_a_prompt_is_echoed_with_its_log_probabilities(engine: Engine) -> None:
    tokens = (*b"The lamp", 5, 17)
    sampling = Sampling(3, logprobs=2)
    asked = Request(prompt=tokens, sampling=sampling, rag=Rag(top_k=0), echo=True)
    answer = tiny.answer(engine, asked)
    dense = np.asarray(dense_logits(tiny.decoder(), jnp.asarray(np.array(tokens, np.int32))))[:-1]
    expected = np.asarray(jax.nn.log_softmax(dense))
    told = answer.logprobs[1 : len(tokens)]
    assert [one.id for one in answer.logprobs[: len(tokens)]] == [*tokens]
    np.testing.assert_allclose([one.logprob for one in told], expected[np.arange(9), tokens[1:]], atol=1e-3)
    assert [one.top[0][1] for one in told] == expected.argmax(axis=1).tolist()
    assert answer.prompt_tokens == answer.segments[0].tokens == len(tokens) and answer.scores is None
    (only,) = tiny.answer(engine, replace(asked, prompt=(65,), sampling=Sampling(1, logprobs=0))).logprobs[:1]
    assert only.id == 65 and np.isnan(only.logprob)
