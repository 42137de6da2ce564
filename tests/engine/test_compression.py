"""Compressed prompts in the engine: what the answer sees, what is given back, what the cache keeps, and the labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from ragjax.core import Kind, Prompt, RequestError, Segment
from ragjax.core.compression import BY_MASS, METHODS, GraphKV
from ragjax.engine import Engine, prepare
from ragjax.quality.contract import Contract
from ragjax.quality.report import Setting
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.eviction import SAID, distinct, expected, setting
from tests.support.matrix import few
from tests.support.pace import failing, until

SERVED = list(METHODS)


# ------------------------------------------------------------------------------------- what answers see


GRAPH = {"graph": GraphKV(sources=0.5, neighbours=6, rounds=2)}
EACH = {"heads": "each"}


SEEN: list[tuple[str, dict[str, Any]]] = [
    *((method, more) for method in SERVED for more in ({}, GRAPH)),
    *((method, EACH) for method in SERVED if method not in BY_MASS),
]
IN_TURN = [SEEN[2 * i + i % 2] for i in range(len(SERVED))]
"""Each method once, every other one with the graph."""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "more"), few(SEEN, [*IN_TURN, SEEN[-1]]))
def test_an_answer_sees_what_is_kept_and_nothing_else(engine: Engine, method: str, more: Mapping[str, Any]) -> None:
    prompt, compression = distinct(), setting(method, **more)
    given = {"strategy": "full", "continuation": SAID, "max_tokens": 20, "logprobs": 0}
    answer = engine.answer_prompt(prompt, compression=compression, **given)
    want = expected(tiny.decoder(), prompt.tokens, compression)
    np.testing.assert_allclose(answer.scores, want, atol=2e-3)
    own_NV = jax.nn.log_softmax(expected(tiny.decoder(), prompt.tokens, compression, np.array(answer.tokens)))
    told = [one.logprob for one in answer.logprobs]
    np.testing.assert_allclose(told, own_NV[np.arange(len(told)), np.array(answer.tokens)], atol=2e-3)
    plain = expected(tiny.decoder(), prompt.tokens, None)
    assert np.abs(answer.scores[1:] - plain[1:]).max() > 0.1, "nothing was dropped"
    assert answer.exact_to is None and answer.compression == compression and answer.kept == 48


@pytest.mark.parametrize("method", ["snapkv", "h2o"])
def test_a_budget_of_the_whole_prompt_changes_nothing(engine: Engine, method: str) -> None:
    prompt = tiny.prompt()
    given = {"strategy": "full", "continuation": SAID, "max_tokens": 4}
    plain = engine.answer_prompt(prompt, **given)
    whole = engine.answer_prompt(prompt, compression=setting(method, len(prompt)), **given)
    np.testing.assert_array_equal(whole.scores, plain.scores)
    assert whole.tokens == plain.tokens and whole.exact_to == "full" and whole.kept == len(prompt)
    assert plain.compression is None and plain.kept is None


@pytest.mark.parametrize("strategy", ["prefix", "naive", "blend", "craft", "set-cache", "fusion"])
def test_compression_works_on_the_plan_of_any_strategy(engine: Engine, strategy: str) -> None:
    """Reused KV lies at offsets; the budget of all but one token drops that one alone, so answers stay near."""
    prompt = tiny.prompt()
    given = {"strategy": strategy, "continuation": SAID, "max_tokens": 2}
    for _ in range(2):
        plain = engine.answer_prompt(prompt, **given)
    near = engine.answer_prompt(prompt, compression=setting("snapkv", len(prompt) - 1), **given)
    assert plain.cached_tokens and near.cached_tokens == plain.cached_tokens
    np.testing.assert_allclose(near.scores[0], plain.scores[0], atol=1e-4)
    np.testing.assert_allclose(near.scores, plain.scores, atol=0.2)
    assert not np.array_equal(near.scores[1:], plain.scores[1:]) and near.kept == len(prompt) - 1


# ---------------------------------------------------------------------------- what is held, kept and found


def test_the_prompts_pages_are_given_back_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, used = tiny.prompt(), []
    with tiny.engine(lookup=0) as engine:
        pool, step = engine._cache.pool, engine._runner.step

        def watched(asked: Any) -> Any:
            if (asked.index_T >= len(prompt)).any():
                used[-1].append(pool.capacity - pool.free_pages)
            return step(asked)

        monkeypatch.setattr(engine._runner, "step", watched)
        for compression in (None, setting("snapkv", 32)):
            used.append([])
            engine.answer_prompt(prompt, strategy="full", compression=compression, max_tokens=20)
            audit_engine(engine)
    assert min(used[0]) == pool.pages_for(len(prompt) + 1)
    assert min(used[1]) == pool.pages_for(33) and max(used[1]) == pool.pages_for(32 + 20)


def test_shared_pages_are_never_written(engine: Engine) -> None:
    prompt = tiny.prompt(question=3)  # the window reaches into the last passage, whose KV is shared
    engine.answer_prompt(prompt, max_tokens=1)
    runs = [node.run for node in engine._cache.tree.nodes() if node.run is not None]
    slots = np.unique(np.concatenate([run.slots(tiny.PAGE) for run in runs]))
    before = engine._runner.read(slots)
    for method, graph in (("snapkv", None), ("snapkv", GraphKV()), ("knorm", None)):
        engine.answer_prompt(prompt, compression=setting(method, graph=graph), max_tokens=20)
    for old, new in zip(before, engine._runner.read(slots), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("method", ["snapkv", "h2o"])
def test_the_next_turn_finds_the_prompt_and_not_the_answer(engine: Engine, method: str) -> None:
    """KV of an answer over a part of the prompt is for nobody else; the prompt's own KV is whole, and exact."""
    prompt = tiny.prompt()
    answer = engine.answer_prompt(prompt, compression=setting(method), max_tokens=20)
    turn = Segment("turn", Kind.QUERY, np.array([*answer.tokens, 5, 6, 7], np.int32))
    again = Prompt((*prompt.segments, turn))
    found = engine.answer_prompt(again, max_tokens=4)
    cold = engine.answer_prompt(again, strategy="full", max_tokens=4)
    assert found.cached_tokens == len(prompt) and found.exact_to == "full"
    assert found.tokens == cold.tokens


