"""Rows that prefill may have beside decoding tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ragjax.schedule.scheduler import READING_S, STRETCH, StepBudget


def test_rows_that_read_more_keys_count_for_more() -> None:
    budget = StepBudget(64, keys=100)
    assert budget.takes(60, [500], [0]) == [60]
    assert budget.takes(60, [500], [100]) == [30]
    assert budget.takes(60, [500], [500]) == [10]


def test_the_oldest_goes_on_whatever_is_left_and_others_share_the_rest() -> None:
    assert StepBudget(8, 100).takes(0, [9, 9], [0, 0]) == [1]
    assert StepBudget(64, 100).takes(60, [20, 500, 3], [0, 100, 0]) == [20, 20]


def test_what_decoding_leaves_grows_with_the_prompts_that_are_computed() -> None:
    budget = StepBudget(64, decode_keys=100)
    assert budget.room(4, 0, 1) == 60
    assert budget.room(4, 0, 3) == 3 * 64 - 4
    assert budget.room(4, 1000, 1) == 60 + (STRETCH - 1) * 10, "a step that reads much takes longer anyway"
    assert budget.room(4, 1000, 2) == 2 * 64 - 4 + (2 * STRETCH - 1) * 10


def test_a_key_costs_decoding_tokens_what_was_measured() -> None:
    assert StepBudget.fitted(0.02, {40: 0.04, 80: 0.08}, 1e-5, 100).decode_keys == 100


@given(st.floats(0.001, 1), st.floats(0, 0.01), st.floats(0.0001, 0.01))
def test_a_fitted_budget_keeps_steps_within_the_stretch_or_pace_of_reading(
    decode_s: float, extra_s: float, row_s: float
) -> None:
    def seconds(rows: int) -> float:
        return decode_s + extra_s + row_s * rows

    tokens = StepBudget.fitted(decode_s, {24: seconds(24), 80: seconds(80)}, 1e-6, 100).tokens
    assert 24 <= tokens <= 80
    most_s = max(STRETCH * decode_s, READING_S)
    assert tokens == 24 or seconds(tokens) <= most_s + 1e-9
    assert tokens == 80 or seconds(tokens + 2) > most_s


def test_steps_that_do_not_grow_take_the_most_rows() -> None:
    assert StepBudget.fitted(0.01, {576: 0.011, 2112: 0.011}, 1e-6, 100).tokens == 2112
