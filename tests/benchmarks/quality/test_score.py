"""Scores against known values, intervals against arithmetic done by hand."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.quality import score


@pytest.mark.parametrize(
    ("text", "references", "em", "f1"),
    [
        ("The Queen, Clarisse!", ["queen clarisse"], 1.0, 1.0),
        ("It is Paris.", ["Paris", "London"], 0.0, 0.5),
        ("yes", ["no"], 0.0, 0.0),
        ("", ["a"], 1.0, 0.0),
        ("one one two", ["one two two"], 0.0, 2 / 3),
    ],
)
def test_em_and_f1_are_squads(text: str, references: list[str], em: float, f1: float) -> None:
    assert score.exact_match(text, references) == em
    assert score.f1(text, references) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("text", "reference", "value"),  # by google-research's rouge-score 0.1.2, without stemming
    [
        ("The cat sat on the mat.", "A cat, sat down on that mat!", 0.6153846153846153),
        ("", "x", 0.0),
        ("Queen dowager Clarisse Renaldi", "The actress plays Queen Clarisse Renaldi in it.", 0.5),
        ("é1-2 b", "1 2 B c", 0.8571428571428571),
        ("x", "x", 1.0),
    ],
)
def test_rouge_l_is_googles(text: str, reference: str, value: float) -> None:
    assert score.rouge_l(text, ["unlike", reference]) == pytest.approx(value, abs=1e-12)


def test_jaccard_and_answered() -> None:
    assert score.jaccard("The red fox", "a red dog") == pytest.approx(1 / 3)
    assert score.jaccard("", "the") == 1.0
    assert score.answered("It was built in New York City.", ["new york"]) == 1.0
    assert score.answered("It was built in Newyork.", ["York"]) == 0.0


def test_grounded_is_the_share_of_words_that_a_passage_has() -> None:
    assert score.grounded("The ferry leaves at ten!", ["A Ferry. It leaves...", "at nine"]) == 0.75
    assert score.grounded("the", ["x"]) == 0.0


def test_bootstrap_pairs_figures_and_keeps_the_sets_in_proportion() -> None:
    base = np.arange(40.0)
    paired = score.Bootstrap(["s"] * 40).difference(base + 1, base)
    assert (paired.value, paired.lo, paired.hi) == (1.0, 1.0, 1.0)
    by_set = score.Bootstrap(["a"] * 5 + ["b"] * 15).mean([0.0] * 5 + [1.0] * 15)
    assert (by_set.value, by_set.lo, by_set.hi) == (0.75, 0.75, 0.75)
    noisy = np.random.default_rng(1).normal(size=400)
    mean = score.Bootstrap(["s"] * 400).mean(noisy)
    expected = 1.96 * noisy.std() / 20
    assert mean.lo is not None and mean.hi is not None
    assert mean.hi - mean.lo == pytest.approx(2 * expected, rel=0.1)


def test_normalised_f1_is_a_ratio_of_sums_and_says_where_it_is_undefined() -> None:
    bootstrap = score.Bootstrap(["s"] * 4)
    found, note = score.normalised_f1(bootstrap, [0.5, 0.5, 1, 1], [1.0, 1, 1, 1], [0.5, 0, 0.5, 1])
    assert found.value == pytest.approx(0.5) and note is None
    nothing = score.Estimate(None, None, None)
    assert score.normalised_f1(bootstrap, [1.0] * 4, [0.2] * 4, [0.4] * 4) == (
        nothing,
        "full - naive F1 -0.200 [-0.200, -0.200]",
    )
    close = score.normalised_f1(bootstrap, [0, 1.0, 0, 0], [1.0, 0, 0.3, 0], [0, 1.0, 0, 0])
    assert close[0] == nothing and close[1] is not None and close[1].startswith("full - naive F1 0.075 [-0.")
