"""Prompt lookup in the engine: answers are those without it, in fewer steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from ragjax.core import Answer, Grid, Kind, Prompt, RequestError, Sampling, Segment
from ragjax.engine import Engine
from ragjax.models.tokenizer import Tokenizer
from ragjax.runner.runner import Runner
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.matrix import few
from tests.support.pace import Hold

TOKENS = 60
GRID = Grid(
    rows=((2, 2), (4, 4), (7, 7), (8, 1), (12, 8, 4), (20, 4), (16, 8), (64, 16)), entries=(320,), wide=640
)  # fmt: skip


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[Engine, Engine]]:
    other = tiny.make_runner(grid=GRID)
    with tiny.engine(lookup=0) as plain, tiny.engine(other, lookup=6) as fast:
        yield plain, fast


def same(one: Answer, other: Answer) -> None:
    assert one.tokens == other.tokens and one.text == other.text
    assert one.finish_reason == other.finish_reason
    assert [t.id for t in one.logprobs] == [t.id for t in other.logprobs]
    np.testing.assert_allclose([t.logprob for t in one.logprobs], [t.logprob for t in other.logprobs], atol=1e-4)


DRAWN: dict[str, float] = {"temperature": 0.7, "top_p": 0.9, "seed": 3}
ANSWERS = list(product(("full", "prefix", "naive", "fusion"), ({}, DRAWN, {"logprobs": 2})))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "sampling"), few(ANSWERS, [ANSWERS[0], ANSWERS[4], ANSWERS[8], ANSWERS[9]]))
def test_the_answer_is_the_same(engines: tuple[Engine, Engine], strategy: str, sampling: dict[str, float]) -> None:
    for seed in range(3):
        prompt = tiny.prompt(seed)
        options = {"strategy": strategy, "max_tokens": TOKENS, **sampling}
        same(*(engine.answer_prompt(prompt, **options) for engine in engines))


@pytest.fixture(scope="module")
def forgetful() -> Runner:
    """Its model has no attention: its next token follows from the last one alone, so greedy text ends in a loop."""
    decoder = tiny.decoder()
    for layer in decoder.layers:
        layer.out.set_value(layer.out[...] * 0)
    return tiny.make_runner(decoder, grid=GRID)


@pytest.mark.slow
def test_proposals_in_a_pool_that_is_too_small_harm_nobody(forgetful: Runner) -> None:
    """A step may give several tokens at once, behind which there must be a slot; proposals never pause anybody."""
    prompts = [tiny.prompt(n, 20, (30,), 10 + n) for n in range(5)]
    with tiny.engine(forgetful, lookup=6) as engine:
        alone = [engine.answer_prompt(prompt, strategy="full", max_tokens=90).tokens for prompt in prompts]
    with tiny.engine(forgetful, pages=24, lookup=6) as engine:
        with Hold(engine):
            futures = [engine.begin_prompt(prompt, strategy="full", max_tokens=90) for prompt in prompts]
        assert [future.result().tokens for future in futures] == alone
        stats = engine.stats()
    assert stats["pauses_total"] and not stats["errors_total"]


@pytest.mark.slow
def test_what_repeats_itself_takes_fewer_steps(forgetful: Runner) -> None:
    took, answers = [], []
    for lookup in (0, 6):
        with tiny.engine(forgetful, lookup=lookup) as engine:
            answers.append([engine.answer_prompt(tiny.prompt(n), strategy="full", max_tokens=300) for n in range(3)])
            took.append(engine._loop.requests.counters.steps)
            counted = engine._loop.requests.counters.lookup_tokens
            assert (0 < counted["accepted"] <= counted["proposed"]) if lookup else not counted.total()
    for one, other in zip(*answers, strict=True):
        same(one, other)
    longest = max(answers[1], key=lambda answer: len(answer.tokens))
    assert longest.figures["tokens_per_step"] > 1.5
    assert all("tokens_per_step" not in answer.figures for answer in answers[0])
    assert took[1] < took[0] / 1.5


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 12, 40])
def test_tokens_per_step_counts_every_decode_step(tokens: int, forgetful: Runner) -> None:
    """The last step counts too; the first token is the prompt's and belongs to no decode step."""
    with tiny.engine(forgetful, lookup=6) as engine:
        counters, took, said = engine._loop.requests.counters, list[int](), list[Answer]()
        for most in (1, tokens):
            before = counters.steps
            said.append(engine.answer_prompt(tiny.prompt(0), strategy="full", max_tokens=most))
            took.append(counters.steps - before)
    steps = took[1] - took[0]
    assert len(said[1].tokens) == tokens
    assert said[1].figures.get("tokens_per_step", 1.0) == pytest.approx((tokens - 1) / steps)


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [3, 17, 41])
def test_stop_strings_and_limits_end_it_at_the_same_token(engines: tuple[Engine, Engine], stop_at: int) -> None:
    prompt = tiny.prompt(6)
    whole = engines[0].answer_prompt(prompt, strategy="full", max_tokens=TOKENS)
    stop = whole.text[stop_at : stop_at + 3]
    if stop:
        same(*(engine.answer_prompt(prompt, strategy="full", max_tokens=TOKENS, stop=(stop,)) for engine in engines))
    same(*(engine.answer_prompt(prompt, strategy="full", max_tokens=stop_at) for engine in engines))


