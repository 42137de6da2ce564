"""Prompt lookup: what is proposed, how much, and that answers stay the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragjax.core import Tokens
from ragjax.schedule.lookup import RETRY, Lookup, propose


def slowly(tokens: list[int], most: int) -> list[int]:
    """The rule in the fewest words."""
    for size in (3, 2):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[-size:]:
                following = tokens[begin + size :]
                return [following[i % len(following)] for i in range(most)]
    return []


@given(st.lists(st.integers(0, 4), max_size=40), st.integers(0, 7))
def test_the_tokens_behind_the_last_place_that_ends_alike(tokens: list[int], most: int) -> None:
    found: Tokens = propose(np.array(tokens, np.int32), most)
    assert found.tolist() == (slowly(tokens, most) if most else [])


def test_what_repeats_itself_is_taken_to_go_on_so() -> None:
    assert propose(np.array([5, 1, 2, 1, 2, 1], np.int32), 5).tolist() == [2, 1, 2, 1, 2]
    assert propose(np.array([4, 4, 4], np.int32), 3).tolist() == [4, 4, 4]


def test_a_longer_match_wins_over_a_later_one() -> None:
    tokens = np.array([1, 2, 3, 7, 7, 9, 2, 3, 8, 1, 2, 3], np.int32)
    assert propose(tokens, 2).tolist() == [7, 7]


def test_proposals_stop_where_they_fail_and_are_tried_again() -> None:
    lookup = Lookup(6)
    assert lookup.size() == 6
    while lookup.size():
        lookup.note(6, 0)
    assert lookup.share < 0.15
    later = [lookup.size() for _ in range(2 * RETRY)]
    assert sum(size > 0 for size in later) == 2
    for _ in range(20):
        lookup.note(3, 3)
    assert lookup.size() == 6


@pytest.mark.parametrize("proposed", [0, 4])
def test_counts(proposed: int) -> None:
    lookup = Lookup(6)
    lookup.note(proposed, proposed // 2)
    assert (lookup.steps, lookup.proposed, lookup.accepted) == (1, proposed, proposed // 2)