@pytest.mark.slow
@pytest.mark.parametrize("method", few(["snapkv", "h2o"], ["snapkv"]))
def test_prompt_lookup_and_pauses_do_not_change_compressed_answers(method: str) -> None:
    prompts = [tiny.prompt(i) for i in (0, 2, 4, 5)]
    given: dict[str, Any] = {"compression": setting(method, graph=GraphKV()), "max_tokens": 150}
    with tiny.engine(lookup=0) as engine:
        alone = [engine.answer_prompt(prompt, **given).tokens for prompt in prompts]
    with tiny.engine(pages=24, lookup=6) as engine:
        futures = [engine.begin_prompt(prompt, tenant=str(i), **given) for i, prompt in enumerate(prompts)]
        answers = [future.result() for future in futures]
        audit_engine(engine)
        assert engine.stats()["pauses_total"] > 0
    assert [answer.tokens for answer in answers] == alone


def test_a_step_that_fails_while_decoding_starts_the_request_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, given = tiny.prompt(), {"compression": setting("snapkv"), "max_tokens": 12}
    with tiny.engine(lookup=0) as engine:
        plain = engine.answer_prompt(prompt, **given)
        engine.clear_cache()
        # behind three of the prompt, one of the window, and three that brought tokens
        failing(monkeypatch, tiny.runner(), "step", 8)
        answer = engine.answer_prompt(prompt, **given)
    assert len(answer.tokens) == len(plain.tokens) and answer.tokens[:4] == plain.tokens[:4]
    assert answer.exact_to is None and answer.notices