def test_kept_answers_are_those_of_accepted_tokens(engines: tuple[Engine, Engine]) -> None:
    """`prefix` keeps the answer's KV: what was proposed and rejected is no part of it."""
    prompt = tiny.prompt(7)
    found = []
    for engine in engines:
        engine.clear_cache()
        first = engine.answer_prompt(prompt, strategy="prefix", max_tokens=TOKENS)
        said = Segment("said", Kind.QUERY, np.array(first.tokens, np.int32))
        again = engine.answer_prompt(Prompt((*prompt.segments, said)), strategy="prefix", max_tokens=8)
        cold = engine.answer_prompt(Prompt((*prompt.segments, said)), strategy="full", max_tokens=8)
        assert again.tokens == cold.tokens
        found.append(again.cached_tokens)
        audit_engine(engine)
    assert found[0] == found[1] >= len(prompt) + TOKENS - 2


@pytest.mark.slow
def test_many_at_once(engines: tuple[Engine, Engine]) -> None:
    prompts = [tiny.prompt(seed) for seed in range(6)]
    alone = [engines[0].answer_prompt(prompt, strategy="full", max_tokens=TOKENS) for prompt in prompts]
    with Hold(engines[1]):
        futures = [engines[1].begin_prompt(prompt, strategy="full", max_tokens=TOKENS) for prompt in prompts]
    for one, future in zip(alone, futures, strict=True):
        same(one, future.result(60))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_count_accepted_tokens(temperature: float, forgetful: Runner) -> None:
    """Few tokens are left to choose from, and penalties have them take turns, so that proposals are right."""
    asked: dict[str, object] = {
        "presence_penalty": 0.3,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.05,
        "temperature": temperature,
    }
    asked["logit_bias"] = dict.fromkeys(range(65, 68), 100.0)
    answers = []
    for lookup in (0, 6):
        with tiny.engine(forgetful, lookup=lookup) as engine:
            options = {"strategy": "full", "max_tokens": 120, "seed": 4, **asked}
            answers.append([engine.answer_prompt(tiny.prompt(n), **options) for n in range(3)])
            accepted = engine._loop.requests.counters.lookup_tokens["accepted"] if lookup else 0
    assert accepted > 0
    for one, other in zip(*answers, strict=True):
        same(one, other)


def test_a_bias_on_an_unknown_token_is_refused(engines: tuple[Engine, Engine]) -> None:
    with pytest.raises(RequestError) as caught:
        engines[0].answer("Hi", sampling=Sampling(logit_bias={10**8: 1.0}))
    assert caught.value.param == "logit_bias"


def test_a_bias_on_an_id_in_a_gap_is_refused(engines: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "has_token", lambda _, token: token != 65)
    with pytest.raises(RequestError, match="the model has no token 65; its highest is 258"):
        engines[0].answer("Hi", sampling=Sampling(logit_bias={66: 1.0, 65: 1.0}))
