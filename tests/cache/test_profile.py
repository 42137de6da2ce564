"""The cost profile: interpolation, its edges, and the file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragjax.cache.profile import Profile

GRID = Profile((0, 100, 300), (10, 200, 400), ((1.0, 2.0, 5.0), (1.5, 3.0, 6.0), (2.0, 4.0, 9.0)), "a laptop")


def test_measured_points_come_back_as_they_are():
    for i, cached in enumerate(GRID.cached):
        for j, new in enumerate(GRID.new):
            assert GRID.cost(cached, new) == pytest.approx(GRID.seconds[i][j])


def test_between_them_it_is_bilinear():
    # cached 150 of 100 to 300: a quarter. At 200 new 3 + ¼ = 3.25, at 400 new 6 + ¾ = 6.75; halfway 5
    assert GRID.cost(150, 300) == pytest.approx(5.0)


@given(st.integers(0, 5000), st.integers(1, 5000))
def test_a_cost_that_is_bilinear_is_found_everywhere(cached, new):
    def truth(c, n):
        return 0.25 + 0.5 * n + 0.125 * c + 0.01 * c * n

    profile = Profile((0, 64, 256), (1, 32, 128), tuple(tuple(truth(c, n) for n in (1, 32, 128)) for c in (0, 64, 256)))
    assert profile.cost(cached, new) == pytest.approx(truth(cached, new))


def test_outside_lines_go_on_but_never_below_the_edge():
    assert GRID.cost(0, 600) == pytest.approx(5.0 + 3.0)
    assert GRID.cost(500, 10) == pytest.approx(2.5)
    falling = Profile((0, 100), (10, 20), ((2.0, 1.0), (2.0, 1.0)))
    assert falling.cost(0, 1000) == pytest.approx(1.0)
    steep = Profile((0, 100), (10, 20), ((1.0, 9.0), (1.0, 9.0)))
    assert steep.cost(0, 5) == pytest.approx(0.5)
    assert GRID.cost(0, 0) == 0.0


@given(st.integers(0, 2000), st.integers(1, 2000))
def test_it_is_positive_and_without_jumps(cached, new):
    cost = GRID.cost(cached, new)
    assert cost > 0
    assert abs(GRID.cost(cached + 1, new) - cost) < 0.2
    assert abs(GRID.cost(cached, new + 1) - cost) < 0.2
