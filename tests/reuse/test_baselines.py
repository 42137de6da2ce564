"""Baselines of DepCache's Figure 16 and Cache-Craft's Table 3, against dense float64 attention."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.baseline.strategy import all_strategies
from benchmarks.baseline.strategy.streaming import SINKS, Streaming
from ragjax.core import Prompt
from ragjax.engine import Engine
from tests.support import tiny
from tests.support.executor import Executor, model
from tests.support.literal import chosen_of, joins

FOLLOWING = np.array([7, 99, 200], np.int32)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_streaming_sees_sinks_and_a_window_in_whole_pages(share: float) -> None:
    prompt, executor = tiny.prompt(40), Executor()
    talk = executor.talk(Streaming(share), prompt)
    talk.end()
    n, page = len(prompt), executor.page_size
    tokens, size = np.concatenate([prompt.tokens, FOLLOWING]), n + len(FOLLOWING)
    key, row = np.arange(size), np.arange(size)[:, None]
    page_end = np.minimum((key // page + 1) * page, n) - 1
    near = np.minimum(row, n - 1) < page_end + max(1, np.ceil(share * n))
    seen = (key <= row) & ((key < SINKS) | near | (key // page == row // page) | (key >= n))
    expected = model().dense(tokens, seen).logits
    np.testing.assert_allclose(talk.score(FOLLOWING), expected[n - 1 : -1], atol=1e-5)
    talk.close()


def test_streaming_by_the_engine(engine: Engine) -> None:
    prompt = tiny.prompt(41)
    answer = engine.answer_prompt(prompt, strategy=Streaming(), max_tokens=2, want_logits=True)
    np.testing.assert_allclose(answer.logits, Executor().run(Streaming(), prompt).logits, atol=1e-3)


def test_craft_unmoved_mends_at_the_right_places_over_keys_at_the_old_ones() -> None:
    executor, strategy, first = Executor(), all_strategies()["craft-unmoved"], tiny.prompt(42)
    executor.run(strategy, first, 0.3)
    system, a, b, c, question = first.segments
    prompt = Prompt((system, c, a, b, question))
    done = executor.run(strategy, prompt, 0.3)
    cold, (x, _, z, end) = model().dense(first.tokens), first.starts[1:5]
    order = np.concatenate([np.arange(x), np.arange(z, end), np.arange(x, z), np.arange(end, len(first))])
    chosen = chosen_of(done, prompt)
    rows = np.array(sorted({*chosen, *joins(prompt)}))
    expected = model().dense(prompt.tokens, rows=rows, kept=(cold.k[:, order], cold.v[:, order])).logits[-1]
    assert chosen
    np.testing.assert_allclose(done.logits, expected, atol=1e-5)
