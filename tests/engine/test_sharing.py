"""Requests that come together compute nothing twice, whoever of them leaves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ragjax.core import Answer, Kind, Prompt, Segment
from ragjax.core.depprompt import DepPrompt, LinearNode, TreeNode
from ragjax.engine import Engine
from ragjax.reuse import strategies
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.executor import Executor
from tests.support.matrix import few
from tests.support.pace import Hold, failing

CHUNKED = tiny.prompt(3, chunks=(40, 33, 57, 21))
SYSTEM, *PASSAGES, QUESTION = CHUNKED.segments


def asked(passages: Sequence[int], question: int) -> Prompt:
    """The passages in this order, and a question of its own."""
    tokens = np.random.default_rng(question).integers(0, 256, 9).astype(np.int32)
    return Prompt((SYSTEM, *(PASSAGES[i] for i in passages), Segment("question", Kind.QUERY, tokens)))


def tree(leaves: Sequence[int], question: int) -> Prompt:
    """Paths of a graph that begin alike."""
    end = np.random.default_rng(question).integers(0, 256, 9).astype(np.int32)
    branches = tuple(TreeNode(f"leaf {i}", (PASSAGES[i].tokens,)) for i in leaves)
    root = TreeNode("root", (PASSAGES[3].tokens,), branches)
    return DepPrompt((LinearNode("system", SYSTEM.tokens), root, LinearNode("task", end))).prompt()


def prompt_of(name: str, passages: Sequence[int], question: int) -> Prompt:
    return tree(passages, question) if name.startswith("dependency") else asked(passages, question)


def together(engine: Engine, prompts: Sequence[Prompt], name: str, **options: Any) -> list[Any]:
    """Futures of requests that the engine's thread takes up at once."""
    with Hold(engine):
        return [engine.begin_prompt(prompt, strategy=name, max_tokens=2, **options) for prompt in prompts]


def computed(answers: Sequence[Answer], ids: Sequence[str]) -> int:
    """Tokens of these segments that the answers had computed."""
    return sum(report.recomputed for answer in answers for report in answer.segments if report.id in ids)


SHARING = [name for name in strategies() if name != "full"]
IN_ANY_ORDER = {
    "naive",
    "unmoved",
    "craft",
    "craft-focus",
    "blend",
    "dependency",
    "dependency-preorder",
    "fusion",
    "anchor",
    "h2o",
    "random",
}


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("name", SHARING)
def test_what_an_outlook_misses_is_what_a_request_keeps(name: str) -> None:
    """Who waits for a piece must find it; who is told that it is kept must find it too."""
    executor, strategy = Executor(), strategies()[name]
    prompt = prompt_of(name, (0, 1, 2), 1)
    outlook = strategy.outlook(prompt, executor.cache, "")
    before = executor.cache.peek(outlook)
    assert before.found == 0 and before.missing
    executor.run(strategy, prompt)
    after = executor.cache.peek(outlook)
    assert not after.missing and after.found == sum(before.missing.values())
    assert after.kept.keys() == before.missing.keys()
    assert executor.cache.metrics.admitted_tokens == after.found
    other = strategy.outlook(prompt_of(name, (0, 1, 2), 2), executor.cache, "somebody")
    assert executor.cache.peek(other).found <= after.found
    assert executor.cache.peek(strategies()["full"].outlook(prompt, executor.cache, "")).found == 0


SOME = ["prefix", "naive", "set-cache", "fusion", "anchor", "craft", "dependency"]


