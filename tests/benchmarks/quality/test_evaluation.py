"""One set's questions answered by every strategy, on the tiny model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.common.samples import Progress, Samples
from benchmarks.quality import evaluation
from benchmarks.quality.dataset import Question, QuestionSet
from benchmarks.quality.evaluation import FULL, NAIVE, Evaluation, Setting, Style
from benchmarks.quality.rows import measure
from ragjax.core import Document, Kind
from ragjax.engine import Engine
from ragjax.reuse import strategies as all_strategies
from tests.support import tiny
from tests.support.audit import audit_engine


def evaluate(engine: Engine, questions: QuestionSet, limit: int = 9, **more: Any) -> Evaluation:
    return Evaluation(engine, questions, limit, tiny.HashedEncoder(), Style(max_tokens=12), **more)


def test_prompts_are_those_of_chat_requests(boats: QuestionSet) -> None:
    with tiny.engine() as engine:
        work = evaluate(engine, boats)
        question = work.questions[0]
        answer = engine.answer(question.text, documents=question.passages, max_tokens=1)
        mine = engine.answer_prompt(work.prompt(question), strategy="prefix", max_tokens=1)
        assert mine.prompt_tokens == answer.prompt_tokens and mine.segments[-1].recomputed == 1
    assert bytes(work.continuation(question).tolist()).decode() == "at 0 o'clock"


def test_questions_too_long_for_the_context_are_left_out(boats: QuestionSet) -> None:
    question = boats.questions[0]
    long = [Document(f"long{i}", "word " * 30 + str(i)) for i in range(8)]
    sets = QuestionSet(
        "x", (Question("big", "?", ("a",), tuple(long)), question), {d.id: d for d in (*long, *question.passages)}
    )
    with tiny.engine() as engine:
        work = evaluate(engine, sets, limit=1)
        assert [q.id for q in work.questions] == [question.id] and work.left_out == 1


@pytest.mark.slow
def test_samples_of_the_limits(boats: QuestionSet) -> None:
    """Full is itself; naive reuses everything; a ratio of one is full again."""
    fusion = Setting("fusion", 0.3, 2)
    settings = [FULL, NAIVE, Setting("prefix"), Setting("fusion", 1.0, 2), fusion, Setting("blend", 0.3)]
    with tiny.engine() as engine:
        work = evaluate(engine, boats)
        work.warm_up(settings)
        question = work.questions[1]
        found = dict(work.measure(question, settings))
        audit_engine(engine)
        prompt = work.prompt(question)
    tokens = sum(len(s) for s in prompt.segments if s.kind is Kind.CHUNK)
    assert list(found) == settings
    assert (found[FULL]["kl"], found[FULL]["rougeL_vs_full"], found[FULL]["recomputed_share"]) == (0.0, 1.0, 1.0)
    assert found[NAIVE]["recomputed_share"] == 0 and found[NAIVE]["kl"] > 1e-4
    assert found[Setting("prefix")]["kl"] < 1e-6
    assert found[Setting("fusion", 1.0, 2)]["kl"] < 1e-6
    for setting in (fusion, Setting("blend", 0.3)):
        assert found[setting]["recomputed_share"] == np.ceil(0.3 * tokens) / tokens


def test_fused_chunks_are_used_and_neighbours_count(boats: QuestionSet) -> None:
    kinds = [Setting("fusion", 0.0, n) for n in (1, 3)]
    with tiny.engine() as engine:
        work = evaluate(engine, boats)
        found = dict(work.measure(work.questions[0], [*kinds, NAIVE]))
        behind = [[s.behind for s in work.prompt(work.questions[0], k.neighbours).segments[1:-1]] for k in kinds]
    assert len({found[k]["kl"] for k in (NAIVE, *kinds)}) == 3
    assert all(behind[0]) and not set(behind[0]) & set(behind[1])


@pytest.mark.slow
def test_no_setting_profits_from_another(boats: QuestionSet) -> None:
    """What a measured request leaves behind is its tenant's own: the order of settings changes nothing."""
    settings = [Setting("prefix"), Setting("set-cache"), NAIVE, Setting("craft", 0.3), Setting("craft", 0.1)]
    runs = []
    for order in (settings, settings[::-1]):
        with tiny.engine() as engine:
            work = evaluate(engine, boats)
            assert list(work.teach(["craft"]))
            work.warm_up([NAIVE])
            runs.append({s: f["recomputed_share"] for s, f in work.measure(work.questions[2], order)})
    assert runs[0] == runs[1] and runs[0][Setting("prefix")] == 1.0
    assert 0 < runs[0][Setting("craft", 0.1)] < runs[0][Setting("craft", 0.3)]


def test_past_requests_are_answered_once_by_each_teacher(boats: QuestionSet, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    with tiny.engine() as engine:
        work = evaluate(engine, boats)
        monkeypatch.setattr(engine, "answer_prompt", lambda prompt, *, strategy, **more: asked.append(strategy))
        left = list(work.teach(["craft", "craft-focus", "set-cache", "naive"]))
        assert list(work.teach(["naive"])) == []
    assert left[-1][0] == left[-1][1] == len(left) and asked == ["craft", "set-cache"] * len(left)


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_repeats_no_sample(boats: QuestionSet) -> None:
    main, sweep = [FULL, NAIVE, Setting("random", 0.15)], [Setting("random", 0.5)]
    calls: list[str] = []
    with tiny.engine() as engine:
        work = evaluate(engine, boats)
        whole = work.measure

        def stopping(question: Question, settings: Sequence[Setting]) -> Any:
            calls.append(question.id)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return whole(question, settings)

        work.measure = stopping  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            measure(work, main, sweep, Samples("quality", {}), Progress(3), swept=1)
        found = measure(work, main, sweep, Samples("quality", {}), Progress(3), swept=1)
    assert calls == ["q0", "q1", "q2", "q2"]
    assert [sorted(q) for q in found] == [sorted(s.key for s in [*main, *sweep]), *[sorted(s.key for s in main)] * 2]


def test_logits_that_are_not_finite_are_an_error(boats: QuestionSet) -> None:
    with tiny.engine() as engine:
        work = evaluate(engine, boats)
        answer = work.ask(work.questions[0], FULL)
    assert answer.scores is not None
    with pytest.raises(ArithmeticError, match="q0 are not finite"):
        evaluation.sample(work.questions[0], replace(answer, scores=answer.scores * np.nan), answer)


def test_names_of_strategies_exist() -> None:
    """The tables by strategy name go with the registry."""
    assert set(all_strategies()) >= evaluation.FUSED
    assert {"naive", "full", "fusion", "blend"} <= set(all_strategies())
