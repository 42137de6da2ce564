"""Ready prompts and continuations: what the model has no token for is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ragjax.core import Kind, Prompt, RequestError, Segment
from ragjax.engine import Engine
from ragjax.reuse.exact import Full
from tests.support import tiny

LAST = tiny.CONFIG.vocab_size - 1


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tiny.engine() as made:
        yield made
        assert made.stats()["errors_total"] == 0


def ready(*parts: Any) -> Prompt:
    return Prompt(tuple(Segment(f"s{i}", Kind.QUERY, tokens) for i, tokens in enumerate(parts)))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([65, 10**6], "no token 1000000"),
        ([65, LAST + 1], f"no token {LAST + 1}.*highest is {LAST}"),
        ([-100, 65], "no token -100"),
        ([65, 2**40], "no token 1099511627776"),
        ([65.0, 66.9], "whole numbers"),
        ([[65, 66]], "one row"),
        (["a", "b"], "whole numbers"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(engine: Engine, tokens: Any, message: str) -> None:
    good = np.array([65, 66], np.int32)
    for given in (tokens, np.array(tokens)):
        for prompt in (ready(given), ready(good, given)):
            with pytest.raises(RequestError, match=message) as refused:
                engine.answer_prompt(prompt, max_tokens=1)
            assert (refused.value.param, refused.value.code) == ("prompt", "invalid_value")
        with pytest.raises(RequestError, match=message) as refused:
            engine.answer_prompt(ready(good), max_tokens=1, continuation=given)
        assert (refused.value.param, refused.value.code) == ("continuation", "invalid_value")


def test_every_token_of_the_model_is_read(engine: Engine) -> None:
    tokens = np.array([0, 65, LAST])
    answer = engine.answer_prompt(ready(tokens), max_tokens=1, continuation=tokens)
    plain = engine.answer_prompt(ready(tokens.tolist()), max_tokens=1, continuation=tokens.astype(np.uint16))
    assert np.isfinite(answer.scores).all()
    np.testing.assert_allclose(answer.scores, plain.scores, atol=1e-5)


def test_a_strategy_of_ones_own_takes_no_ratio_that_has_no_effect(engine: Engine) -> None:
    with pytest.raises(RequestError, match="the strategy full takes no recompute_ratio"):
        engine.answer_prompt(tiny.prompt(), strategy=Full(), recompute_ratio=0.5, max_tokens=1)


@pytest.mark.parametrize("strategy", ["naive", "anchor"])
def test_a_prompt_that_asks_nothing_is_the_callers_mistake(engine: Engine, strategy: str) -> None:
    *parts, _ = tiny.prompt().segments
    with pytest.raises(RequestError, match="the prompt ends with a chunk segment: put a query segment behind it"):
        engine.answer_prompt(Prompt(tuple(parts)), strategy=strategy, max_tokens=1)


def test_kinds_may_be_texts(engine: Engine) -> None:
    system, first, second, question = tiny.prompt(7, chunks=(40, 40)).segments
    for parts in ((first, second), (second, first)):
        segments = (Segment("s", "system", system.tokens), *(Segment(p.id, "chunk", p.tokens) for p in parts), question)
        answer = engine.answer_prompt(Prompt(segments), strategy="naive", max_tokens=1)
    assert [report.reused for report in answer.segments[1:3]] == [40, 40]
