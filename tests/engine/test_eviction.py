"""Eviction while decoding (h2o): what each token of a long answer sees, what it holds, and that it ends well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ragjax.core import Compression, RequestError, Tokens
from ragjax.core.compression import Graph
from ragjax.core.prompt import Prompt
from ragjax.reuse import compaction
from ragjax.schedule import decoding, state
from tests.support import eviction, tiny
from tests.support.executor import Array, model, softmax
from tests.support.matrix import few
from tests.support.pace import Hold

BUDGET, WINDOW, STRIDE = 48, 8, 12
H2O = Compression("h2o", BUDGET, window=WINDOW)


@pytest.fixture(autouse=True)
def short_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (compaction, state):
        monkeypatch.setattr(module, "STRIDE", STRIDE)


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


def expected(prompt: Prompt, said: tuple[int, ...], stride: int) -> Array:
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
        if number and number % stride == 0:
            for layer in layers:
                layer.evict()
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
        engine.audit()
    assert len(answer.tokens) == 60
    np.testing.assert_allclose(logprobs(answer), expected(prompt, answer.tokens, STRIDE), atol=2e-3)
    once = expected(prompt, answer.tokens, 1000)
    assert np.abs(once - logprobs(answer)).max() > 0.05, "nothing was evicted"
    assert answer.figures["evicted"] == 4 * STRIDE and answer.kept == BUDGET and answer.exact_to is None


@pytest.mark.parametrize("graph", [None, Graph(sources=0.5, neighbours=6)])
def test_lookup_pauses_and_others_change_nothing(graph: Graph | None) -> None:
    prompts = [tiny.prompt(i) for i in range(3)]
    given: dict[str, Any] = {"compression": replace(H2O, graph=graph), "strategy": "full", "max_tokens": 110}
    with tiny.engine(lookup=0) as engine:
        alone = [engine.answer_prompt(prompt, **given).tokens for prompt in prompts]
    with tiny.engine(pages=26, lookup=6) as engine:
        with Hold(engine):
            others = [engine.begin_prompt(tiny.prompt(i), tenant="other", max_tokens=150) for i in range(2)]
            futures = [engine.begin_prompt(prompt, tenant=str(i), **given) for i, prompt in enumerate(prompts)]
        answers = [future.result() for future in futures]
        assert not any(other.result().notices for other in others)
        engine.audit()
        stats = engine.stats()
    assert stats["lookup_tokens_total"]["proposed"] > 0 and stats["pauses_total"] > 0
    assert not any(answer.notices for answer in answers)
    assert [answer.tokens for answer in answers] == alone


def test_a_long_answer_holds_no_more_than_its_budget_and_a_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, used = tiny.prompt(), []
    with tiny.engine(lookup=0) as engine:
        pool, step = engine._cache.pool, engine._runner.step

        def watched(asked: Any) -> Any:
            if (asked.index_T >= len(prompt)).any():
                used.append(pool.capacity - pool.free_pages)
            return step(asked)

        monkeypatch.setattr(engine._runner, "step", watched)
        engine.answer_prompt(prompt, strategy="full", compression=H2O, max_tokens=100)
        engine.audit()
    assert max(used) == pool.pages_for(BUDGET + STRIDE) < pool.pages_for(BUDGET + 100)


def test_a_pool_serves_answers_that_it_could_not_hold() -> None:
    prompt = tiny.prompt()
    given: dict[str, Any] = {"strategy": "full", "max_tokens": 300}
    with tiny.engine() as engine:
        room = engine._cache.pool.pages_for(len(prompt) + 1) + engine._cache.pool.pages_for(BUDGET + STRIDE)
        roomy = engine.answer_prompt(prompt, compression=H2O, **given)
    with tiny.engine(pages=room + 2) as engine:
        with pytest.raises(RequestError, match="pages of KV"):
            engine.answer_prompt(prompt, **given)
        answer = engine.answer_prompt(prompt, compression=H2O, **given)
        engine.audit()
    assert answer.tokens == roomy.tokens and answer.figures["evicted"] > 100


def test_proposals_end_where_an_eviction_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = tiny.prompt()
    between = replace(H2O, budget=BUDGET - 8)  # the tail begins within a page, and ends with one
    given: dict[str, Any] = {"strategy": "full", "compression": between, "max_tokens": 60}
    with tiny.engine(lookup=0) as engine:
        alone = engine.answer_prompt(prompt, **given).tokens

    def proposed(tokens: Tokens, most: int) -> Tokens:
        said = len(tokens) - len(prompt)
        return np.array(alone[said : said + most], np.int32)

    monkeypatch.setattr(decoding, "propose", proposed)
    with tiny.engine(lookup=6) as engine:
        answer = engine.answer_prompt(prompt, **given)
        accepted = engine.stats()["lookup_tokens_total"]["accepted"]
    assert answer.tokens == alone and accepted > 30


def test_a_prompt_within_the_budget_is_left_as_it_is_however_long_the_answer() -> None:
    prompt = tiny.prompt()
    with tiny.engine() as engine:
        plain = engine.answer_prompt(prompt, strategy="full", max_tokens=50)
        within = Compression("h2o", len(prompt), window=WINDOW)
        answer = engine.answer_prompt(prompt, strategy="full", compression=within, max_tokens=50)
        engine.audit()
    assert answer.tokens == plain.tokens and answer.exact_to == "full" and "evicted" not in answer.figures


def test_a_continuation_is_scored_over_what_is_kept_of_the_prompt() -> None:
    prompt, said = tiny.prompt(), np.random.default_rng(1).integers(0, 256, 3 * STRIDE).astype(np.int32)
    with tiny.engine() as engine:
        answer = engine.answer_prompt(prompt, strategy="full", compression=H2O, continuation=said, max_tokens=30)
        engine.audit()
    assert answer.scores is not None and len(answer.scores) == len(said) and len(answer.tokens) == 30
    got = np.take_along_axis(answer.scores - np.logaddexp.reduce(answer.scores, 1)[:, None], said[:, None], 1)[:, 0]
    np.testing.assert_allclose(got, expected(prompt, tuple(said.tolist()), 1000), atol=2e-3)


@pytest.mark.parametrize("broken", ["step", "compact"])
def test_an_eviction_that_fails_starts_the_request_again(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, given = tiny.prompt(), {"compression": H2O, "strategy": "full", "max_tokens": 40}
    with tiny.engine(lookup=0) as engine:
        plain = engine.answer_prompt(prompt, **given)
        engine.clear_cache()
        work, calls = getattr(engine._runner, broken), []

        def failing(*asked: Any) -> Any:
            states = engine._loop._scheduler.running
            if states and states[0].decoded == [] and len(states[0].generated) > 1 and not calls:
                calls.append(asked)
                raise RuntimeError("planted")
            return work(*asked)

        monkeypatch.setattr(engine._runner, broken, failing)
        answer = engine.answer_prompt(prompt, **given)
        engine.audit()
    assert calls and len(answer.tokens) == 40 and answer.tokens[: STRIDE + 1] == plain.tokens[: STRIDE + 1]
    assert answer.exact_to is None and answer.notices


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
            engine.audit()
        tiny.check_ended(engine, futures)


def test_heads_that_keep_their_own_are_refused() -> None:
    with tiny.engine() as engine, pytest.raises(RequestError, match="choose all") as refused:
        engine.answer_prompt(tiny.prompt(), strategy="full", compression=replace(H2O, heads="each"), max_tokens=2)
    assert refused.value.param == "rag.compression.heads"