@pytest.mark.slow
@pytest.mark.parametrize("name", few(SHARING, SOME))
def test_a_burst_computes_each_passage_once(engine: Engine, name: str) -> None:
    """Sixteen cold requests; half of them with the passages in another order, where that makes no difference."""
    orders = [(0, 1, 2), (2, 0, 1) if name in IN_ANY_ORDER else (0, 1, 2)]
    prompts = [prompt_of(name, orders[i % 2], i) for i in range(16)]
    answers = [future.result() for future in together(engine, prompts, name)]
    kept = set(outlook_names(engine, prompts, name))
    stats = engine.stats()
    tokens = sum(len(segment) for segment in prompts[0].segments[:-1])
    if name in ("prefix", "set-cache", "moved"):
        questions = sum(len(prompt.segments[-1]) for prompt in prompts)
        assert stats["admitted_tokens_total"] == tokens + questions + 16 * 1  # and the answers
        assert computed(answers, [s.id for s in prompts[0].segments[:-1]]) == tokens
    else:
        assert stats["admitted_tokens_total"] == tokens and kept
    assert stats["awaits_total"] == 15 and stats["awaited_tokens_total"] >= 15 * len(SYSTEM)


def outlook_names(engine: Engine, prompts: Sequence[Prompt], name: str) -> list[bytes]:
    strategy = strategies()[name]
    looks = [engine._cache.peek(strategy.outlook(prompt, engine._cache, "")) for prompt in prompts]
    return [key for look in looks for key in look.kept]


def test_full_attention_and_background_requests_are_not_waited_for(engine: Engine) -> None:
    for future in together(engine, [CHUNKED] * 4, "full"):
        future.result()
    for future in together(engine, [CHUNKED] * 3, "prefix", background=True):
        future.result()
    assert engine.stats()["awaits_total"] == 0


def test_only_who_shares_waits(engine: Engine) -> None:
    """Another's passages are computed at once: it starts before those that wait."""
    engine.answer_prompt(Prompt((SYSTEM, QUESTION)), max_tokens=1)
    prompts = [asked((0, 1), 0), asked((0, 1), 1), asked((2, 3), 2)]
    first, second, third = [future.result() for future in together(engine, prompts, "prefix")]
    assert engine.stats()["awaits_total"] == 1
    assert computed([first, second], ["chunk0", "chunk1"]) == 73
    assert computed([third], ["chunk2", "chunk3"]) == 78


@pytest.mark.parametrize("seed", few(range(6), [0]))
@pytest.mark.parametrize("name", ["prefix", "naive", "dependency"])
def test_who_waited_goes_on_when_the_first_leaves(name: str, seed: int) -> None:
    """The first is cancelled at some step, another too; each passage is computed once more at most for each."""
    random = np.random.default_rng(seed)
    count = int(random.integers(2, 17))
    prompts = [prompt_of(name, random.permutation(3)[: random.integers(1, 4)], i) for i in range(count)]
    with tiny.engine(max_running=int(random.integers(0, 3))) as engine:
        expected = [engine.answer_prompt(prompt, strategy="full", max_tokens=2).tokens for prompt in prompts]
        begun = engine.stats()["steps_total"]
        leaving = {0, int(random.integers(count))}
        step = int(random.integers(0, 6))
        futures = together(engine, prompts, name)
        while engine.stats()["steps_total"] < begun + step and not futures[0].done():
            time.sleep(0.0002)
        for i in leaving:
            futures[i].cancel()
        for i, future in enumerate(futures):
            if i not in leaving:
                answer = future.result(30)
                assert answer.exact_to != "full" or answer.tokens == expected[i]
        engine.answer_prompt(CHUNKED, strategy="full", max_tokens=1)
        audit_engine(engine)
        assert not engine._loop.waiting


def test_who_waited_goes_on_when_the_first_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, engine._runner, "step", 1, 2)  # it is started again once
    first, *others = together(engine, [CHUNKED] * 4, "prefix")
    with pytest.raises(RuntimeError, match="the device is busy"):
        first.result()
    answers = [future.result() for future in others]
    assert computed(answers, ["chunk0", "chunk1", "chunk2", "chunk3"]) == 151


def test_tenants_wait_for_nobody_elses_private_knowledge(engine: Engine) -> None:
    futures = together(engine, [CHUNKED], "naive", tenant="one") + together(engine, [CHUNKED], "naive", tenant="two")
    answers = [future.result() for future in futures]
    assert computed(answers, ["chunk0"]) == 80 and engine.stats()["awaits_total"] == 0