@pytest.mark.parametrize("method", ["snapkv", "knorm"])
@pytest.mark.parametrize("tokens", [1, 6])
def test_the_first_token_is_told_before_the_prompt_is_compressed(
    engine: Engine, method: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny.prompt()
    whole = engine.answer_prompt(prompt, max_tokens=tokens)
    compact, seen = engine._runner.compact, []

    def watched(*given: Any) -> Any:
        (state,) = engine._loop.requests.running
        seen.append((tuple(state.generated.tolist()), state.times.first_token > 0))
        return compact(*given)

    monkeypatch.setattr(engine._runner, "compact", watched)
    answer = engine.answer_prompt(prompt, compression=setting(method), max_tokens=tokens, want_logits=True)
    assert seen == [(whole.tokens[:1], True)]
    assert answer.tokens[:1] == whole.tokens[:1] and len(answer.tokens) == tokens
    assert answer.logits is not None and answer.kept == 48 and answer.exact_to is None


@pytest.mark.parametrize("tokens", [1, 12])
def test_a_compaction_that_fails_starts_the_request_again_behind_its_first_token(
    engine: Engine, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, given = tiny.prompt(), {"compression": setting("snapkv"), "max_tokens": tokens}
    plain = engine.answer_prompt(prompt, **given)
    engine.clear_cache()
    calls = failing(monkeypatch, tiny.runner(), "compact", 1)
    answer = engine.answer_prompt(prompt, **given)
    assert next(calls) == 3 and len(answer.tokens) == tokens and answer.tokens[0] == plain.tokens[0]
    assert answer.exact_to is None and answer.notices


@pytest.mark.parametrize("seed", few(range(3), [0]))
def test_books_are_clean_whatever_is_asked_and_cancelled(seed: int) -> None:
    random = np.random.default_rng(seed)
    strategies = ("full", "prefix", "naive", "blend", "set-cache")
    with tiny.engine(pages=40, host_bytes=1 << 20) as engine:
        futures = []
        for i in range(24):
            method = SERVED[random.integers(len(SERVED))]
            strategy = strategies[random.integers(2 if method == "h2o" else len(strategies))]
            graph = GraphKV(rounds=int(random.integers(1, 4))) if random.random() < 0.5 else None
            compression = setting(method, int(random.integers(9, 200)), graph=graph)
            given = compression if random.random() < 0.8 else "none"
            prompt = tiny.prompt(int(random.integers(4)), chunks=(30, 25))
            futures.append(
                engine.begin_prompt(
                    prompt,
                    strategy=strategy,
                    compression=given,
                    max_tokens=int(random.integers(1, 40)),
                    tenant=str(i % 2),
                )
            )
            if random.random() < 0.25:
                futures[int(random.integers(len(futures)))].cancel()
            if random.random() < 0.3:
                audit_engine(engine)
        tiny.check_ended(engine, futures)


# ------------------------------------------------------------------------------------------ who asks how


def test_the_engines_default_and_what_a_request_says() -> None:
    prompt = tiny.prompt()
    with tiny.engine(compression="snapkv+graph:40") as engine:
        default = engine.answer_prompt(prompt, max_tokens=2)
        none = engine.answer_prompt(prompt, compression="none", max_tokens=2)
        other = engine.answer_prompt(prompt, compression="knorm:50", max_tokens=2)
        dropped = engine.stats()["dropped_tokens_total"]
    assert str(default.compression) == "snapkv+graph:40" and default.kept == 40 and default.exact_to is None
    assert none.compression is None and none.exact_to == "full"
    assert str(other.compression) == "knorm:50"
    assert dropped == 2 * len(prompt) - 90


def refusal(engine: Engine, **given: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        engine.answer_prompt(tiny.prompt(), max_tokens=2, **given)
    return caught.value


def test_what_an_engine_cannot_do_is_refused_in_words(engine: Engine) -> None:
    assert "blend" in str(refusal(engine, strategy="blend", compression=setting("h2o")))
    assert refusal(engine, compression=setting("h2o", heads="each")).param == "rag.compression.heads"
    answer = engine.answer_prompt(tiny.prompt(), max_tokens=2)
    assert answer.compression is None


def test_a_client_cannot_have_any_number_of_programs_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MOST_COMPRESSIONS", 2)
    with tiny.engine() as engine:
        for given in ("knorm:40", "knorm:60", "snapkv:40", "snapkv:400"):
            engine.answer_prompt(tiny.prompt(), compression=given, max_tokens=1)
        error = refusal(engine, compression="h2o:40")
        assert error.param == "rag.compression" and "knorm:64, snapkv:64" in str(error)
        assert engine.answer_prompt(tiny.prompt(), compression="knorm:50", max_tokens=1).kept == 50


def test_a_tenant_cannot_use_up_the_programs_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MOST_COMPRESSIONS", 3)
    monkeypatch.setattr(prepare, "MOST_OF_TENANT", 1)
    with tiny.engine() as engine:

        def ask(given: str, tenant: str) -> None:
            engine.answer_prompt(tiny.prompt(), compression=given, tenant=tenant, max_tokens=1)

        ask("knorm:40", "one")
        with pytest.raises(RequestError, match="with its window and graph: knorm:64"):
            ask("snapkv:40", "one")
        ask("snapkv:40", "other")
        ask("knorm:40", "other")
        ask("h2o:40", "third")
        with pytest.raises(RequestError, match="with its window and graph: none"):
            ask("snapkv+graph:40", "fourth")


def test_a_request_that_is_refused_compiles_no_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MOST_COMPRESSIONS", 1)
    with tiny.engine() as engine:
        too_long = tiny.prompt(question=engine.context_length)
        for given in ("knorm:40", "h2o:40"):
            with pytest.raises(RequestError, match="tokens"):
                engine.answer_prompt(too_long, compression=given, max_tokens=1)
        assert engine.answer_prompt(tiny.prompt(), compression="snapkv:40", max_tokens=1).kept == 40


def test_shadow_replay_knows_a_compression_as_a_setting_of_its_own() -> None:
    seen = []
    contract = Contract(Setting("full"), "float32", shadow_rate=1.0)
    observe = contract.observe
    contract.observe = lambda *given: (seen.append(given), observe(*given))[1]
    with tiny.engine(contract=contract) as engine:
        engine.answer_prompt(tiny.prompt(), strategy="full", compression=setting("knorm", 16), max_tokens=8)
        until(lambda: seen)
    (told, exact, divergence, covered) = seen[0]
    assert told == Setting("full", None, "knorm:16") and not exact and divergence.kl > 1e-3 and not covered


def test_a_prompt_within_its_budget_stays_whole_when_it_is_computed_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny.prompt(1, system=10, chunks=(20,), question=20)
    given = {"strategy": "full", "compression": "h2o:64", "max_tokens": 40}
    wanted = engine.answer_prompt(prompt, **given)
    failing(monkeypatch, tiny.runner(), "step", 25)
    found = engine.answer_prompt(prompt, **given)
    assert found.notices and (found.tokens, found.kept, found.exact_to) == (wanted.tokens, 50, "full")


def test_scores_by_attention_need_passes() -> None:
    with tiny.engine() as engine, engine.compute_kv(tiny.prompt(3), strategy="full") as kv:
        assert engine.generate_with_depkv(kv, compression="snapkv:64", max_tokens=2).kept == 64
        with pytest.raises(RequestError, match="KV that is held needs none"):
            engine.generate_with_depkv(kv, compression="h2o:64", max_tokens=2)
