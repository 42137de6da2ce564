"""Which guesses pay, by what past searches say."""

from __future__ import annotations

import pytest

from ragjax.schedule.speculation import LEARNED, Odds


def learned(right: list[bool], left_s: float, searches: int = LEARNED) -> Odds:
    """After as many searches of one early stage; `right` in turn."""
    odds = Odds()
    for number in range(searches):
        odds.note([right[number % len(right)]], [left_s])
    return odds


def test_everything_is_begun_until_enough_is_known() -> None:
    assert Odds().pays(0, 1.0)
    assert learned([False], 0.1, LEARNED - 1).pays(0, 1.0)
    assert not learned([False], 0.1).pays(0, 1.0)
    assert learned([False], 0.1).pays(0, None), "nothing was computed yet"
    assert learned([False], 0.1).pays(1, 1.0), "no search had such a stage"


@pytest.mark.parametrize(
    ("left_s", "compute_s", "pays"),
    [
        (0.1, 0.15, True),  # half of 0.1 gained, half of 0.05 lost
        (0.1, 0.3, False),  # half of 0.1 gained, half of 0.2 lost
        (0.3, 0.2, True),  # it is done before the search ends: nothing to lose
    ],
)
def test_half_of_the_guesses_right(left_s: float, compute_s: float, pays: bool) -> None:
    assert learned([True, False], left_s, 60).pays(0, compute_s) is pays


def test_a_stage_that_is_always_right_pays_and_one_that_is_never_does_not() -> None:
    assert learned([True], 0.01).pays(0, 10.0)
    assert not learned([False], 10.0).pays(0, 1.0)


def test_what_was_long_ago_fades() -> None:
    odds = learned([False], 0.1, 50)
    for _ in range(100):
        odds.note([True], [0.1])
    assert odds.pays(0, 0.5)


def test_stages_count_by_themselves() -> None:
    odds = Odds()
    for _ in range(LEARNED):
        odds.note([False, True], [0.2, 0.1])
    assert not odds.pays(0, 0.3) and odds.pays(1, 0.3)
