"""KV that is held beyond its request: generated from without computing any of it, and given back."""

from __future__ import annotations

import numpy as np
import pytest

from ragjax.core import Grid, Kind, Prompt, RequestError, Segment
from ragjax.core.depprompt import DepPrompt, LinearNode, Positions, TreeNode
from ragjax.engine import Engine
from ragjax.engine.depkv import Resumed
from ragjax.reuse.exact import Full
from tests.support import tiny
from tests.support.audit import AuditError, audit_engine
from tests.support.pace import failing, resting

RANDOM = np.random.default_rng(4)


def tokens(n: int) -> np.ndarray:
    return RANDOM.integers(0, 256, n).astype(np.int32)


PROMPT = DepPrompt(
    (
        LinearNode("system", tokens(20)),
        TreeNode("a", tuple(np.concatenate([tokens(3), tokens(5)]) for _ in range(4))),
        TreeNode("b", (tokens(6), tokens(4))),
        LinearNode("task", tokens(9)),
    )
)


pytestmark = pytest.mark.engine(lookup=0)


@pytest.mark.parametrize("positions", ["path", "preorder"])
def test_generating_from_held_kv_computes_nothing_of_the_prompt(engine: Engine, positions: Positions) -> None:
    strategy = "dependency" if positions == "path" else "dependency-preorder"
    expected = engine.answer_prompt(PROMPT.prompt(), strategy=strategy, max_tokens=12)
    engine.clear_cache()
    with engine.compute_depkv(PROMPT, positions=positions) as kv:
        assert sum(r.recomputed for r in kv.reports) == len(kv.prompt)
        for _ in range(2):
            engine.clear_cache()  # what is held stays
            before = engine.stats()["steps_total"]
            answer = engine.generate_with_depkv(kv, max_tokens=12)
            assert answer.tokens == expected.tokens and answer.exact_to == "dependency"
            assert answer.cached_tokens == len(kv.prompt)
            steps = engine.stats()["steps_total"] - before
            assert steps == len(answer.tokens) - 1, "a step a token, none for the prompt"
        audit_engine(engine)


def test_it_shows_itself_in_a_line() -> None:
    with tiny.engine() as engine, engine.compute_kv(tiny.prompt(), strategy="full") as kv:
        assert repr(kv).startswith("DepKV(strategy='full'") and len(repr(kv)) < 400


def test_it_is_given_back_once_and_not_used_afterwards(engine: Engine) -> None:
    kv = engine.compute_depkv(PROMPT)
    used = engine.stats()["pages_used"]
    kv.close()
    kv.close()
    engine.clear_cache()
    assert engine.stats()["pages_used"] < used
    with pytest.raises(RequestError, match="closed"):
        engine.generate_with_depkv(kv, max_tokens=2)


def test_many_generate_from_it_at_once_and_it_is_not_closed_meanwhile(engine: Engine) -> None:
    with engine.compute_depkv(PROMPT) as kv:
        alone = engine.generate_with_depkv(kv, max_tokens=40, temperature=1.0, seed=3, top_k=5)
        with resting(engine):
            futures = [
                engine.begin_prompt(kv.prompt, strategy=Resumed(kv), max_tokens=40, temperature=1.0, seed=3, top_k=5)
                for _ in range(4)
            ]
            with pytest.raises(RequestError, match="in use"):
                kv.close()
        assert {future.result().tokens for future in futures} == {alone.tokens}


def test_an_audit_would_find_it_if_nobody_knew_of_it(engine: Engine) -> None:
    kv = engine.compute_depkv(PROMPT)
    audit_engine(engine)
    del engine._loop.kept[kv.label]
    with pytest.raises(AuditError):
        audit_engine(engine)
    engine._loop.kept[kv.label] = kv
    kv.close()


