"""The quality contract of a running engine: which setting requests get, what is promised of it, and whether it is kept.

A share of live requests is replayed in `full` (shadow replay). What was seen of the current setting is held against
the budget by a bound over a window; a setting that leaves the budget is replaced by the next one of the report's
ladder. All of it is called in the engine's thread, but for `draws`, which any may call, and reading `setting`,
`faulted` and `stats`.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import StrEnum

from ragjax.core import ConfigError, Divergence
from ragjax.quality.report import EXACT, Budget, Report, Setting, bounds

_log = logging.getLogger(__name__)

WINDOW = 64
"""Shadowed requests that the running bound is over."""

LEAST = 16
"""Shadowed requests of a setting before it can be replaced."""

FAR = 4.0
"""A setting whose KL is surely above so many budgets is not raised by a step, but replaced by an exact one."""

STEPS = 16
"""Generated tokens of a request that are compared."""

QUEUE = 8
"""Replays that may wait; what comes on top is dropped, and counted."""


class Verdict(StrEnum):
    """What a sample led to."""

    KEEP = "keep"
    RAISE = "raise"
    EXACT = "exact"


class Monitor:
    """The running bound on live divergence of the current setting, and the ladder it climbs.

    A setting stays while the one-sided 95% bounds of the mean over the last `WINDOW` samples, `LEAST` at least, lie
    inside the budget. Outside, the next rung begins with an empty window; if even the lower bound of KL is above
    `FAR` budgets, something is broken rather than imprecise, and the last rung begins.
    """

    def __init__(self, budget: Budget, ladder: Sequence[Setting]):
        self.ladder = tuple(ladder)
        self._budget = budget
        self._rung = 0
        self._seen: deque[Divergence] = deque(maxlen=WINDOW)

    @property
    def setting(self) -> Setting:
        """The current rung."""
        return self.ladder[self._rung]

    def add(self, setting: Setting, seen: Divergence) -> Verdict:
        """Take in a sample; those of other settings than the current one tell nothing."""
        if setting != self.setting or self._rung == len(self.ladder) - 1:
            return Verdict.KEEP
        self._seen.append(seen)
        if len(self._seen) < LEAST:
            return Verdict.KEEP
        kl_lo, kl_hi = bounds([one.kl for one in self._seen])
        top1_lo, _ = bounds([one.top1 for one in self._seen])
        if self._budget.holds(kl_hi, top1_lo):
            return Verdict.KEEP
        far = self._budget.kl is not None and kl_lo > FAR * self._budget.kl
        self._rung = len(self.ladder) - 1 if far else self._rung + 1
        self._seen.clear()
        return Verdict.EXACT if self._rung == len(self.ladder) - 1 else Verdict.RAISE


class Contract:
    """What an engine promises. `observe` is told of every replay: the strategy, and what was seen.

    setting: of requests that name no strategy, unless the budget picks one. report: None if there is none.
    fallback: what to do if no setting lies inside the budget: "refuse" to start, or run "full".
    shadow_rate: share of requests that are replayed.
    """

    def __init__(
        self,
        setting: Setting,
        dtype: str,
        *,
        report: Report | None = None,
        budget: Budget | None = None,
        fallback: str = "refuse",
        shadow_rate: float = 0.0,
        seed: int = 0,
    ):
        if not 0.0 <= shadow_rate <= 1.0:
            raise ConfigError(f"shadow_rate must lie in [0, 1], not {shadow_rate!r}")
        if fallback not in ("refuse", "full"):
            raise ConfigError(f"unknown quality_fallback {fallback!r}; choose refuse or full")
        if budget is not None and report is None:
            raise ConfigError("a quality budget needs a quality report")
        self.observer: Callable[[str, Divergence], None] | None = None
        self._setting = setting
        self._exact = EXACT[dtype]
        self._report = report
        self._budget = budget
        self._monitor: Monitor | None = None
        self._notice: str | None = None
        self._fallback = False
        self._rate = shadow_rate
        self._random = random.Random(seed)
        self._counters: Counter[str] = Counter()
        self._escalations: Counter[str] = Counter()
        if budget is not None and report is not None:
            self._choose(report, budget, fallback)

    def _choose(self, report: Report, budget: Budget, fallback: str) -> None:
        chosen = report.cheapest(budget)
        if chosen is not None:
            self._monitor = Monitor(budget, report.ladder(budget))
            self._setting = chosen
            return
        best = min((one.kl_hi for one in report.measurements), default=math.inf)
        problem = f"no setting measured on this model lies inside the quality budget {budget} (least KL {best:.3g})"
        if fallback == "refuse":
            raise ConfigError(f"{problem}: raise the budget, or run full attention by --quality-fallback full")
        self._fallback = True
        self._setting = Setting("full")
        self._notice = f"{problem}; requests run full attention"
        _log.warning("QUALITY BUDGET MISSED: %s", self._notice)

    @property
    def setting(self) -> Setting:
        """What requests get that name no strategy."""
        return self._setting

    @property
    def strategies(self) -> frozenset[str]:
        """What requests may get without naming it, now or later; shadow replay's own apart."""
        ladder = () if self._monitor is None else self._monitor.ladder
        return frozenset(one.strategy for one in (self._setting, *ladder))

    @property
    def faulted(self) -> bool:
        """Whether an answer was labelled exact and was not; what names no strategy runs full attention since."""
        return self._counters["faults"] > 0

    @property
    def notices(self) -> tuple[str, ...]:
        """What the answers have to say that the setting served."""
        return () if self._notice is None else (self._notice,)

    def predicted(self, setting: Setting, exact: bool, chunks: int) -> Divergence | None:
        """Divergence to expect of an answer; None if it was not measured, or not with so many chunks."""
        if exact:
            return Divergence(0.0, 1.0)
        if self._report is None or chunks > self._report.top_k:
            return None
        return self._report.predicted(setting)

    def draws(self) -> bool:
        """Whether the next request is to be replayed."""
        return self._rate > 0 and self._random.random() < self._rate

    def drop(self, reason: str) -> None:
        """A replay does not come about."""
        self._counters[reason] += 1

    def observe(self, setting: Setting, exact: bool, seen: Divergence) -> None:
        """A request of this setting was replayed; `exact`: its answer was labelled so."""
        if self.observer is not None:
            self.observer(setting.strategy, seen)
        self._counters["replayed"] += 1
        if exact and seen.kl > self._exact:
            self._fault(setting, seen)
        elif not exact and self._monitor is not None:
            verdict = self._monitor.add(setting, seen)
            if verdict is not Verdict.KEEP:
                self._climb(self._monitor.setting, verdict)

    def _climb(self, setting: Setting, verdict: Verdict) -> None:
        before, self._setting = self._setting, setting
        self._escalations[str(verdict)] += 1
        raised = before.strategy == setting.strategy and (before.ratio or 0.0) < (setting.ratio or 0.0)
        how = "the recompute ratio was raised: " if raised else ""
        self._notice = (
            f"shadow replay found {before} outside the quality budget {self._budget}; {how}requests now run {setting}"
        )
        _log.warning("%s", self._notice)

    def _fault(self, setting: Setting, seen: Divergence) -> None:
        """An answer that was labelled exact is not: kept KV is wrong, and nothing kept may be trusted."""
        known = self.faulted
        self._counters["faults"] += 1
        if known:
            return
        self._setting, self._monitor = Setting("full"), None
        self._escalations["fault"] += 1
        self._notice = (
            f"shadow replay found an answer of {setting} that was labelled exact and is not (KL {seen.kl:.3g}); "
            "requests now run full attention"
        )
        _log.error("%s", self._notice)

    def stats(self) -> dict[str, float | dict[str, float]]:
        """Counters since the start."""
        replays = {name: self._counters[name] for name in ("replayed", "dropped", "failed")}
        return {
            "quality_fallback": int(self._fallback),
            "shadow_replays_total": dict(replays),
            "shadow_escalations_total": {name: self._escalations[name] for name in ("raise", "exact", "fault")},
            "shadow_faults_total": self._counters["faults"],
        }
