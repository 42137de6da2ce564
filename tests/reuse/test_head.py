"""What stands before the first chunk is an exact prefix to every strategy of chunks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ragjax.core import Kind, Prompt, RequestError, Segment
from ragjax.engine import Engine
from tests.support import tiny
from tests.support.literal import dense, dense_naive

TOLERANCE = 2e-4
STRATEGIES = ("naive", "fusion", "anchor", "blend", "blend-gradual", "craft", "epic", "h2o")


def with_history(seed: int, turns: int = 1) -> Prompt:
    """system, turns, two chunks, question."""
    base = tiny.prompt(seed, chunks=(33, 41))
    said = [np.random.default_rng(900 + turn).integers(0, 256, 27).astype(np.int32) for turn in range(turns)]
    history = (Segment(f"turn{n}", Kind.QUERY, tokens) for n, tokens in enumerate(said))
    return Prompt((base.segments[0], *history, *base.segments[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_earlier_turns_are_reused_and_exact(engine: Engine, strategy: str) -> None:
    prompt = with_history(41)
    head = prompt.starts[2]
    cold = engine.answer_prompt(prompt, strategy=strategy, recompute_ratio=None, max_tokens=1, want_logits=True)
    assert cold.cached_tokens == 0
    exact = engine.answer_prompt(prompt, strategy="prefix", max_tokens=1, want_logits=True)
    assert exact.cached_tokens == head, "prefix reads the head, and nothing of what chunks left"
    np.testing.assert_allclose(exact.logits, dense(prompt), atol=TOLERANCE)
    longer = with_history(41, turns=2)
    warm = engine.answer_prompt(longer, strategy=strategy, max_tokens=1)
    assert [r.reused for r in warm.segments[:3]] == [20, 27, 0]
    again = engine.answer_prompt(longer, strategy=strategy, max_tokens=1)
    assert [r.reused for r in again.segments[:3]] == [20, 27, 27]


def test_chunks_do_not_see_the_turns_before_them(engine: Engine) -> None:
    prompt = with_history(42)
    for _ in range(2):  # cold: turn and chunks in one pass; warm: both read
        answer = engine.answer_prompt(prompt, strategy="naive", max_tokens=1, want_logits=True)
        np.testing.assert_allclose(answer.logits, dense_naive(prompt), atol=TOLERANCE)
    without = Prompt((prompt.segments[0], *prompt.segments[2:]))
    answer = engine.answer_prompt(without, strategy="naive", max_tokens=1, want_logits=True)
    assert [r.reused for r in answer.segments[1:3]] == [33, 41]
    np.testing.assert_allclose(answer.logits, dense_naive(without), atol=TOLERANCE)


def test_a_head_whose_system_prompt_was_cut_off_is_still_right(engine: Engine) -> None:
    """The head is kept in part only: what is computed of it sees all before it."""
    prompt = with_history(43)
    head = Prompt((prompt.segments[0], replace(prompt.segments[1], tokens=prompt.segments[1].tokens[:9])))
    engine.answer_prompt(head, strategy="prefix", max_tokens=1)
    answer = engine.answer_prompt(prompt, strategy="naive", max_tokens=1, want_logits=True)
    assert [r.reused for r in answer.segments[:2]] == [20, 9]
    np.testing.assert_allclose(answer.logits, dense_naive(prompt), atol=TOLERANCE)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_prompt_without_chunks_is_served_as_prefix_does(engine: Engine, strategy: str) -> None:
    prompt = tiny.prompt(44, chunks=())
    answer = engine.answer_prompt(prompt, strategy=strategy, max_tokens=12)
    assert (answer.strategy, answer.exact_to, answer.cached_tokens) == (strategy, "full", 0)
    turn = Segment("answer", Kind.QUERY, np.array(answer.tokens, np.int32))
    more = Segment("more", Kind.QUERY, np.arange(9, dtype=np.int32))
    follow = Prompt((*prompt.segments, turn, more))
    second = engine.answer_prompt(follow, strategy=strategy, max_tokens=1, want_logits=True)
    assert second.cached_tokens == len(prompt) + 11  # the finished turn, but for the token whose KV was never computed
    assert second.exact_to == "full"
    np.testing.assert_allclose(second.logits, dense(follow), atol=TOLERANCE)


def test_a_finished_turn_over_chunks_is_not_kept(engine: Engine) -> None:
    prompt = with_history(45)
    answer = engine.answer_prompt(prompt, strategy="naive", max_tokens=12)
    turn = Segment("answer", Kind.QUERY, np.array(answer.tokens, np.int32))
    more = Segment("more", Kind.QUERY, np.arange(9, dtype=np.int32))
    follow = Prompt((*prompt.segments, turn, more))
    second = engine.answer_prompt(follow, strategy="prefix", max_tokens=1, want_logits=True)
    assert second.cached_tokens == prompt.starts[2]
    np.testing.assert_allclose(second.logits, dense(follow), atol=TOLERANCE)


def test_trees_are_refused_as_before(engine: Engine) -> None:
    base = tiny.prompt(46, chunks=(9,))
    tree = Prompt((base.segments[0], replace(base.segments[1], kind=Kind.NODE), base.segments[2]))
    with pytest.raises(RequestError, match="trees of paths"):
        engine.answer_prompt(tree, strategy="naive", max_tokens=1)
