"""`python -m ragjax.reuse.gate --fit`: fits the selector of `fitted` to a model, on questions over its documents.

Half of the questions, drawn at random, give random trials (`reuse/trial.py`), of which weights of signals are made
(`quality/fit.py`). A regression sees little of the order of tokens that are nearly chosen, so the weights then compete
with plainer ones on the same questions at 15%, those of published selectors among them, and the least mean ln KL wins.
The other questions are held out: they are asked at each ratio of a ladder with the weights that won, which gives the
cutoffs that budgets of requests go by, and the check against `ragjax` that the report shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ragjax.core import ConfigError, Kind, Prompt, Tokens
from ragjax.core.fit import Fit, Forecast, rank_of
from ragjax.engine import Engine
from ragjax.quality.fit import (
    Contestant,
    FitReport,
    Rung,
    Spent,
    Trial,
    Tried,
    forecast_of,
    least,
    spent,
    weights_of,
)
from ragjax.quality.report import divergence
from ragjax.reuse.anchor import Anchored, Valued
from ragjax.reuse.budget import entropy
from ragjax.reuse.repair import RATIO, Selective, Selector
from ragjax.reuse.select import share
from ragjax.reuse.signals import NAMES, QUARTERS, Signals
from ragjax.reuse.trial import Drawn, Once, Told

T = TypeVar("T")

TRIALS = (0.05, 0.15, 0.3, 0.15) * 2
"""Ratios of the random trials on a question."""

PENALTIES = (0.03, 0.3)
"""Of the regressions that compete."""

_RECEIVED = {f"received-{i + 1}": 0.25 for i in range(QUARTERS)}
CONTESTANTS: Sequence[Mapping[str, float]] = (
    {"received-3": 0.5, "received-4": 0.5},
    {"attention-last": 1.0},
    {"attention-even": 1.0},
    _RECEIVED,
    {**_RECEIVED, "start": 0.15},
    {**_RECEIVED, "start": 0.5},
    {"attention-even": 1.0, "start": 0.15},
    {**_RECEIVED, "received-start": 0.5},
    {"received-root": 1.0},
    {"received-drift": 1.0},
    {"even-drift": 1.0},
    {"received-drift": 0.85, "start": 0.15},
    {"received-drift": 0.6, "last-drift": 0.3, "start": 0.1},
    {"even-drift": 0.6, "last-drift": 0.3, "start": 0.1},
)
"""Weights that compete besides: of `ragjax`, `fusion`, `prophet`; all quarters alike; these and starts of chunks;
drift."""

LADDER = (0.0, 0.05, 0.1, 0.15, 0.3, 0.5)
"""Ratios that a budget may pick."""

BUDGETS = (0.01, 0.02, 0.05, 0.1, 0.2)
"""Nats, of which the report says what they take."""

LEAST = 4
"""Questions that a fit takes."""

PRIOR = _RECEIVED
"""Weights before any trial."""


@dataclass(frozen=True)
class Asked:
    """A question: its prompt, and tokens of the answer it should get, int32 [n]."""

    prompt: Prompt
    reference: Tokens


class Bench:
    """Answers one question by selections, and compares them with full attention.

    kl, entropy: with nothing recomputed: mean KL from full attention, and the entropy of the answer's first token.
    """

    def __init__(self, engine: Engine, asked: Asked, step: Callable[[], object]):
        self._engine, self._asked, self._step, self._once = engine, asked, step, Once()
        self._full = self._scores("full")
        bare = self._scores(_trial(Valued()), 0.0)
        self.kl, self.entropy = divergence(self._full, bare).kl, entropy(bare[0])

    def tried(self, random: np.random.Generator) -> Tried:
        """Random trials."""
        drawn = Drawn(self._once, random)
        strategy, trials = _trial(drawn), []
        for ratio in TRIALS:
            kl = self._kl(strategy, ratio)
            trials.append(Trial(drawn.covered_S, kl))
        return Tried(self.kl, self._found.mass, self.entropy, tuple(trials))

    def ladder(self, weights: Mapping[str, float]) -> tuple[Rung, ...]:
        """KL at each ratio of the ladder."""
        told = Told(weights, self._once)
        strategy, rungs = _trial(told), []
        kls = {ratio: self._kl(strategy, ratio) for ratio in LADDER if ratio}
        total = sum(len(segment) for segment in self._asked.prompt.segments if segment.kind is Kind.CHUNK)
        for ratio in LADDER:
            part = told.part(self._found, told.highest(self._found, share(ratio, total)))
            rungs.append(Rung(part, self._found.mass, self.entropy, kls.get(ratio, self.kl)))
        return tuple(rungs)

    def contest(self, contestants: Sequence[Mapping[str, float]]) -> list[float]:
        """KL at 15% by the weights of each."""
        return [self._kl(_trial(Told(weights, self._once)), RATIO) for weights in contestants]

    def prior(self) -> float:
        """Mean KL of the selector of `ragjax`."""
        return self._kl(_trial(Valued()), RATIO)

    @property
    def _found(self) -> Signals:
        assert self._once.found is not None
        return self._once.found

    def _kl(self, strategy: Selective, ratio: float) -> float:
        return divergence(self._full, self._scores(strategy, ratio)).kl

    def _scores(self, strategy: str | Selective, ratio: float | None = None) -> NDArray[np.float32]:
        answer = self._engine.answer_prompt(
            self._asked.prompt,
            strategy=strategy,
            recompute_ratio=ratio,
            continuation=self._asked.reference,
            max_tokens=1,
        )
        self._step()
        assert answer.scores is not None
        if not np.isfinite(answer.scores).all():
            raise ConfigError("logits are no finite numbers: nothing can be fitted to them")
        return answer.scores


def _trial(selector: Selector) -> Selective:
    return Selective("trial", Anchored(), selector)


def fit(engine: Engine, questions: Sequence[Asked], step: Callable[[], object], seed: int = 0) -> FitReport:
    """Fit on half of the questions, and check on the others; `step` is called after each of `count_answers(…)`.

    The documents must be preprocessed.

    Raises:
        ConfigError: if there are too few questions, or none over two chunks.
    """
    usable = [asked for asked in questions if asked.prompt.chunks > 1 and len(asked.reference)]
    if len(usable) < LEAST:
        raise ConfigError(f"a fit takes {LEAST} questions over two chunks or more, and there are {len(usable)}")
    random = np.random.default_rng(seed)
    to_fit, to_hold_out = halves(usable, random)
    benches = [Bench(engine, asked, step) for asked in to_fit]
    tried = [bench.tried(random) for bench in benches]
    contestants = [*CONTESTANTS, *(_named(weights_of(tried, _array(PRIOR), penalty)) for penalty in PENALTIES)]
    seen = [(bench.kl, bench.contest(contestants)) for bench in benches]
    weights = contestants[least(seen)]
    weights_S = _array(weights) / sum(weights.values())
    held, before = [], []
    for asked in to_hold_out:
        bench = Bench(engine, asked, step)
        held.append(bench.ladder(weights))
        before.append(bench.prior())
    forecast = forecast_of(_seen(tried, weights_S), held, LADDER)
    at = LADDER.index(RATIO)
    checked = {"fitted": float(np.mean([rungs[at].kl for rungs in held])), "ragjax": float(np.mean(before))}
    return FitReport(
        identity=engine.identity.hex(),
        model=engine.model_name,
        dtype=engine.dtype,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        fitted=len(tried),
        held=len(held),
        checked=checked,
        fit=Fit(_named(weights_S), engine.top_k, forecast),
        contest=_contest(contestants, [kls for _, kls in seen]),
        budgets=_budgets(forecast),
    )


def halves(questions: Sequence[T], random: np.random.Generator) -> tuple[list[T], list[T]]:
    """The questions to fit on, one more where the number is odd, and those to hold out; both in random order.

    At random, because the cutoffs hold for questions that are like those held out: a file may list its questions in an
    order that means something.
    """
    drawn = [questions[i] for i in random.permutation(len(questions))]
    return drawn[len(drawn) // 2 :], drawn[: len(drawn) // 2]


def _budgets(forecast: Forecast | None) -> tuple[Spent, ...]:
    """What some budgets do; nothing if the cutoff of all questions but one promises nothing."""
    if forecast is None or rank_of(len(forecast.held) - 1) is None:
        return ()
    return tuple(spent(forecast, kl) for kl in BUDGETS)


def count_answers(questions: int) -> int:
    """How many answers a fit on so many questions asks for, at most."""
    held = questions // 2
    fitted = 2 + len(TRIALS) + len(CONTESTANTS) + len(PENALTIES)
    return (questions - held) * fitted + held * (2 + len(LADDER))


def _contest(contestants: Sequence[Mapping[str, float]], kls: Sequence[Sequence[float]]) -> tuple[Contestant, ...]:
    """kls: of each question, what each contestant left."""
    return tuple(
        Contestant(weights, tuple(left)) for weights, left in zip(contestants, zip(*kls, strict=True), strict=True)
    )


def _array(weights: Mapping[str, float]) -> NDArray[np.float64]:
    return np.array([weights.get(name, 0.0) for name in NAMES])


def _named(weights_S: NDArray[np.float64]) -> dict[str, float]:
    return {name: float(weight) for name, weight in zip(NAMES, weights_S, strict=True) if weight > 0}


def table(report: FitReport) -> Iterator[str]:
    """What the command prints of a fit."""
    yield f"{report.model}, {report.dtype}: fitted on {report.fitted} questions, checked on {report.held} others"
    for name, weight in sorted(report.fit.weights.items(), key=lambda pair: -pair[1]):
        yield f"  {name:16} {weight:.3f}"
    yield "mean KL at 15%: " + ", ".join(f"{name} {kl:.3g}" for name, kl in report.checked.items())
    if report.fit.forecast is None:
        yield "too few questions were held out to forecast divergence: requests with a budget are refused"
    for one in report.budgets:
        yield (
            f"  budget {one.kl:g}: {one.within:.0%} within at a mean ratio of {one.ratio:.2f}; "
            f"a fixed ratio takes {one.fixed:g}"
        )


def _seen(tried: Sequence[Tried], weights_S: NDArray[np.float64]) -> list[Rung]:
    """What the trials say of divergence by the part of the weighted signals that is recomputed."""
    found = []
    for one in tried:
        found.append(Rung(0.0, one.mass, one.entropy, one.kl))
        found += [Rung(float(weights_S @ trial.covered_S), one.mass, one.entropy, trial.kl) for trial in one.trials]
    return found
