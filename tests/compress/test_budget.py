"""Budgets of cells by layer: sums, shares by preference and windows that are always kept."""

from __future__ import annotations

import numpy as np
import pytest

from ragjax.compress import SCORERS, budget
from ragjax.compress.choose import quota
from ragjax.core.compression import Compression, GraphKV


@pytest.mark.parametrize("layers", [1, 2, 7, 30, 32])
@pytest.mark.parametrize(("size", "window"), [(64, 32), (128, 32), (33, 32), (512, 8), (100, 1)])
@pytest.mark.parametrize("count", [101, 129, 150, 600, 4096])
def test_budgets_sum_to_layers_times_the_budget(layers: int, size: int, window: int, count: int) -> None:
    rng = np.random.default_rng(layers * count + size)
    for preference in (rng.random(layers), rng.random(layers) ** 8, np.eye(layers)[0], np.ones(layers)):
        for name, scorer in SCORERS.items():
            kept = scorer.budgets(layers, size, window, count, preference.astype(np.float32))
            assert kept.dtype == np.int32 and kept.shape == (layers,)
            assert kept.sum() == layers * min(size, count), name
            assert kept.max() <= count and (kept >= min(window, count)).all(), name


def test_a_pyramid_falls_linearly_from_its_base_to_a_twentieth() -> None:
    """With x = 480 beside the window: 24 in the last layer, 936 in the first (PyramidKV's min_num and max_num)."""
    kept = budget.pyramid(32, 512, 32, 8000, 20.0)
    assert (kept[0] - 32, kept[-1] - 32) == (936, 24)
    steps = np.diff(kept)
    assert (steps < 0).all() and np.ptp(steps) <= 1


def test_a_pyramid_wider_than_the_prompt_becomes_flatter() -> None:
    kept = budget.pyramid(4, 100, 20, 130, 20.0)
    assert kept.tolist() == [130, 110, 90, 70]


def test_proportional_budgets_follow_preferences() -> None:
    kept = budget.proportional(np.array([1, 2, 3, 2], np.float32), 72, 32, 1000)
    assert (kept - 32).tolist() == [20, 40, 60, 40]


def test_what_a_layer_cannot_keep_is_spread_equally() -> None:
    """160 in all: 130 is cut to 100, and 30 go to the others in three equal parts."""
    kept = budget.proportional(np.array([13, 1, 1, 1], np.float32), 72, 32, 132)
    assert (kept - 32).tolist() == [100, 20, 20, 20]


def test_spreading_goes_on_while_others_overflow() -> None:
    kept = budget.fit(np.array([200.0, 95.0, 5.0]), 300, 110)
    assert kept.tolist() == [110, 110, 80]


@pytest.mark.parametrize("preference", [[0, 0, 0], [1, np.nan, 1], [1, np.inf, 1], [1, -1, 1]])
def test_preferences_that_say_nothing_make_budgets_equal(preference: list[float]) -> None:
    assert budget.proportional(np.array(preference, np.float32), 64, 32, 1000).tolist() == [64] * 3


def test_remainders_go_to_the_largest_and_then_the_lower() -> None:
    assert budget.fit(np.array([1.5, 2.2, 3.5, 2.8]), 10, 9).tolist() == [2, 2, 3, 3]


def test_more_than_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="2 layers of 4 tokens cannot keep 9"):
        budget.fit(np.array([5.0, 4.0]), 9, 4)


def test_cake_needs_preferences() -> None:
    with pytest.raises(ValueError, match="preferences"):
        quota(Compression("cake", 64), SCORERS["cake"], 4, 1000)


@pytest.mark.parametrize("method", [m for m in SCORERS if m != "cake"])
def test_a_quota_has_recent_tokens_and_sources(method: str) -> None:
    found = quota(Compression(method, 100, GraphKV(sources=0.25)), SCORERS[method], 3, 1000)
    recent = 50 if method == "h2o" else 32
    assert found.recent_L.tolist() == [recent] * 3
    assert found.sources_L.tolist() == [int(np.ceil(0.25 * kept)) for kept in found.kept_L]
    assert found.most == max(found.kept_L)
    assert quota(Compression(method, 100), SCORERS[method], 3, 1000).sources_L.tolist() == [0] * 3


def test_a_share_of_sources_is_not_rounded_up_by_arithmetic() -> None:
    """0.7 * 10 is 7.000000000000001 for 0.1 * 7 * 10; a source too many would be chosen."""
    found = quota(Compression("snapkv", 10, GraphKV(sources=0.1 * 7), window=2), SCORERS["snapkv"], 1, 1000)
    assert found.sources_L.tolist() == [7]


@pytest.mark.parametrize("method", SCORERS)
@pytest.mark.parametrize("count", [33, 64])
def test_a_prompt_within_the_budget_is_kept_whole(method: str, count: int) -> None:
    ones = np.ones(5, np.float32)
    assert quota(Compression(method, 64), SCORERS[method], 5, count, ones).kept_L.tolist() == [count] * 5
