"""Rows of the figures, from inputs whose figures are known by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from benchmarks.figures import (
    cachecraft_8,
    cachecraft_12,
    cachecraft_16,
    cachecraft_21,
    cachecraft_25,
    cachecraft_26,
    cachecraft_27,
    fusionrag_3,
    fusionrag_7a,
    fusionrag_13,
    fusionrag_14a,
    observe,
)
from benchmarks.quality.dataset import Question, QuestionSet
from benchmarks.quality.evaluation import FULL, NAIVE
from ragjax.core import Chunk, Document
from ragjax.reuse.influence import Influence
from tests.support import tiny

# ---------------------------------------------------------------------------------------- FusionRAG


def test_what_an_oracle_leaves_of_the_deviation() -> None:
    deviation_N = np.array([1.0, 6.0, 0.0, 3.0])
    assert fusionrag_3.left(deviation_N, (0.0, 0.25, 0.26, 0.5, 1.0)) == pytest.approx([1, 0.4, 0.1, 0.1, 0])


def test_the_deviation_is_that_of_the_second_layer() -> None:
    exact = np.zeros((3, 2, 1, 2), np.float32)
    other = exact.copy()
    other[1, 1, 0] = (3, 4)
    other[2, 0, 0] = 9
    assert fusionrag_3.deviations(exact, other).tolist() == [0, 25]


def test_places_of_the_deviation() -> None:
    prompt = tiny.prompt(chunks=(20, 40))
    deviation_N = np.zeros(60)
    deviation_N[:2] = 3.0  # the first tenth of the first chunk
    within, among = fusionrag_3.places(prompt, deviation_N)
    # a tenth has 2 + 4 tokens of mean 1, all 60 have mean 0.1; two chunks fill the first and the sixth tenth
    assert within == pytest.approx([10] + [0] * 9)
    assert among[0] == pytest.approx(3.0) and among[5] == 0 and math.isnan(among[1])
    shown = fusionrag_3.example(prompt, deviation_N)
    assert shown["begins"] == [0, 20] and shown["tokens"] == [0.75, *[0.0] * 6]


def test_other_chunks_of_a_question_among_the_nearest() -> None:
    nearest = [["x", "b"], ["a", "c"], ["x", "y"]]
    assert fusionrag_7a.found(["a", "b", "c"], nearest, 1) == pytest.approx((1 / 3, 1 / 6))
    assert fusionrag_7a.found(["a", "b", "c"], nearest, 2) == pytest.approx((2 / 3, 3 / 6))


def test_the_chance_of_a_random_neighbour() -> None:
    assert fusionrag_7a.chance(11, 3, 1) == pytest.approx(0.2)
    assert fusionrag_7a.chance(11, 3, 2) == pytest.approx(1 - 8 / 10 * 7 / 9)
    assert fusionrag_7a.chance(11, 3, 10) == 1.0


def test_times_are_medians_and_ratios_those_of_a_run() -> None:
    full, half = fusionrag_14a.CASES[0], fusionrag_14a.CASES[1]
    found = {full: [100.0, 200.0, 300.0], half: [50.0, 50.0, 300.0]}
    samples = {case: [{"ttft_ms": t, "load_ms": 5.0} for t in times] for case, times in found.items()}
    _, row = fusionrag_14a.rows_of(samples)
    assert (row["ttft_ms"], row["slowest_ms"], row["faster_than_full"], row["load_ms"]) == (50, 300, 2, 5)


def test_normalised_f1_is_drawn_where_full_reuse_loses_some() -> None:
    def row(name: str, strategy: str, high: float | None) -> dict[str, Any]:
        same = {"part": "sweep", "f1": 0.5, "em": 0.1, "kl": 0.2, "normalised_f1": 0.5}
        return {"set": name, "strategy": strategy, "ratio": 0.1, "f1_minus_full_hi": high, **same}

    rows = [row("a", "naive", -0.01), row("b", "naive", 0.01), row("c", "naive", None)]
    assert fusionrag_13.loses(rows) == {"a"}
    rows += [row(name, "blend", 0.0) | {"ratio": ratio} for name in "ab" for ratio in (0.1, 0.2)]
    assert len(fusionrag_13.panels(rows)) == 1 + 2 * 3


# --------------------------------------------------------------------------------------- Cache-Craft


def test_how_far_values_moved() -> None:
    base = np.full((2, 1, 1, 4), 2.0, np.float32)
    values = base.copy()
    values[1, 0, 0, 0] = 6.0
    assert observe.moved(values, base) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("past", "fewest"),
    [(["abc"], 1), (["ab", "bc", "xx"], 2), (["a", "b", "cx"], 3), (["ab", "b"], None), ([], None)],
)
def test_the_fewest_past_requests(past: list[str], fewest: int | None) -> None:
    assert cachecraft_8.fewest(frozenset("abc"), [frozenset(p) for p in past]) == fewest


def test_only_earlier_requests_are_sources() -> None:
    found = cachecraft_8.sources(["ab", "bc", "ac", "ca"])
    assert found == [None, None, 2, 1]
    rows = cachecraft_8.sources_rows("s", found)
    assert [r["share"] for r in rows] == [0.5, 0.5, 0, 0, 0] and rows[0]["n"] == 2 and rows[0]["requests"] == 4


def chunk(name: str) -> Chunk:
    return Chunk(name, name, "", name, np.zeros(1, np.int32))


def test_past_requests_hold_one_run_each() -> None:
    own = [chunk(c) for c in "abcde"]
    random = np.random.default_rng(0)
    made = list(cachecraft_8.past_requests(own, iter([chunk(str(i)) for i in range(99)]), 3, random))
    names = [[c.id for c in request] for request in made]
    kept = [[n for n in request if n in "abcde"] for request in names]
    assert kept == [["a", "b"], ["c", "d"], ["e"]] and all(len(request) == 5 for request in names)
    assert all(request[0] not in "abcde" for request in names)  # something foreign stands before each run
    others = [n for request in names for n in request if n not in "abcde"]
    assert len(set(others)) == len(others) == 10
    assert [[c.id for c in r] for r in cachecraft_8.past_requests(own, iter([]), 1, random)] == [list("abcde")]


def influence(score: list[float]) -> Influence:
    total = float(np.sum(score))
    return Influence(
        before=(b"x" * 16,),
        lengths=(4,),
        inter_LZ=np.full((2, 1), total, np.float32),
        intra_L=np.full(2, total, np.float32),
        score_T=np.array(score, np.float32),
    )


def test_tokens_that_carry_cci() -> None:
    found = cachecraft_12.carried(influence([1.0, 6.0, 0.0, 1.0]), (0.25, 0.5, 1.0))
    assert [part for part, _ in found] == pytest.approx([0.75, 0.875, 1.0])
    # a = total / (4 * 4), b = total / 4^2, so a / b = 1 with all tokens; a quarter of it without the first
    assert found[0][1] == pytest.approx(1 / (1 + math.exp(-0.25))) and found[2][1] == 0.5


def test_trials_in_groups_of_equal_size() -> None:
    rows = cachecraft_12.binned("s", "cci", [4.0, 1.0, 2.0, 3.0], [40.0, 10.0, 20.0, 30.0], bins=2)
    assert [(r["x"], r["deviation"], r["n"]) for r in rows] == [(1.5, 15, 2), (3.5, 35, 2)]
    assert rows[0]["correlation"] == pytest.approx(1.0)
    alike = cachecraft_12.binned("s", "gamma", [0.0, 0.0, 0.0, 1.0], [1.0, 2.0, 3.0, 4.0], bins=2)
    assert [(r["x"], r["n"]) for r in alike] == [(0.25, 4)]


def test_old_prefixes_replace_or_reorder() -> None:
    own, foreign = [chunk(c) for c in "abcd"], [chunk(c) for c in "wxyz"]
    made = ["".join(c.id for c in prefix) for prefix in cachecraft_12.prefixes(own, foreign, 0)]
    assert [sum(c in "wxyz" for c in prefix) for prefix in made[:4]] == [1, 2, 3, 4] and made[3] == "wxyz"
    assert all(sorted(prefix) == list("abcd") for prefix in made[4:]) and len(made) == 4 + cachecraft_12.ORDERS


def test_focus_of_a_question() -> None:
    inter_LZ = np.tile(np.array([9.0, 1.0, 1.0, 0.9]), (5, 1))
    found = cachecraft_16.sample(inter_LZ, [10, 10, 10, 10])
    # sorted scores have the gaps 8, 0 and 0.1: the last adds most entropy of the later ones, so two are in focus
    assert (found["layer"], found["found"], found["in_focus"], found["settled"]) == (3, 1.0, 2, 1.0)
    assert found["spared"] == pytest.approx(0.5 * 2 / 5)
    swapping = np.array([[9.0, 1, 1, 0.9], [0, 99, 1, 0.9]] * 3) * (1000.0 ** np.arange(6))[:, None]
    lost = cachecraft_16.sample(swapping, [10, 10, 10, 10])
    assert (lost["layer"], lost["found"], lost["in_focus"], lost["spared"]) == (6, 0.0, 4, 0.0)


def test_rows_of_the_focus() -> None:
    samples = [
        {"layer": layer, "found": found, "in_focus": 2, "spared": 0.5, "settled": 1.0}
        for layer, found in ((3, 1.0), (4, 1.0), (6, 0.0))
    ]
    rows = cachecraft_16.rows_of("s", samples, np.array([[1.0, 3.0], [1.0, 0.0]]))
    assert rows[0]["layer"] == pytest.approx(13 / 3)
    assert [r["known"] for r in rows if r["part"] == "layer"] == [0.0, 0.0]  # of two layers
    assert [r["by_layer"] for r in rows if r["part"] == "chunk"] == [[0.25, 0.4], [0.75, 0.6]]


def questions(*answers: str) -> QuestionSet:
    passages = tuple(Document(f"p{i}", f"text {i}", f"t{i}") for i in range(3))
    asked = tuple(Question(f"q{i}", f"What {i}?", (a,), passages) for i, a in enumerate(answers))
    return QuestionSet("s", asked, {p.id: p for p in passages})


def test_statements_are_true_and_false_in_turns() -> None:
    made = cachecraft_21.statements(questions("red", "blue", "yes", "blue", "green")).questions
    assert [q.answers[0] for q in made] == ["True", "False", "True", "False"]
    told = [q.text.rsplit('is "', 1)[1] for q in made]
    assert told == ['red"?', 'green"?', 'blue"?', 'red"?']  # never one of its own answers


def test_accuracy_and_agreement_of_statements() -> None:
    low, high = {s: -1.0 for s in cachecraft_21.SETTINGS}, {s: 2.0 for s in cachecraft_21.SETTINGS}
    rows = cachecraft_21.judged_rows("s", [True, False], [{FULL: 1.0, **low}, {FULL: 1.0, **high}])
    full, naive = rows[0], rows[1]
    assert (full["accuracy"], full["agreement"], full["margin_gap"]) == (0.5, 1.0, 0.0)
    assert (naive["strategy"], naive["accuracy"], naive["agreement"], naive["margin_gap"]) == ("naive", 0.0, 0.5, 1.5)
    assert cachecraft_21.margin(np.array([1.0, 5.0, 3.0], np.float32), (1, 2)) == 2.0


def test_chunks_by_their_variants() -> None:
    rows = cachecraft_25.rows_of([1, 0, 3], [2, 1, 5], {"n": 9})
    assert [(r["rank"], r["variants"], r["requests"]) for r in rows] == [(1, 3, 5), (2, 1, 2)]
    assert (rows[0]["kept"], rows[0]["chunks"], rows[0]["retrieved"], rows[0]["n"]) == (4, 2, 3, 9)
    assert cachecraft_25.rows_of([], [], {}) == []


def test_rows_of_the_design() -> None:
    keys = dict.fromkeys(cachecraft_26.KEYS, 0.25)
    samples: list[dict[Any, Any]] = [{("design", 1.0): keys}, {("design", 1.0): keys | {"kl": 0.75}}]
    (row,) = cachecraft_26.rows_of("s", samples)
    assert (row["design"], row["alpha"], row["kl"], row["recomputed_share"], row["n"]) == ("design", 1.0, 0.5, 0.25, 2)


def test_larger_chunks_hold_the_same_text() -> None:
    passages = [Document(f"p{i}", f"text {i}", f"t{i}" if i else "") for i in range(5)]
    made = list(cachecraft_27.joined(passages, 2))
    assert [d.text for d in made] == ["text 0\nt1: text 1\nt2: text 2", "t3: text 3\nt4: text 4"]
    assert [d.id for d in made] == ["p0+p1+p2", "p3+p4"]


def test_questions_with_too_few_passages_are_left_out() -> None:
    few = questions("a", "b")
    whole = tuple(Document(f"d{i}", f"text {i}", "") for i in range(20))
    many = QuestionSet("s", (*few.questions, *(Question(f"r{i}", "?", ("a",), whole) for i in range(3))), {})
    made = cachecraft_27.shaped(many, 10, 5, 2)
    assert [q.id for q in made.questions] == ["r0", "r1"]
    assert [p.id for p in made.questions[0].passages] == [f"d{i}+d{i + 1}" for i in range(0, 10, 2)]
    assert set(made.corpus) == {p.id for p in made.questions[0].passages}


def test_rows_of_lengths() -> None:
    samples: list[dict[Any, dict[str, Any]]] = [
        {s: dict.fromkeys(cachecraft_27.KEYS, i + (s == NAIVE)) for s in cachecraft_27.SETTINGS} for i in (1, 2)
    ]
    rows = cachecraft_27.rows_of("s", "more", 5, samples)
    assert [(r["strategy"], r["kl"]) for r in rows] == [("naive", 2.5), ("craft", 1.5), ("craft-focus", 1.5)]
