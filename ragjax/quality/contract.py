"""The quality contract of a running engine: which setting requests get, what is promised of it, and whether it is kept.

A share of live requests is replayed in `full` (shadow replay). What was seen of the current setting is held against
the budget by a bound over a window; a setting that leaves the budget is replaced by the next one of the report's
ladder. All of it is called in the engine's thread, but for `draws`, which any may call, and reading `setting`,
`setting_of`, `faulted` and `stats`.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
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
    """The consequence of a sample."""

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


@dataclass
class _Course:
    """The setting of requests that name no strategy, the monitor that replaces it, and a notice for their answers."""

    setting: Setting
    monitor: Monitor | None = None
    notice: str | None = None


class Contract:
    """The quality that an engine promises, and its default setting; `observe` takes every replay.

    Figures of strategies that take preprocessed chunks were measured with such chunks. A budget picks one of these for
    requests all of whose chunks are preprocessed; others get the cheapest setting inside the budget that takes none.

    setting: of requests that name no strategy, unless the budget picks one. report: None if there is none.
    fallback: what to do if no setting lies inside the budget: "refuse" to start, or run "full".
    shadow_rate: share of requests that are replayed. preprocessed: strategies that take preprocessed chunks.
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
        preprocessed: Collection[str] = (),
    ):
        if not 0.0 <= shadow_rate <= 1.0:
            raise ConfigError(f"shadow_rate must lie in [0, 1], not {shadow_rate!r}")
        if fallback not in ("refuse", "full"):
            raise ConfigError(f"unknown quality_fallback {fallback!r}; choose refuse or full")
        if budget is not None and report is None:
            raise ConfigError("a quality budget needs a quality report")
        self.observer: Callable[[str, Divergence], None] | None = None
        self._exact = EXACT[dtype]
        self._report = report
        self._budget = budget
        self._preprocessed = frozenset(preprocessed)
        self._fallback = False
        self._refuses = fallback == "refuse"
        self._rate = shadow_rate
        self._random = random.Random(seed)
        self._counters: Counter[str] = Counter()
        self._escalations: Counter[str] = Counter()
        # by whether all chunks of a request are preprocessed
        self._courses = dict.fromkeys((True, False), _Course(setting))
        self._begun_with = True
        if budget is not None and report is not None:
            self._choose(report, budget)

    def _choose(self, report: Report, budget: Budget) -> None:
        chosen = report.cheapest(budget)
        if chosen is None:
            best = min((one.kl_hi for one in report.measurements), default=math.inf)
            self._miss(
                f"no setting measured on this model lies inside the quality budget {budget} (least KL {best:.3g})"
            )
            return
        ladder, other = report.ladder(budget), report.without(self._preprocessed).ladder(budget)
        self._courses = dict.fromkeys((True, False), _Course(chosen, Monitor(budget, ladder)))
        if other == ladder:
            return
        reason = None
        if chosen.strategy in self._preprocessed:
            reason = (
                f"{chosen} keeps the quality budget {budget} with preprocessed chunks alone, and these are not; the "
                f"request ran {other[0]} (ragjax preprocess prepares a knowledge base)"
            )
        self._courses[False] = _Course(other[0], Monitor(budget, other), reason)

    def _miss(self, problem: str) -> None:
        if self._refuses:
            raise ConfigError(f"{problem}: raise the budget, or run full attention by --strategy full in its place")
        self._fallback = True
        notice = f"{problem}; requests run full attention"
        self._courses = dict.fromkeys((True, False), _Course(Setting("full"), notice=notice))
        _log.warning("QUALITY BUDGET MISSED: %s", notice)

    def begin(self, preprocessed: bool) -> None:
        """The knowledge is there. preprocessed: whether all chunks of it are.

        Raises:
            ConfigError: if they are not, and the budget was met with preprocessed chunks alone.
        """
        self._begun_with = preprocessed
        if self._report is None or self._budget is None or preprocessed or self._fallback:
            return
        if self._courses[False].notice is None:
            return  # what is picked takes none
        if self._report.without(self._preprocessed).cheapest(self._budget) is None:
            self._miss(
                f"the settings inside the quality budget {self._budget} were measured with preprocessed chunks, and "
                "the knowledge is not preprocessed: run ragjax preprocess, or else"
            )
            return
        _log.warning("%s is not picked: %s", self._courses[True].setting, self._courses[False].notice)

    @property
    def budgeted(self) -> bool:
        """True if requests that name no strategy are promised a budget."""
        return self._budget is not None

    @property
    def begun_with(self) -> bool:
        """True if all chunks of the knowledge were preprocessed at the start."""
        return self._begun_with

    @property
    def setting(self) -> Setting:
        """The setting of requests that name no strategy and whose chunks are as the knowledge was at the start."""
        return self.setting_of(self._begun_with)

    def setting_of(self, preprocessed: bool) -> Setting:
        """The setting of a request that names no strategy. preprocessed: all chunks of its prompt are."""
        return self._courses[preprocessed].setting

    @property
    def strategies(self) -> frozenset[str]:
        """Strategies that requests may get without naming them, now or later; shadow replay's own excepted."""
        courses = self._courses.values()
        ladders = (one for course in courses if course.monitor is not None for one in course.monitor.ladder)
        return frozenset(one.strategy for one in (*(course.setting for course in courses), *ladders))

    @property
    def faulted(self) -> bool:
        """True once an answer labelled exact was not; requests that name no strategy then run full attention."""
        return self._counters["faults"] > 0

    @property
    def notices(self) -> tuple[str, ...]:
        """`notices_of` chunks that are as the knowledge was at the start."""
        return self.notices_of(self._begun_with)

    def notices_of(self, preprocessed: bool) -> tuple[str, ...]:
        """Notices of answers that the setting served. preprocessed: all chunks of the prompt are."""
        notice = self._courses[preprocessed].notice
        return () if notice is None else (notice,)

    def exceeded(self, chunks: int) -> str | None:
        """The reason why the budget may not hold for a prompt of so many chunks; None if it does, or there is none."""
        if self._budget is None or self._report is None or chunks <= self._report.top_k:
            return None
        return f"the quality budget was measured with up to {self._report.top_k} chunks, and here are {chunks}"

    def takes_preprocessed(self, setting: Setting) -> bool:
        """True if its figures were measured with preprocessed chunks."""
        return setting.strategy in self._preprocessed

    def predicted(self, setting: Setting, exact: bool, chunks: int, preprocessed: bool = True) -> Divergence | None:
        """Divergence to expect of an answer; None if it was not measured, or not with so many or such chunks."""
        if exact:
            return Divergence(0.0, 1.0)
        if self._report is None or chunks > self._report.top_k:
            return None
        if self.takes_preprocessed(setting) and not preprocessed:
            return None
        return self._report.predicted(setting)

    def draws(self) -> bool:
        """Draw whether the next request is replayed."""
        return self._rate > 0 and self._random.random() < self._rate

    def drop(self, reason: str) -> None:
        """A replay does not come about."""
        self._counters[reason] += 1

    def observe(self, setting: Setting, exact: bool, seen: Divergence, covered: bool = True) -> None:
        """A request of this setting was replayed.

        exact: its answer was labelled so. covered: whether the report speaks of such requests; others, with more chunks
        for instance, do not tell whether the budget is kept.
        """
        if self.observer is not None:
            self.observer(setting.strategy, seen)
        if exact and seen.kl > self._exact:
            self._fault(setting, seen)
        elif not exact and covered:
            for course in {id(course): course for course in self._courses.values()}.values():
                self._climb(course, setting, seen)
        self._counters["replayed"] += 1  # last: who waits for it sees what came of it

    def _climb(self, course: _Course, setting: Setting, seen: Divergence) -> None:
        """Take a sample into a course, which may then go on with another setting."""
        verdict = Verdict.KEEP if course.monitor is None else course.monitor.add(setting, seen)
        if course.monitor is None or verdict is Verdict.KEEP:
            return
        before, after = course.setting, course.monitor.setting
        self._escalations[str(verdict)] += 1
        raised = before.strategy == after.strategy and (before.ratio or 0.0) < (after.ratio or 0.0)
        how = "the recompute ratio was raised: " if raised else ""
        course.setting = after
        course.notice = (
            f"shadow replay found {before} outside the quality budget {self._budget}; {how}requests now run {after}"
        )
        _log.warning("%s", course.notice)

    def _fault(self, setting: Setting, seen: Divergence) -> None:
        """An answer that was labelled exact is not: kept KV is wrong, and nothing kept may be trusted."""
        known = self.faulted
        self._counters["faults"] += 1
        if known:
            return
        self._escalations["fault"] += 1
        notice = (
            f"shadow replay found an answer of {setting} that was labelled exact and is not (KL {seen.kl:.3g}); "
            "requests now run full attention"
        )
        self._courses = dict.fromkeys((True, False), _Course(Setting("full"), notice=notice))
        _log.error("%s", notice)

    def stats(self) -> dict[str, float | dict[str, float]]:
        """Counters since the start."""
        replays = {name: self._counters[name] for name in ("replayed", "dropped", "failed")}
        return {
            "quality_fallback": int(self._fallback),
            "shadow_replays_total": dict(replays),
            "shadow_escalations_total": {name: self._escalations[name] for name in ("raise", "exact", "fault")},
            "shadow_faults_total": self._counters["faults"],
        }
