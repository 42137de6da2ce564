"""Cache-Craft, Figure 21: short answers by Jaccard similarity, and questions of true or false by accuracy.

The paper: LLaMA-3-8B on single-hop and multi-hop sets; Jaccard similarity with full recomputation's short answers,
and accuracy on 200 statements made from the sets; Cache-Craft is up to 50% above Full-Cache. Here short answers are
asked for by the system message. A statement says that a question's answer is its reference answer (true), or that of
another question (false), in turns; it is answered by the likelier of the first tokens of "True" and "False"
(`accuracy`; `agreement` is that with full attention's choice). At 135M parameters accuracy is near chance: agreement
and the `margin_gap`, the mean distance of log p(True) - log p(False) from full attention's, say more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.plot import Panel, bars
from benchmarks.common.report import Row
from benchmarks.figures.base import Figure, Setup, mean
from benchmarks.quality.dataset import Question, QuestionSet
from benchmarks.quality.evaluation import FULL, NAIVE, Evaluation, Setting, Style

SETS = ("hotpotqa", "squad_xquad_en")
RATIO = 0.3
SETTINGS = (NAIVE, Setting("random", RATIO), Setting("h2o", RATIO), Setting("craft", RATIO))
SHORT = "Use the given passages. Answer with a few words and nothing else."
JUDGE = "Use the given passages. Answer with True or False and nothing else."
WORDS = ("True", "False")
ANSWER = 8
"""Tokens of a short answer."""


def statements(questions: QuestionSet) -> QuestionSet:
    """A statement for each question, true and false in turns; a false one has the next question's other answer."""
    asked = [q for q in questions.questions if q.answers[0].lower() not in ("yes", "no")]
    made = []
    for i, question in enumerate(asked):
        truth = i % 2 == 0
        others = (q.answers[0] for q in (*asked[i + 1 :], *asked[:i]) if q.answers[0] not in question.answers)
        answer = question.answers[0] if truth else next(others)
        text = f'Is it true that the answer to the question "{question.text}" is "{answer}"?'
        made.append(replace(question, text=text, answers=(WORDS[0 if truth else 1],)))
    return replace(questions, questions=tuple(made))


def margin(logits_V: NDArray[np.float32], tokens: Sequence[int]) -> float:
    """Difference log p(True) - log p(False), nats, of the two words' first tokens."""
    return float(logits_V[tokens[0]]) - float(logits_V[tokens[1]])


def judge(work: Evaluation, question: Question) -> dict[Setting, float]:
    """The margin of each setting, full attention's too."""
    encode = work.engine.tokenizer.encode
    tokens = [int(encode(word, special=False, continued=True)[0]) for word in WORDS]
    work.prepare(question, SETTINGS)
    found = {}
    for setting in (FULL, *SETTINGS):
        answer = work.ask(question, setting)
        assert answer.scores is not None
        found[setting] = margin(answer.scores[0], tokens)
    return found


def judged_rows(name: str, truths: Sequence[bool], margins: Sequence[Mapping[Setting, float]]) -> list[Row]:
    """A row for each setting. truths: whether each statement is true. margins: of each statement, by setting."""
    rows: list[Row] = []
    for setting in (FULL, *SETTINGS):
        mine = [found[setting] for found in margins]
        full = [found[FULL] for found in margins]
        right = [float((m > 0) == truth) for m, truth in zip(mine, truths, strict=True)]
        row: dict[str, Any] = {"set": name, "part": "true or false", "strategy": setting.strategy, "n": len(mine)}
        row |= mean(right, "accuracy")
        row |= mean([float((m > 0) == (f > 0)) for m, f in zip(mine, full, strict=True)], "agreement")
        rows.append(row | mean([abs(m - f) for m, f in zip(mine, full, strict=True)], "margin_gap"))
    return rows


def short_rows(name: str, samples: Sequence[Mapping[Setting, Mapping[str, Any]]]) -> list[Row]:
    """A row for each setting, from what `Evaluation.measure` gives."""
    rows: list[Row] = []
    for setting in (FULL, *SETTINGS):
        row: dict[str, Any] = {"set": name, "part": "short", "strategy": setting.strategy, "n": len(samples)}
        for key in ("jaccard_vs_full", "answered", "f1", "kl"):
            row |= mean([float(s[setting][key]) for s in samples], key)
        rows.append(row)
    return rows


def measure(setup: Setup) -> list[Row]:
    """Rows of both parts."""
    rows: list[Row] = []
    names = SETS[:1] if setup.quick else SETS
    with setup.engine() as engine:
        for name in setup.each(names, "set"):
            questions = setup.questions(name)
            work = setup.evaluation(engine, questions, Style(SHORT, ANSWER), whole_corpus=False)
            for _ in work.teach([s.strategy for s in SETTINGS]):
                pass
            rows += short_rows(name, [dict(work.measure(question, SETTINGS)) for question in work.questions])
            work = setup.evaluation(engine, statements(questions), Style(JUDGE, 1), whole_corpus=False)
            for _ in work.teach([s.strategy for s in SETTINGS]):
                pass
            truths = [question.answers[0] == WORDS[0] for question in work.questions]
            rows += judged_rows(name, truths, [judge(work, question) for question in work.questions])
    return rows


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Jaccard, accuracy and agreement, of each set."""
    made = []
    for name in dict.fromkeys(r["set"] for r in rows):
        for part, keys in (("short", ("jaccard_vs_full",)), ("true or false", ("accuracy", "agreement"))):
            mine = [r for r in rows if r["set"] == name and r["part"] == part]
            made += [bars(mine, f"{name}: {part}", key) for key in keys]
    return [panel for panel in made if panel is not None]


FIGURE = Figure(
    paper="Cache-Craft, Figure 21",
    shows="short answers and statements of true or false, 30% recomputed",
    differs="SmolLM2-135M, near chance on statements; statements made of questions and answers, judged by likelihood",
    measure=measure,
    panels=panels,
    columns=("set", "part", "strategy", "n", "jaccard_vs_full", "jaccard_vs_full_lo", "jaccard_vs_full_hi", "kl",
             "accuracy", "accuracy_lo", "accuracy_hi", "agreement", "margin_gap"),
    limit=30,
)  # fmt: skip
