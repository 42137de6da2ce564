"""Scores by the attention of all rows (h2o): an answer sees what is kept of the prompt, and its own tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ragjax.core import Compression, RequestError
from ragjax.core.prompt import Prompt
from tests.support import eviction, tiny
from tests.support.audit import audit_engine
from tests.support.executor import Array, model, softmax
from tests.support.matrix import few

BUDGET, WINDOW = 48, 8
H2O = Compression("h2o", BUDGET, window=WINDOW)


# ------------------------------------------------------------------------------------------- the oracle


class Heavy:
    """One layer while it decodes: k and v [n, K, D] of what is seen, and attention that each received, float64."""

    def __init__(self, k: Array, v: Array, mass: Array):
        self.k, self.v, self.mass = k, v, mass

    def add(self, q: Array, k: Array, v: Array) -> Array:
        """See one token more; its row's attention [1, H, n]."""
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])
        scores = model().scores(q, self.k)
        prob = softmax(scores, np.ones(scores.shape, bool))
        self.mass = np.concatenate([self.mass, [0.0]]) + prob[0].mean(0)
        return prob

    def evict(self) -> None:
        """Keep the budget: half the most recent, half those that received most."""
        n = len(self.k)
        kept = eviction.kept(self.mass, self.mass, n, BUDGET, BUDGET // 2)
        self.k, self.v, self.mass = self.k[kept], self.v[kept], self.mass[kept]


def expected(prompt: Prompt, said: tuple[int, ...]) -> Array:
    """Log-probabilities of the tokens said behind a prompt, each by what it saw: float64 [n]."""
    one, tokens = model(), prompt.tokens
    dense = one.dense(tokens)
    mass = dense.prob.mean(2).sum(1)
    layers = [Heavy(k, v, mass_N) for k, v, mass_N in zip(dense.k, dense.v, mass, strict=True)]
    for layer in layers:
        layer.evict()
    logits, found = dense.logits[-1], []
    for number, token in enumerate(said):
        found.append(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
        x = one.embedding[[token]]
        for i, layer in enumerate(layers):
            q, k, v = one.project(i, x, np.array([len(tokens) + number]))
            prob = layer.add(q, k, v)
            x = one.finish(i, x, one.mix(prob, layer.v))
        logits = one.unembed(x)[0]
    return np.array(found)


def logprobs(answer: Any) -> Array:
    return np.array([one.logprob for one in answer.logprobs])


# ------------------------------------------------------------------------------------------------ tests


def test_tokens_see_what_received_most_attention_and_the_most_recent() -> None:
    prompt = tiny.prompt()
    with tiny.engine(lookup=0) as engine:
        answer = engine.answer_prompt(prompt, strategy="full", compression=H2O, max_tokens=60, logprobs=0)
        audit_engine(engine)
    assert len(answer.tokens) == 60 and answer.kept == BUDGET and answer.exact_to is None
    np.testing.assert_allclose(logprobs(answer), expected(prompt, answer.tokens), atol=2e-3)


def test_a_prompt_within_the_budget_is_left_as_it_is_however_long_the_answer() -> None:
    prompt = tiny.prompt()
    with tiny.engine() as engine:
        plain = engine.answer_prompt(prompt, strategy="full", max_tokens=50)
        within = Compression("h2o", len(prompt), window=WINDOW)
        answer = engine.answer_prompt(prompt, strategy="full", compression=within, max_tokens=50)
        audit_engine(engine)
    assert answer.tokens == plain.tokens and answer.exact_to == "full"


def test_a_continuation_is_scored_over_what_is_kept_of_the_prompt() -> None:
    prompt, said = tiny.prompt(), np.random.default_rng(1).integers(0, 256, 36).astype(np.int32)
    with tiny.engine() as engine:
        answer = engine.answer_prompt(prompt, strategy="full", compression=H2O, continuation=said, max_tokens=30)
        audit_engine(engine)
    assert answer.scores is not None and len(answer.scores) == len(said) and len(answer.tokens) == 30
    got = np.take_along_axis(answer.scores - np.logaddexp.reduce(answer.scores, 1)[:, None], said[:, None], 1)[:, 0]
    np.testing.assert_allclose(got, expected(prompt, tuple(said.tolist())), atol=2e-3)


@pytest.mark.parametrize("seed", few(range(3), [0]))
def test_books_are_clean_whatever_is_cancelled(seed: int) -> None:
    random = np.random.default_rng(seed)
    with tiny.engine(pages=40, host_bytes=1 << 20, lookup=4) as engine:
        futures = []
        for i in range(16):
            compression = replace(H2O, budget=int(random.integers(20, 90)))
            prompt = tiny.prompt(int(random.integers(4)), chunks=(30, 25))
            strategy, tokens = ("full", "prefix")[i % 2], int(random.integers(1, 90))
            futures.append(
                engine.begin_prompt(
                    prompt, strategy=strategy, compression=compression, max_tokens=tokens, tenant=str(i % 2)
                )
            )
            if random.random() < 0.3:
                futures[int(random.integers(len(futures)))].cancel()
            audit_engine(engine)
        tiny.check_ended(engine, futures)


def test_heads_that_keep_their_own_are_refused() -> None:
    with tiny.engine() as engine, pytest.raises(RequestError, match="choose all") as refused:
        engine.answer_prompt(tiny.prompt(), strategy="full", compression=replace(H2O, heads="each"), max_tokens=2)
    assert refused.value.param == "rag.compression.heads"
