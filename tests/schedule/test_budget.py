"""Rows that prefill may have beside decoding tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragjax.schedule.budget import STRETCH, StepBudget


def test_rows_that_read_more_keys_count_for_more() -> None:
    budget = StepBudget(64, keys=100)
    assert budget.takes(4, [500], [0]) == [60]
    assert budget.takes(4, [500], [100]) == [30]
    assert budget.takes(4, [500], [500]) == [10]


def test_the_oldest_goes_on_whatever_is_left_and_others_share_the_rest() -> None:
    assert StepBudget(8, 100).takes(8, [9, 9], [0, 0]) == [1]
    assert StepBudget(64, 100).takes(4, [20, 500, 3], [0, 100, 0]) == [20, 20]


@given(st.floats(0.001, 1), st.floats(0, 0.01), st.floats(0.0001, 0.01))
def test_a_fitted_budget_keeps_steps_within_the_stretch(decode_s: float, extra_s: float, row_s: float) -> None:
    def seconds(rows: int) -> float:
        return decode_s + extra_s + row_s * rows

    tokens = StepBudget.fitted(decode_s, {24: seconds(24), 80: seconds(80)}, 100).tokens
    assert 24 <= tokens <= 80
    assert tokens == 24 or seconds(tokens) <= STRETCH * decode_s + 1e-9
    assert tokens == 80 or seconds(tokens + 2) > STRETCH * decode_s


def test_steps_that_do_not_grow_take_the_most_rows() -> None:
    assert StepBudget.fitted(0.01, {576: 0.011, 2112: 0.011}, 100).tokens == 2112
