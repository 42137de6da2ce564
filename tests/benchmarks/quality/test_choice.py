"""Options of questions, and what a model finds likeliest, against a float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from benchmarks.quality import choice, dataset
from benchmarks.quality.choice import Choice, choice_of, choices, is_distractor, kind_of
from benchmarks.quality.dataset import Question, QuestionSet
from benchmarks.quality.evaluation import FULL, Evaluation, Setting, Style
from benchmarks.quality.score import normalised
from ragjax.core import ConfigError, Document
from tests.support import tiny
from tests.support.files import write_lines

PASSAGES = (
    Document("1", "Ada Lovelace was born in London in 1815. She wrote to Charles Babbage in 1842.", "Ada Lovelace"),
    Document(
        "2", "On 3 May 1851 the Great Exhibition opened. It closed on 15 October 1851; 12% came twice.", "Fair (1851)"
    ),
)


def question(answer: str, text: str = "Who?", *others: str) -> Question:
    return Question("q", text, (answer, *others), PASSAGES)


# ----------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("answer", "kind"),
    [("1815", "year"), ("3 May 1851", "date"), ("12%", "number"), ("after 1850", "number"), ("Ada Lovelace", "name"),
     ("Roger Martin, 2nd Baronet", "name"),
     ("the Duke of York", "name"), ("a small joint", "phrase"), ("Yes", "truth")],
)  # fmt: skip
def test_kinds(answer: str, kind: str) -> None:
    assert kind_of(answer) == kind


@pytest.mark.parametrize(
    ("text", "answers", "usable"),
    [("The Beatles!", ["the beatles"], False), ("Hector Berlioz", ["Louis-Hector Berlioz"], False),
     ("New York City", ["New York"], False), ("York", ["New York"], False), ("1815", ["10 May 1815"], False),
     ("11 May 1815", ["10 May 1815"], True), ("Paris", ["London", "London, England"], True), ("...", ["x"], False)],
)  # fmt: skip
def test_no_other_name_of_an_answer_is_a_distractor(text: str, answers: list[str], usable: bool) -> None:
    assert is_distractor(text, answers) is usable


def test_candidates_of_the_passages_go_first_and_have_the_form_of_the_answer() -> None:
    pool = ["1999", "2000", "2001", "Oslo", "Charles Babbage"]
    years = choice_of(question("1815", "When?"), pool, 3, 0)
    assert years is not None and set(years.options) == {"1815", "1842", "1851"}
    days = choice_of(question("3 May 1851", "When?"), pool, 2, 0)
    assert days is not None and set(days.options) == {"3 May 1851", "15 October 1851"}
    names = choice_of(question("London", "Where?"), pool, 4, 0)
    assert names is not None and set(names.options) == {"London", "Ada Lovelace", "Fair", "Charles Babbage"}
    for seed in range(8):  # who is asked about is no place
        asked = choice_of(question("London", "Where was Ada Lovelace born?"), pool, 3, seed)
        assert asked is not None and set(asked.options) == {"London", "Fair", "Charles Babbage"}


def test_options_are_distinct_deterministic_and_hold_the_answer_once() -> None:
    answers = ["Oslo", "Rome", "the Rome", "Bern", "1900", "Wien", "a fox", "Yes", "Riga", "rome"]
    asked = tuple(replace(question(a), id=f"q{i}") for i, a in enumerate(answers))
    found = QuestionSet("x", asked, {})
    made = choices(found, 4)
    assert made == choices(found, 4) and made != choices(found, 4, seed=1)
    assert len({c.right for c in made.values()}) > 1, "the right one is not always at the same place"
    for q in asked:
        options = [normalised(o) for o in made[q.id].options]
        assert len(set(options)) == len(options) == (2 if q.answers[0] == "Yes" else 4)
        assert options[made[q.id].right] == normalised(q.answers[0])
        assert options.count(normalised(q.answers[0])) == 1
    for seed in range(8):
        made_of = choice_of(asked[0], ["The Ada Lovelace", "The Fair", "Bern"], 4, seed)
        assert made_of is not None and len({normalised(o) for o in made_of.options}) == 4
    assert choice_of(asked[0], ["Oslo"], 8, 0) is None
    assert set(choices(QuestionSet("x", asked[:1], {}), 8)) == set()


def test_choices_of_a_set_are_kept_and_passages_are_found(tmp_path: Path) -> None:
    path = tmp_path / "text" / "exam" / "questions.jsonl"
    entry = {"id": "e", "question": "Where?", "choices": ["Rome", "Oslo "], "answers": ["B"], "passages": []}
    write_lines(path, [entry])
    with pytest.raises(ConfigError, match="--corpus"):
        dataset.load(tmp_path, "exam")
    found = dataset.load(tmp_path, "exam", lambda text: PASSAGES[:1])
    (asked,) = found.questions
    assert asked.answers == ("Oslo",) and asked.passages == PASSAGES[:1]
    assert choices(found, 4) == {"e": Choice(("Rome", "Oslo"), 1)}
    write_lines(path, [{**entry, "answers": ["C"]}])
    with pytest.raises(ConfigError, match="'C' is neither a choice nor its letter"):
        dataset.load(tmp_path, "exam")


# ----------------------------------------------------------------------------------------- scoring


def test_judging_normalises_by_length() -> None:
    short, long = np.array([-2.0]), np.array([-1.0, -1.5])
    found = choice.judged([short, long], right=1)
    assert (found["accuracy"], found["accuracy_sum"], found["options"]) == (1.0, 0.0, 2)
    assert found["right_p"] == pytest.approx(np.exp(-2.5) / (np.exp(-2) + np.exp(-2.5)))
    with pytest.raises(ArithmeticError, match="not finite"):
        choice.token_scores(np.full((1, 3), np.nan, np.float32), np.zeros(1, np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("setting", [FULL, Setting("naive"), Setting("epic", 0.3), Setting("fusion", 0.3, 2)])
def test_options_are_scored_behind_one_prefill_as_behind_one_each(boats: QuestionSet, setting: Setting) -> None:
    """The held prompt gives each option what a request of its own gives, and the answer stays what it was."""
    with tiny.engine() as engine:
        asked = choices(boats, 3)
        work = Evaluation(engine, boats, 9, tiny.HashedEncoder(), Style(max_tokens=6), choices=asked)
        one = work.questions[1]
        work.prepare(one, [setting])
        plain = work.ask(one, setting, tenant="plain/")
        before = engine.stats()["steps_total"]
        answer, found = work._answered(one, setting)
        assert answer.tokens == plain.tokens and answer.segments == plain.segments
        assert answer.scores is not None and plain.scores is not None and answer.timings.ttft > 0
        np.testing.assert_allclose(answer.scores, plain.scores, atol=1e-4)
        scores = []
        for option in asked[one.id].options:
            tokens = engine.tokenizer.encode(option, special=False, continued=True)
            logits = engine.answer_prompt(
                work.prompt(one, setting.neighbours), strategy=setting.strategy, recompute_ratio=setting.ratio,
                continuation=tokens, max_tokens=1, tenant=option,
            ).scores  # fmt: skip
            assert logits is not None
            oracle = log_softmax(logits.astype(np.float64), axis=-1)
            scores.append(np.array([oracle[i, token] for i, token in enumerate(tokens)]))
        assert found == pytest.approx(choice.judged(scores, asked[one.id].right), abs=1e-4)
        assert engine.stats()["steps_total"] > before  # type: ignore[operator]
