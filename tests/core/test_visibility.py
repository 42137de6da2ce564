"""`Visibility` against the predicate it stands for, token pair by token pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.core import Kind, Prompt, Segment, Visibility, VisibilityError

S, C, J = Kind.SYSTEM, Kind.CHUNK, Kind.QUERY


def prompt_of(*kinds_and_lengths: tuple[Kind, int]) -> Prompt:
    return Prompt(tuple(Segment(f"s{i}", kind, np.zeros(n, np.int32)) for i, (kind, n) in enumerate(kinds_and_lengths)))


def may_see(prompt: Prompt, row: int, key: int) -> bool:
    """A token of segment `row` depends on segment `key`: itself, and before it all for joins, systems for chunks."""
    if key >= row:
        return key == row
    if prompt.segments[row].kind is Kind.CHUNK:
        return prompt.segments[key].kind is Kind.SYSTEM
    return True


def segment_of(prompt: Prompt) -> list[int]:
    return [i for i, s in enumerate(prompt.segments) for _ in s.tokens]


def wrong_pairs(prompt: Prompt, visibility: Visibility, rows: list[int]) -> list[tuple[int, int]]:
    """Token pairs of the pass on which the interval form and the predicate differ."""
    owner = segment_of(prompt)
    wrong = []
    for q in (q for q in range(len(owner)) if owner[q] in rows):
        for k in range(len(owner)):
            hide_from, hide_until = visibility.hidden[owner[k]]
            says = k <= q and not (hide_from <= q < hide_until)
            if says != (k <= q and may_see(prompt, owner[q], owner[k])):
                wrong.append((q, k))
    return wrong


def sayable(prompt: Prompt, rows: list[int]) -> bool:
    """Whether, for each key, the rows it is hidden from are one run among the pass's rows that come after it."""
    for key in range(len(prompt.segments)):
        hidden = [not may_see(prompt, row, key) for row in sorted(rows) if row > key]
        changes = sum(a != b for a, b in zip([False, *hidden], [*hidden, False], strict=True))
        if changes > 2:
            return False
    return True


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Prompt, list[int] | None]:
    parts = draw(st.lists(st.tuples(st.sampled_from([S, C, C, J]), st.integers(1, 3)), min_size=1, max_size=8))
    indices = st.lists(st.integers(0, len(parts) - 1), unique=True)
    return prompt_of(*parts), draw(st.none() | indices)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(prompts())
def test_isolated_is_the_predicate_or_an_error(drawn: tuple[Prompt, list[int] | None]) -> None:
    prompt, rows = drawn
    in_pass = list(range(len(prompt.segments))) if rows is None else rows
    if not sayable(prompt, in_pass):
        with pytest.raises(VisibilityError, match="separate passes"):
            Visibility.isolated(prompt, rows)
        return
    visibility = Visibility.isolated(prompt, rows)
    assert len(visibility.hidden) == len(prompt.segments)
    assert wrong_pairs(prompt, visibility, in_pass) == []


TWO_TURNS = ((S, 3), (C, 4), (C, 2), (J, 5), (C, 2), (C, 3), (J, 4))


def test_two_turns_at_once_cannot_be_said() -> None:
    prompt = prompt_of(*TWO_TURNS)
    with pytest.raises(VisibilityError, match="'s1'"):
        Visibility.isolated(prompt)
    with pytest.raises(VisibilityError):
        Visibility.isolated(prompt, rows=[2, 3, 4])
    for rows in ([0, 1, 2, 3], [4, 5, 6], [1, 2, 4, 5], [3, 6], []):
        assert wrong_pairs(prompt, Visibility.isolated(prompt, rows), rows) == []


def test_generated_tokens_see_everything() -> None:
    """Rows behind the prompt are those of an answer, also where a chunk comes last."""
    for parts in (((S, 2), (C, 3), (C, 2), (J, 3)), ((S, 2), (C, 3), (C, 2))):
        prompt = prompt_of(*parts)
        for hide_from, hide_until in Visibility.isolated(prompt).hidden:
            assert not any(hide_from <= q < hide_until for q in range(len(prompt), len(prompt) + 20))


@pytest.mark.parametrize("shift", [(0, 1), (0, -1), (1, 0), (-1, 0)])
def test_an_interval_off_by_one_is_found(shift: tuple[int, int]) -> None:
    prompt = prompt_of((S, 3), (C, 4), (C, 2), (J, 5))
    hidden = list(Visibility.isolated(prompt).hidden)
    hidden[1] = (hidden[1][0] + shift[0], hidden[1][1] + shift[1])
    assert wrong_pairs(prompt, Visibility(tuple(hidden)), [0, 1, 2, 3])