def test_a_lost_device_takes_it_along(engine: Engine) -> None:
    kv = engine.compute_depkv(PROMPT)
    engine._loop.call(lambda: engine._loop._execution.recover(RuntimeError("lost")))
    with pytest.raises(RequestError, match="compute it again"):
        engine.generate_with_depkv(kv, max_tokens=2)
    assert engine.generate_with_depkv(engine.compute_depkv(PROMPT), max_tokens=2).exact_to == "dependency"
    for held in list(engine._loop.kept.values()):
        held.close()


def test_an_answer_that_finds_no_entries_fails_alone() -> None:
    """Each path came with a request of its own and lies on a page of its own; what is generated needs entries too."""
    grid = Grid(rows=((2, 2), (4, 1), (16, 8), (64, 16)), entries=(40,), logits=(2, 4))
    paths = tuple(np.concatenate([[i], tokens(4)]).astype(np.int32) for i in range(30))
    system, task = LinearNode("system", tokens(10)), LinearNode("task", tokens(5))
    with tiny.engine(tiny.make_runner(grid=grid)) as engine:
        for path in paths:
            engine.answer_prompt(
                DepPrompt((system, TreeNode("a", (path,)), task)).prompt(), strategy="dependency", max_tokens=1
            )
        with engine.compute_depkv(DepPrompt((system, TreeNode("a", paths), task))) as kv:
            with pytest.raises(RequestError, match="in too many pieces"):
                engine.generate_with_depkv(kv, max_tokens=400)
            assert engine.stats()["errors_total"] == 0, "the client asked for too much"
            assert engine.stats()["queue_depth"] == 0
            assert engine.generate_with_depkv(kv, max_tokens=2).tokens


@pytest.mark.parametrize(("strategy", "ratio"), [("full", None), ("prefix", None), ("naive", None), ("epic", 0.3)])
def test_kv_of_any_strategy_is_held_for_many_continuations(engine: Engine, strategy: str, ratio: float | None) -> None:
    prompt, behind = tiny.prompt(7), [tokens(5), tokens(1), tokens(3)]
    asked = {"strategy": strategy, "recompute_ratio": ratio}
    with engine.compute_kv(prompt, tenant="held", **asked) as kv:
        assert kv.timings.ttft > 0
        for continuation in behind:
            found = engine.generate_with_depkv(kv, continuation=continuation, max_tokens=4)
            alone = engine.answer_prompt(prompt, continuation=continuation, max_tokens=4, tenant="alone", **asked)
            assert found.tokens == alone.tokens
            np.testing.assert_allclose(found.scores, alone.scores, atol=1e-4)
    with pytest.raises(RequestError, match="unknown strategy 'best'"):
        engine.compute_kv(prompt, strategy="best")
    with pytest.raises(RequestError, match="takes no recompute_ratio"):
        engine.compute_kv(prompt, strategy="naive", recompute_ratio=0.5)


def test_kv_is_held_of_the_prompt_as_the_strategy_has_it_read() -> None:
    class Longer(Full):
        name = "longer"

        def dress(self, prompt: Prompt) -> Prompt:
            return prompt if prompt.segments[-1].id == "more" else Prompt((*prompt.segments, more))

    more = Segment("more", Kind.QUERY, tokens(6))
    with tiny.engine(extra=[Longer()]) as engine, engine.compute_kv(tiny.prompt(7), strategy="longer") as kv:
        expected = engine.answer_prompt(Prompt((*tiny.prompt(7).segments, more)), strategy="full", max_tokens=6)
        assert engine.generate_with_depkv(kv, max_tokens=6).tokens == expected.tokens
        assert len(kv.prompt) == expected.prompt_tokens


def test_kv_that_is_computed_twice_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token fails after the KV was handed over, and the prompt is computed again."""
    with tiny.engine() as engine:
        calls = failing(monkeypatch, tiny.runner(), "sample", 1)
        engine.compute_kv(tiny.prompt(1), strategy="full").close()
        engine.clear_cache()
        audit_engine(engine)
        assert next(calls) > 2 and engine._cache.pool.free_pages == engine._cache.pool.capacity
