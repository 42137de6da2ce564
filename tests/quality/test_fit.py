"""Fitting by data whose truth is planted: weights come back, and forecasts hold as often as they say."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ragjax.core import ConfigError
from ragjax.core.fit import Fit, Forecast, features_of, rank_of
from ragjax.engine.measurement import fit_path, usable_fit
from ragjax.quality.fit import (
    Contestant,
    FitReport,
    Rung,
    Spent,
    Trial,
    Tried,
    forecast_of,
    least,
    not_negative,
    spent,
    weights_of,
)

FORECAST = Forecast((0.0, 0.3), -1.0, 0.8, 0.2, 0.1, (((-1.0, 0.3), (-2.0, 0.1)),) * 19)
REPORT = FitReport(
    "ab" * 32, "tiny", "float32", "2026-01-01T00:00:00+00:00", 20, 20, {"fitted": 0.1}, Fit({"start": 1.0}, 4, FORECAST)
)


def planted(weights: np.ndarray, prompts: int, trials: int, noise: float, seed: int = 0) -> list[Tried]:
    """Trials in which KL falls as these weights say."""
    random, found = np.random.default_rng(seed), []
    for _ in range(prompts):
        kl = float(random.lognormal(-2, 1))
        sets = random.random((trials, len(weights)))
        falls = 3 * sets @ weights + noise * random.normal(size=trials)
        found.append(Tried(kl, 0.5, 1.0, tuple(Trial(s, kl * math.exp(-f)) for s, f in zip(sets, falls, strict=True))))
    return found


def test_planted_weights_come_back_whatever_the_prior() -> None:
    weights = np.array([0.6, 0.0, 0.3, 0.1, 0.0])
    for prior in (np.array([0.0, 1.0, 0.0, 0.0, 1.0]), np.ones(5)):
        found = weights_of(planted(weights, 30, 20, 0.1), prior, penalty=1e-4)
        np.testing.assert_allclose(found, weights, atol=0.06)
        assert (found >= 0).all() and found.sum() == pytest.approx(1)


def test_without_trials_or_with_a_heavy_penalty_the_prior_stays() -> None:
    prior, weights = np.array([0.0, 3.0, 1.0]), np.array([1.0, 0.0, 0.0])
    np.testing.assert_allclose(weights_of([], prior), prior / 4)
    np.testing.assert_allclose(weights_of(planted(weights, 4, 8, 0.1), prior, penalty=1e6), prior / 4, atol=1e-3)
    harmful = planted(np.array([-1.0, -1.0, -1.0]), 5, 8, 0.0)
    np.testing.assert_allclose(weights_of(harmful, prior, penalty=1e-6), prior / 4)


def test_the_contestant_with_the_least_divergence_wins_in_the_mean_of_logarithms() -> None:
    assert least([(0.5, [0.10, 0.05, 0.2]), (0.5, [0.02, 0.03, 0.2])]) == 1
    assert least([(0.5, [0.30, 0.31, 0.31]), (0.5, [0.02, 0.01, 0.01])]) == 1, (
        "a large one does not outweigh all others"
    )
    assert least([(9.0, [1e-9, 0.002]), (0.5, [0.2, 0.19])]) == 1, "what is far below the rest is noise"
    assert least([(0.5, [0.1, 0.1])]) == 0


def test_the_least_squares_without_negative_numbers_meet_their_conditions() -> None:
    random = np.random.default_rng(4)
    for _ in range(20):
        x, y = random.normal(size=(30, 6)), random.normal(size=30)
        a, b = x.T @ x, x.T @ y
        found = not_negative(a, b)
        slope = a @ found - b  # Karush, Kuhn, Tucker: 0 where positive, not negative where 0
        assert (found >= 0).all() and (slope >= -1e-8).all() and np.abs(slope * found).max() < 1e-8


# ------------------------------------------------------------------------------------------------ forecast

RATIOS = (0.0, 0.2, 0.5)


def prompt(random: np.random.Generator, noise: float) -> tuple[Rung, ...]:
    """Rungs of a prompt whose ln KL is linear in the features, but for noise of its own with a long tail."""
    mass, entropy, off = random.uniform(0.1, 0.9), random.uniform(0, 4), noise * random.standard_t(3)
    parts = np.sort(random.random(len(RATIOS)))
    truth = Forecast(RATIOS, -1.0, 0.9, 0.5, 0.2)
    return tuple(
        Rung(p, mass, entropy, math.exp(truth.log_kl(p, mass, entropy) + off + 0.1 * random.normal())) for p in parts
    )


def test_a_forecast_finds_what_divergence_is_linear_in() -> None:
    random = np.random.default_rng(0)
    seen = [rung for _ in range(300) for rung in prompt(random, 0.05)]
    found = forecast_of(seen, [prompt(random, 0.05) for _ in range(40)], RATIOS)
    assert found is not None and found.ratios == RATIOS
    got = np.array([found.slope, found.mass, found.uncertainty])
    np.testing.assert_allclose(got, [0.9, 0.5, 0.2], atol=0.12)


def test_budgets_are_kept_for_as_many_new_prompts_as_promised_whatever_the_noise() -> None:
    """Split conformal: of new prompts, the mean over calibrations, at most 5% exceed any budget; it is not idle."""
    random = np.random.default_rng(1)
    exceeded: dict[float, list[bool]] = {0.05: [], 0.2: [], 0.6: []}
    saved: list[bool] = []
    for _ in range(80):
        seen = [rung for _ in range(20) for rung in prompt(random, 0.5)]
        forecast = forecast_of(seen, [prompt(random, 0.5) for _ in range(39)], RATIOS)
        assert forecast is not None
        for rungs in (prompt(random, 0.5) for _ in range(40)):
            expected = [forecast.log_kl(r.part, r.mass, r.entropy) for r in rungs]
            for kl, found in exceeded.items():
                at = forecast.pick(kl, expected)
                found.append(at is not None and rungs[at].kl > kl)
                saved.append(at is not None)
    assert all(np.mean(found) <= 0.06 for found in exceeded.values()), {k: np.mean(v) for k, v in exceeded.items()}
    assert max(map(np.mean, exceeded.values())) > 0.02 and np.mean(saved) > 0.2, "a bound that nothing reaches is cheap"


def test_a_cutoff_is_where_held_out_prompts_began_to_exceed() -> None:
    prompts = [((0.0, 0.5), (-1.0, 0.3), (-2.0, 0.1))] * 38 + [((0.0, 0.5), (-1.0, 0.9), (-3.0, 0.1))]
    found = Forecast(RATIOS, 0.0, 1.0, 0.0, 0.0, tuple(prompts))
    assert found.cutoff(0.05) == -2.0, "rank 38 of 39 from above: the one at -3 may be left out"
    assert (found.cutoff(0.2) == -1.0 and found.cutoff(0.4) == -1.0) or found.cutoff(0.4) == 0.0
    assert found.cutoff(0.95) == math.inf, "nothing exceeds it"
    assert found.pick(0.05, (0.0, -2.0, -2.1)) == 2 and found.pick(0.05, (0.0, -1.0, -2.0)) is None
    picks = [found.pick(kl, (-0.5, -1.5, -2.5)) for kl in (0.01, 0.05, 0.2, 0.4, 0.95)]
    assert picks == [2, 2, 1, 0, 0], "a wider budget never takes more"


def test_what_budgets_take_is_told_of_prompts_that_were_held_out() -> None:
    prompts = (((0.0, 0.5), (-2.0, 0.1)),) * 19 + (((-1.0, 1.0), (-3.0, 0.2)),)
    found = Forecast((0.0, 0.2), 0.0, 1.0, 0.0, 0.0, prompts)
    for kl, *expected in (
        (1.01, 1.0, 0.0, 0.0),
        (0.51, 0.95, 0.2 * 0.95, 0.0),  # the last prompt's own cutoff, -1, holds for the others; theirs is none
        (0.19, 0.95, 0.95, 0.2),
        (0.05, 0.95, 0.95 + 0.2 / 20, 1.0),
    ):
        told = spent(found, kl)
        assert [told.within, told.ratio, told.fixed] == pytest.approx(expected), kl
    few = spent(replace(found, held=prompts[:5]), 1.01)
    assert few == Spent(1.01, 1.0, 1.0, 0.0), "too few to promise anything: all is recomputed"


def test_too_few_prompts_promise_nothing() -> None:
    assert rank_of(18) is None and rank_of(19) == 19 and rank_of(39) == 38 and rank_of(3, 0.5) == 2
    random = np.random.default_rng(0)
    assert forecast_of([*prompt(random, 0.1)], [prompt(random, 0.1)] * 18, RATIOS) is None


def test_a_forecast_falls_with_the_part_that_is_recomputed() -> None:
    found = [FORECAST.log_kl(part, 0.4, 1.0) for part in (0.0, 0.3, 0.9, 1.0)]
    assert found == sorted(found, reverse=True) and math.isfinite(found[-1])
    assert FORECAST.log_kl(0.3, 0.4, 1.0) == pytest.approx(-1 + 0.8 * math.log(0.7) + 0.2 * math.log(0.4) + 0.1)
    assert all(map(math.isfinite, features_of(1.0, 0.0, 0.0)))


# ---------------------------------------------------------------------------------------------------- file


def test_a_fit_is_read_as_it_was_written(tmp_path: Path) -> None:
    for report in (
        replace(REPORT, budgets=(Spent(0.1, 0.95, 0.2, 0.3),), contest=(Contestant({"start": 1.0}, (0.1, 0.2)),)),
        replace(REPORT, fit=Fit({"start": 0.5, "chunk": 0.5}, 2)),
    ):
        report.save(tmp_path / "fit.json")
        assert FitReport.load(tmp_path / "fit.json", REPORT.identity) == report


def test_a_fit_of_another_model_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    REPORT.save(path)
    with pytest.raises(ConfigError, match=r"of another model, tiny in float32.*gate --fit"):
        FitReport.load(path, "cd" * 32)
    good = json.loads(path.read_text())
    weights = {**good["fit"], "weights": {"start": -1.0}}
    for wrong in ({**good, "version": 0}, {**good, "fit": weights}, {**good, "fit": None}, {**good, "luck": 1}, []):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=r"no fit of a selector.*gate --fit"):
            FitReport.load(path, REPORT.identity)


def test_a_start_that_does_not_need_a_fit_goes_on_without_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAGJAX_CACHE", str(tmp_path))
    identity = bytes.fromhex("ab12")
    assert usable_fit(identity, wanted=True) is None, "there is none, and that is no fault"
    path = fit_path(identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
    with caplog.at_level("WARNING"):
        assert usable_fit(identity, wanted=False) is None
    assert "the strategy fitted is not served" in caplog.text and "gate --fit" in caplog.text
    with pytest.raises(ConfigError, match="no fit of a selector"):
        usable_fit(identity, wanted=True)
