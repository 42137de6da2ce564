"""Fitting: from random sets of recomputed tokens to weights of signals, and to a bound on divergence that holds.

**Weights.** A trial recomputes a set of a prompt's tokens; `covered` is the part of each signal that the set has. The
fall of ln KL is regressed on `covered`, with weights that are not negative and a penalty on their distance from those
of a prior, so that few trials change little (a linear datamodel: Ilyas et al., arXiv 2202.00622).

**Forecast.** ln KL is regressed on what is known before the repair (`core.fit.features_of`). Prompts that were held out
say how low a forecast must be for a budget to be kept (`core.fit.Forecast.cutoff`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError
from ragjax.core.fit import CONFIDENCE, Fit, Forecast, features_of, rank_of
from ragjax.quality.report import write

VERSION = 1
"""Of the file format."""

LEAST_KL = 0.02
"""Share of a prompt's KL without repair, which is added before logarithms: smaller differences are noise."""

PENALTY = 0.3
"""On the squared distance of a weight from the prior's, for each trial."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Trial:
    """A set of tokens that was recomputed: the part of each signal that it has, float64 [signals], and the KL then."""

    covered_S: Array
    kl: float


@dataclass(frozen=True)
class Tried:
    """Trials on one prompt. kl: with nothing recomputed. mass, entropy: as `features_of`."""

    kl: float
    mass: float
    entropy: float
    trials: tuple[Trial, ...]


def weights_of(tried: Sequence[Tried], prior_S: Array, penalty: float = PENALTY) -> Array:
    """Weights of signals, none negative, that add up to 1.

    prior_S: what they are without trials, up to a factor.
    """
    covered, fall = [], []
    for prompt in tried:
        for trial in prompt.trials:
            covered.append(trial.covered_S)
            fall.append(_log(prompt.kl, prompt.kl) - _log(trial.kl, prompt.kl))
    if not covered:
        return _normal(prior_S)
    x_TS, y_T = np.stack(covered), np.array(fall)
    along_T = x_TS @ prior_S
    prior_S = prior_S * max(float(along_T @ y_T) / max(float(along_T @ along_T), 1e-12), 1e-6)  # its best factor
    strength = penalty * len(y_T) * float((x_TS**2).mean())
    found = not_negative(x_TS.T @ x_TS + strength * np.eye(len(prior_S)), x_TS.T @ y_T + strength * prior_S)
    return _normal(found if found.any() else prior_S)


def _normal(weights_S: Array) -> Array:
    whole: Array = weights_S / weights_S.sum()
    return whole


def least(seen: Sequence[tuple[float, Sequence[float]]]) -> int:
    """Which of the contestants has the least mean ln KL; of equal ones the first.

    seen: of each prompt, its KL with nothing recomputed, and with what each contestant chose.
    """
    return int(np.argmin(np.mean([[_log(kl, without) for kl in kls] for without, kls in seen], axis=0)))


def not_negative(a_SS: Array, b_S: Array, rounds: int = 2000) -> Array:
    """The x >= 0 that makes x' a x / 2 - b' x least, for a positive definite `a`; by coordinate descent."""
    x_S = np.zeros(len(b_S))
    for _ in range(rounds):
        before_S = x_S.copy()
        for i in range(len(x_S)):
            x_S[i] = max(0.0, x_S[i] + (b_S[i] - a_SS[i] @ x_S) / a_SS[i, i])
        if np.abs(x_S - before_S).max() <= 1e-12 * max(1.0, float(np.abs(x_S).max())):
            break
    return x_S


def _log(kl: float, without: float) -> float:
    return math.log(kl + LEAST_KL * without + 1e-9)


# ------------------------------------------------------------------------------------------ forecast


@dataclass(frozen=True)
class Rung:
    """What was known of a prompt at one ratio, and its KL there. part, mass, entropy: as `features_of`."""

    part: float
    mass: float
    entropy: float
    kl: float


def forecast_of(seen: Sequence[Rung], held: Sequence[Sequence[Rung]], ratios: Sequence[float]) -> Forecast | None:
    """A forecast at these ratios, ascending; None if too few prompts were held out for the confidence.

    seen: to fit it on. held: of each prompt held out, its KL at each of the ratios.
    """
    if rank_of(len(held)) is None:
        return None
    x_NF = np.array([features_of(one.part, one.mass, one.entropy) for one in seen])
    y_N = np.array([math.log(max(one.kl, 1e-6)) for one in seen])
    ridge = 1e-2 * np.diag([0.0, 1.0, 1.0, 1.0]) * len(y_N)
    intercept, slope, mass, uncertainty = map(float, np.linalg.solve(x_NF.T @ x_NF + ridge, x_NF.T @ y_N))
    bare = Forecast(tuple(ratios), intercept, slope, mass, uncertainty)
    pairs = (tuple((bare.log_kl(r.part, r.mass, r.entropy), r.kl) for r in prompt) for prompt in held)
    return replace(bare, held=tuple(pairs))


@dataclass(frozen=True)
class Spent:
    """What a budget did on the prompts held out, each by the cutoff of the others.

    kl: the budget, nats. within: share of prompts whose KL lay within. ratio: mean ratio picked, 1 where none sufficed.
    fixed: the least ratio of the ladder at which as many prompts lie within as promised; 1 if there is none.
    """

    kl: float
    within: float
    ratio: float
    fixed: float


def spent(forecast: Forecast, kl: float) -> Spent:
    """Of one budget."""
    picked, within = [], []
    for i, prompt in enumerate(forecast.held):
        others = replace(forecast, held=forecast.held[:i] + forecast.held[i + 1 :])
        at = others.pick(kl, [expected for expected, _ in prompt])
        picked.append(1.0 if at is None else forecast.ratios[at])
        within.append(at is None or prompt[at][1] <= kl)
    rungs = zip(forecast.ratios, zip(*forecast.held, strict=True), strict=True)
    kept = {ratio: np.mean([seen <= kl for _, seen in prompts]) for ratio, prompts in rungs}
    fixed = next((ratio for ratio, share in kept.items() if share >= CONFIDENCE), 1.0)
    return Spent(kl, float(np.mean(within)), float(np.mean(picked)), fixed)


# ---------------------------------------------------------------------------------------------- file


@dataclass(frozen=True)
class Contestant:
    """Weights that competed, by signal, and the KL that they left of each question at 15%."""

    weights: Mapping[str, float]
    kls: tuple[float, ...]


@dataclass(frozen=True)
class FitReport:
    """A fit of one model, and what it did on the questions held out.

    identity: hex of what KV depends on. created: ISO 8601, UTC. fitted, held: how many questions were fitted on, and
    held out. checked: mean KL on these at 15%, by strategy. budgets: what some budgets did on them.
    contest: all that competed on the questions fitted on.
    """

    identity: str
    model: str
    dtype: str
    created: str
    fitted: int
    held: int
    checked: Mapping[str, float]
    fit: Fit
    budgets: tuple[Spent, ...] = ()
    contest: tuple[Contestant, ...] = ()

    def save(self, path: Path) -> None:
        """Write it as JSON, at once or not at all."""
        write(path, {"version": VERSION, **asdict(self)})

    @classmethod
    def load(cls, path: Path, identity: str | None = None) -> FitReport:
        """Read what `save` wrote for this model (None: for whichever).

        Raises:
            ConfigError: if it is damaged, of another version or of another model.
        """
        try:
            report = cls._of(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path}: no fit of a selector: {error!r}; {AGAIN}") from error
        if identity is not None:
            report.check(identity, path)
        return report

    def check(self, identity: str, path: Path) -> None:
        """Refuse a fit of another model. path: where it came from.

        Raises:
            ConfigError: if it is one.
        """
        if self.identity != identity:
            raise ConfigError(f"{path}: the fit is of another model, {self.model} in {self.dtype}; {AGAIN}")

    @classmethod
    def _of(cls, data: Any) -> FitReport:
        if data.pop("version") != VERSION:
            raise ValueError(f"not version {VERSION}")
        fit = data.pop("fit")
        weights = {str(name): float(weight) for name, weight in fit["weights"].items()}
        if not weights or not all(math.isfinite(weight) and weight >= 0 for weight in weights.values()):
            raise ValueError("weights are finite numbers from 0 on")
        given = fit["forecast"]
        forecast = None if given is None else _forecast(given)
        budgets = tuple(Spent(**one) for one in data.pop("budgets"))
        contest = tuple(Contestant(one["weights"], tuple(one["kls"])) for one in data.pop("contest"))
        return cls(**data, budgets=budgets, contest=contest, fit=Fit(weights, int(fit["top_k"]), forecast))


def _forecast(given: Mapping[str, Any]) -> Forecast:
    held = tuple(tuple((float(expected), float(kl)) for expected, kl in prompt) for prompt in given["held"])
    return Forecast(**{**given, "ratios": tuple(given["ratios"]), "held": held})


AGAIN = "make one by python -m ragjax.reuse.gate --fit"
"""What to do without a fit."""
