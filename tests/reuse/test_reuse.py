"""Every strategy against dense computations that know nothing of pages, offsets or caches."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from ragjax.core import Answer, Kind, Prompt, Segment
from ragjax.engine import Engine
from ragjax.reuse import strategies
from tests.support import tiny
from tests.support.executor import Executor
from tests.support.literal import dense, dense_naive, two_turns
from tests.support.matrix import with_smoke

TOLERANCE = 2e-4


def logits(engine: Engine, prompt: Prompt, strategy: str) -> NDArray[np.float32]:
    answer = engine.answer_prompt(prompt, strategy=strategy, max_tokens=1, want_logits=True)
    return answer.logits


@pytest.mark.parametrize("seed", range(3))
def test_full_is_dense_causal_attention(engine: Engine, seed: int) -> None:
    prompt = tiny.prompt(seed)
    np.testing.assert_allclose(logits(engine, prompt, "full"), dense(prompt), atol=TOLERANCE)


def test_full_leaves_nothing(engine: Engine) -> None:
    engine.answer_prompt(tiny.prompt(), strategy="full", max_tokens=4)
    answer = engine.answer_prompt(tiny.prompt(), strategy="prefix", max_tokens=4)
    assert answer.cached_tokens == 0


def test_prefix_cold_warm_and_shuffled(engine: Engine) -> None:
    prompt = tiny.prompt(5)
    cold = engine.answer_prompt(prompt, strategy="prefix", max_tokens=20, want_logits=True)
    warm = engine.answer_prompt(prompt, strategy="prefix", max_tokens=20, want_logits=True)
    full = engine.answer_prompt(prompt, strategy="full", max_tokens=20, want_logits=True)
    assert cold.tokens == warm.tokens == full.tokens
    assert (cold.cached_tokens, warm.cached_tokens) == (0, len(prompt) - 1)
    np.testing.assert_allclose(cold.logits, warm.logits, atol=TOLERANCE)
    a, b, *rest = prompt.segments[1:]
    shuffled = Prompt((prompt.segments[0], b, a, *rest))
    answer = engine.answer_prompt(shuffled, strategy="prefix", max_tokens=20, want_logits=True)
    # the common prefix ends somewhere in the first swapped chunk: equal leading tokens count too
    assert len(prompt.segments[0]) <= answer.cached_tokens < len(prompt.segments[0]) + 5
    np.testing.assert_allclose(answer.logits, dense(shuffled), atol=TOLERANCE)


def test_prefix_finds_the_finished_turn(engine: Engine) -> None:
    prompt = tiny.prompt(6)
    answer = engine.answer_prompt(prompt, strategy="prefix", max_tokens=12)
    assert answer.finish_reason == "length"
    turn = Segment("answer", Kind.QUERY, np.array(answer.tokens, np.int32))
    more = Segment("more", Kind.QUERY, np.arange(9, dtype=np.int32))
    follow = Prompt((*prompt.segments, turn, more))
    second = engine.answer_prompt(follow, strategy="prefix", max_tokens=1, want_logits=True)
    assert second.cached_tokens == len(prompt) + 11  # the last token's KV was never computed
    np.testing.assert_allclose(second.logits, dense(follow), atol=TOLERANCE)


@pytest.mark.parametrize("seed", range(3))
def test_naive_is_isolated_dense_attention_at_any_position(engine: Engine, seed: int) -> None:
    prompt = tiny.prompt(seed)
    expected = dense_naive(prompt)
    cold = engine.answer_prompt(prompt, strategy="naive", max_tokens=8, want_logits=True)
    warm = engine.answer_prompt(prompt, strategy="naive", max_tokens=8, want_logits=True)
    np.testing.assert_allclose(cold.logits, expected, atol=TOLERANCE)
    np.testing.assert_array_equal(cold.logits, warm.logits)
    assert cold.tokens == warm.tokens
    assert warm.cached_tokens == len(prompt) - len(prompt.segments[-1])
    assert np.abs(expected - dense(prompt)).max() > 100 * TOLERANCE, "isolation must matter for this test to tell"
    system, a, b, c, question = prompt.segments
    moved = Prompt((system, c, a, b, question))
    answer = engine.answer_prompt(moved, strategy="naive", max_tokens=1, want_logits=True)
    assert answer.cached_tokens == len(moved) - len(question)
    np.testing.assert_allclose(answer.logits, dense_naive(moved), atol=TOLERANCE)


def test_naive_with_one_chunk_is_full(engine: Engine) -> None:
    prompt = tiny.prompt(8, chunks=(50,))
    for _ in range(2):
        answer = engine.answer_prompt(prompt, strategy="naive", max_tokens=1, want_logits=True)
        assert answer.exact_to == "full"
        np.testing.assert_allclose(answer.logits, dense(prompt), atol=TOLERANCE)
    assert engine.answer_prompt(tiny.prompt(8), strategy="naive", max_tokens=1).exact_to is None


def test_naive_equal_chunks_in_one_prompt(engine: Engine) -> None:
    prompt = tiny.prompt(9)
    twice = Prompt((*prompt.segments[:2], replace(prompt.segments[1], id="again"), prompt.segments[-1]))
    np.testing.assert_allclose(logits(engine, twice, "naive"), dense_naive(twice), atol=TOLERANCE)


def test_second_turn_chunks_see_neither_first_turn_nor_each_other(engine: Engine) -> None:
    prompt = two_turns()
    np.testing.assert_allclose(logits(engine, prompt, "naive"), dense_naive(prompt), atol=TOLERANCE)
    # the second turn's chunks are what they are alone: a prompt with another first turn reuses them
    other = two_turns(30)
    mixed = Prompt((prompt.segments[0], *other.segments[1:5], *prompt.segments[5:]))
    answer = engine.answer_prompt(mixed, strategy="naive", max_tokens=1, want_logits=True)
    reused = {r.id: r.reused for r in answer.segments}
    assert reused["second chunk0"] == 25 and reused["second chunk1"] == 37
    np.testing.assert_allclose(answer.logits, dense_naive(mixed), atol=TOLERANCE)


LITERAL = [
    *(("blend", 0.2), ("blend-gradual", 0.2), ("fusion", 0.2), ("fusion", 0.0), ("fusion+blend", 0.3)),
    *(("random", 0.2), ("h2o", 0.2), ("unmoved", None), ("set-cache", None)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ratio"), with_smoke(LITERAL, ("fusion", 0.2)))
def test_engine_does_what_the_literal_executor_does(engine: Engine, name: str, ratio: float | None) -> None:
    prompt, shuffled = shuffle(tiny.prompt(14, chunks=(30, 41, 25)))
    literal = Executor(stages=engine._runner.stages)
    continuation = np.array([7, 99, 200, 31], np.int32)
    for asked in (prompt, shuffled, shuffled):
        talk = literal.talk(strategies()[name], asked, ratio)
        talk.end()
        answer = engine.answer_prompt(
            asked, strategy=name, recompute_ratio=ratio, max_tokens=2, want_logits=True, continuation=continuation
        )
        assert answer.exact_to == talk.plan.exact_to
        assert [(r.reused, r.recomputed) for r in answer.segments] == [
            (r.reused, r.recomputed) for r in talk.plan.reports
        ]
        np.testing.assert_allclose(answer.logits, talk.plan.logits, atol=TOLERANCE)
        np.testing.assert_allclose(answer.scores, talk.score(continuation), atol=TOLERANCE)
        talk.close()


def shuffle(prompt: Prompt) -> tuple[Prompt, Prompt]:
    """The prompt, and another with its chunks in another order."""
    system, a, b, c, question = prompt.segments
    return prompt, Prompt((system, c, a, b, question))


def test_concurrent_requests_that_share_chunks_are_served_as_alone(engine: Engine) -> None:
    prompt, shuffled = shuffle(tiny.prompt(15, chunks=(30, 41, 25)))
    engine.answer_prompt(prompt, strategy="naive", max_tokens=1)
    settings = [
        (asked, name, ratio)
        for asked in (prompt, shuffled)
        for name, ratio in (("fusion", 0.1), ("fusion", 0.5), ("blend", 0.2), ("blend-gradual", 0.3), ("naive", None))
    ]

    def begin(asked: Prompt, name: str, ratio: float | None) -> Future[Answer]:
        return engine.begin_prompt(asked, strategy=name, recompute_ratio=ratio, max_tokens=3, want_logits=True)

    alone = [begin(*setting).result() for setting in settings]
    together = [future.result() for future in [begin(*setting) for setting in settings]]
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.logits, other.logits, atol=TOLERANCE)
        assert one.tokens == other.tokens and one.cached_tokens == other.cached_tokens


@pytest.mark.slow
@pytest.mark.smoke
def test_bfloat16_exactness_within_tolerance() -> None:
    prompt = tiny.prompt(12)
    with tiny.engine(tiny.runner("bfloat16")) as engine:
        full = logits(engine, prompt, "full")
        cold = logits(engine, prompt, "prefix")
        warm = logits(engine, prompt, "prefix")
    tolerance = 0.05 * np.abs(full).max()
    assert np.abs(cold - full).max() <= tolerance and np.abs(warm - full).max() <= tolerance
    assert np.abs(full - dense(prompt)).max() > TOLERANCE, "bfloat16 is not float32"
