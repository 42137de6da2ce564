"""When a pass may begin while its KV arrives: the paper's example, and any times of computing and loading."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragjax.schedule.rows import Carried
from ragjax.schedule.scheduler import depth, reach

times = st.floats(0.01, 100.0)


@pytest.mark.parametrize(("prefill", "load", "expected"), [(1, 2, 3), (1, 1, 1), (2, 1, 1), (1, 1000, 5), (3, 4, 2)])
def test_the_depth_of_five_stages(prefill: float, load: float, expected: int) -> None:
    """1:2 is the paper's Fig. 19."""
    assert depth(5, prefill, load) == expected


def play(arrivals: list[float], prefill: float, lead: int) -> list[tuple[int, float, float]]:
    """A pass by a clock: (stage, begin, end) of each, as soon as it may run. arrivals: when each stage is there."""
    stages, now, done = len(arrivals), 0.0, []
    while len(done) < stages:
        there = sum(at <= now for at in arrivals)
        stop = reach(len(done), stages, there, lead, stages)
        if stop == len(done):
            now = min(at for at in arrivals if at > now)
            continue
        for stage in range(len(done), stop):
            assert arrivals[stage] <= now  # what has not arrived is never read
            done.append((stage, now, now + prefill / stages))
            now += prefill / stages
    return done


def evenly(stages: int, load: float) -> list[float]:
    return [load * (i + 1) / stages for i in range(stages)]


@pytest.mark.parametrize(("prefill", "load"), [(1.0, 2.0), (1.0, 1.0), (2.0, 1.0), (1.0, 4.0)])
def test_the_paper_s_example_has_no_gap(prefill: float, load: float) -> None:
    lead = depth(5, prefill, load)
    done = play(evenly(5, load), prefill, lead)
    assert [stage for stage, *_ in done] == [*range(5)]
    assert all(end == pytest.approx(begin) for (*_, end), (_, begin, _) in pairwise(done))
    if lead > 1:  # one stage less, and there is a gap
        hasty = play(evenly(5, load), prefill, lead - 1)
        assert any(begin > end + 1e-9 for (*_, end), (_, begin, _) in pairwise(hasty))


@given(st.lists(times, min_size=1, max_size=12), times, times, times)
def test_it_never_ends_later_than_a_pass_that_waits(
    gaps: list[float], prefill: float, expected_prefill: float, expected_load: float
) -> None:
    """Whatever is predicted, and however unevenly stages arrive."""
    arrivals = np.cumsum(gaps).tolist()
    done = play(arrivals, prefill, depth(len(arrivals), expected_prefill, expected_load))
    assert done[-1][2] <= (arrivals[-1] + prefill) * (1 + 1e-9)


@given(st.integers(1, 12), times, times)
def test_as_predicted_no_stage_is_waited_for(stages: int, prefill: float, load: float) -> None:
    done = play(evenly(stages, load), prefill, depth(stages, prefill, load))
    longest = max((begin - end for (*_, end), (_, begin, _) in pairwise(done)), default=0.0)
    assert longest <= 1e-6 * (prefill + load) if prefill <= load else longest <= load


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 8))
def test_a_range_of_stages_stops_within_it(first: int, lead: int, arrived: int) -> None:
    stop = reach(first, first + 2, min(arrived, 8), lead, 8)
    assert first <= stop <= first + 2
    assert stop == first or stop <= arrived


def test_only_the_first_stage_waits_for_later_ones() -> None:
    assert [reach(0, 5, arrived, 3, 5) for arrived in range(6)] == [0, 0, 0, 3, 4, 5]
    assert [reach(3, 5, arrived, 3, 5) for arrived in range(3, 6)] == [3, 4, 5]


# ------------------------------------------------------------------------------------------- residuals


class Rows:
    """What a step left: row i holds i and its step's number."""

    def __init__(self, number: int, rows: int = 8):
        self.x_TE = np.stack([np.arange(rows), np.full(rows, number)], 1).astype(np.float32)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.x_TE)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        self.reads += 1
        return self.x_TE


def test_rows_that_stay_in_their_places_are_not_read() -> None:
    one, other = Rows(0), Rows(1)
    carried = Carried((one, other), np.array([0, 0, 0, 1, 1], np.int32), np.array([2, 3, 4, 2, 3], np.int32))
    assert carried.at(0, 3, 2) is one and carried.at(3, 5, 2) is other and carried.at(1, 3, 3) is one
    assert carried.at(0, 3, 0) is None and carried.at(2, 4, 4) is None
    assert carried.pick(np.array([0, 2], np.int32)).at(0, 2, 2) is None
    assert one.reads == other.reads == 0
    assert carried.read(1, 5).tolist() == [[3, 0], [4, 0], [2, 1], [3, 1]]
    assert carried.pick(np.array([4, 0], np.int32)).read(0, 2).tolist() == [[3, 1], [2, 0]]
