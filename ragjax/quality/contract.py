"""The quality contract of a running engine: which setting requests get, what is promised of it, and whether it is kept.

`auto` gives requests whose chunks all are preprocessed the fastest setting that the model's quality report puts inside
the budget, conversations `moved` if the report puts that inside it, and `prefix`, which is exact, to all others.
Without a report, what idle replays of live requests show makes one (`quality/evidence.py`). A share of live requests is
replayed in `full` (shadow replay).
What was seen of the present setting is held against the budget by a bound over a window; a setting that leaves the
budget is replaced by the next one of the report's ladder. All of it is called in the engine's thread, but for `draws`,
which any may call, and what only reads.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal

from ragjax.core import ConfigError, Divergence, Prompt
from ragjax.quality.evidence import LIVE, NEEDED, LiveEvidence, ShadowTrial
from ragjax.quality.report import EXACT, MOVED, PREFIX, Budget, Report, Setting, bounds

_log = logging.getLogger(__name__)

AUTO = "auto"  # the strategy that is one of others, as the contract picks
BUDGET = Budget(0.05)  # where nothing else is asked for
FULL = Setting("full")  # the reference
WINDOW = 64  # shadowed requests that the running bound is over
LEAST = 16  # shadowed requests of a setting before it can be replaced
FAR = 4.0  # a setting whose KL is surely above so many budgets is not raised by a step, but replaced by an exact one
STEPS = 16  # generated tokens of a request that are compared
QUEUE = 8  # replays that may wait; what comes on top is dropped, and counted
WATCH = 0.05  # share of the requests with an approximate setting of `auto` that are replayed, whatever the shadow rate


Verdict = Literal["keep", "raise", "exact"]


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
        return self.ladder[self._rung]

    def add(self, setting: Setting, seen: Divergence) -> Verdict:
        """Take in a sample; those of other settings than the current one tell nothing."""
        if setting != self.setting or self._rung == len(self.ladder) - 1:
            return "keep"
        self._seen.append(seen)
        if len(self._seen) < LEAST:
            return "keep"
        kl_lo, kl_hi = bounds([one.kl for one in self._seen])
        top1_lo, _ = bounds([one.top1 for one in self._seen])
        if self._budget.holds(kl_hi, top1_lo):
            return "keep"
        far = self._budget.kl is not None and kl_lo > FAR * self._budget.kl
        self._rung = len(self.ladder) - 1 if far else self._rung + 1
        self._seen.clear()
        return "exact" if self._rung == len(self.ladder) - 1 else "raise"


class Contract:
    """The quality that an engine promises, and its default setting; `observe` takes every replay.

    setting: of requests that name no strategy; `auto` picks another one within the budget. report: of the model.
    shadow_rate: share of requests that are replayed. preprocessed: strategies that take preprocessed chunks. evidence:
    of live requests, where there is no report. path: where a report that live requests made is kept; None: in memory.
    """

    def __init__(
        self,
        setting: Setting,
        dtype: str,
        *,
        budget: Budget = BUDGET,
        report: Report | None = None,
        shadow_rate: float = 0.0,
        preprocessed: Collection[str] = (),
        evidence: LiveEvidence | None = None,
        path: Path | None = None,
    ):
        if not 0.0 <= shadow_rate <= 1.0:
            raise ConfigError(f"shadow_rate must lie in [0, 1], not {shadow_rate!r}")
        self.observer: Callable[[str, Divergence], None] | None = None
        self.budget = budget
        self._setting = setting
        self._exact = EXACT[dtype]
        self._preprocessed = frozenset(preprocessed)
        self._rate = shadow_rate
        self._random = random.Random(0)
        self._counters: Counter[str] = Counter()
        self._escalations: Counter[str] = Counter()
        self._notice: str | None = None  # of answers that the present setting gave
        self._evidence = None if report is not None else evidence
        self._path = path
        self._report = report
        self._monitor = Monitor(budget, (PREFIX,) if report is None else report.ladder(budget))
        told = None if report is None else report.conversations
        inside = told is not None and budget.holds(told.kl_hi, told.top1_lo)
        self._talks = Monitor(budget, (MOVED, PREFIX) if inside else (PREFIX,))

    @property
    def setting(self) -> Setting:
        return FULL if self.faulted else self._setting

    @property
    def pick(self) -> Setting:
        """The setting that `auto` gives to requests it has evidence of; all others get `prefix`."""
        return FULL if self.faulted else self._monitor.setting

    @property
    def summary(self) -> str:
        if self.setting.strategy != AUTO:
            return str(self.setting)
        uses = {"preprocessed passages": self.pick, "prompts without passages": self._talks.setting}
        told = ", ".join(f"{setting} for {what}" for what, setting in uses.items() if setting != PREFIX)
        told = f"{told}, within {self.budget} of full attention; else " if told and not self.faulted else ""
        tried = "" if self._evidence is None else f"; {self._evidence.requests} of {NEEDED} requests tried"
        return f"{AUTO}: {told}{PREFIX}{tried}"

    @property
    def strategies(self) -> frozenset[str]:
        """Strategies that requests get now without naming them; shadow replay's own excepted."""
        if self.setting.strategy != AUTO:
            return frozenset({self.setting.strategy})
        return frozenset({self.pick.strategy, self._talks.setting.strategy, PREFIX.strategy})

    @property
    def faulted(self) -> bool:
        """True once an answer labelled exact was not; requests that name no strategy then run full attention."""
        return self._counters["faults"] > 0

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices of answers that the contract gave their setting, after shadow replay has changed it."""
        return () if self._notice is None else (self._notice,)

    def uncovered(self, prompt: Prompt) -> str | None:
        """The reason why `auto` has no evidence of such prompts, "" if it needs no word; None if it has some."""
        if not prompt.chunks or not prompt.preprocessed:
            return ""
        if self._report is None or self.pick == PREFIX or prompt.chunks <= self._report.top_k:
            return None
        most = f"the quality budget was measured with up to {self._report.top_k} chunks, and here are {prompt.chunks}"
        return f"{most}: the request ran prefix, which is exact"

    def without_evidence(self, prompt: Prompt) -> Setting:
        """The setting that `auto` gives to prompts it has no evidence of as `uncovered` asks for it."""
        return PREFIX if prompt.chunks or self.faulted else self._talks.setting

    def predicted(self, setting: Setting, exact: bool, chunks: int, preprocessed: bool = True) -> Divergence | None:
        """Divergence to expect of an answer; None if it was not measured, or not with so many or such chunks."""
        if exact:
            return Divergence(0.0, 1.0)
        if self._report is None or chunks > self._report.top_k:
            return None
        if setting == MOVED and not chunks and (told := self._report.conversations) is not None:
            return Divergence(told.kl, told.top1)
        if setting.strategy in self._preprocessed and not preprocessed:
            return None
        return self._report.predicted(setting)

    @property
    def candidates(self) -> tuple[Setting, ...]:
        """Settings that requests which `auto` picks for are tried by in idle time, since there is no report."""
        return () if self._evidence is None or self.faulted else self._evidence.candidates

    def learn(self, chunks: int, trials: Mapping[Setting, ShadowTrial]) -> None:
        """Take in what a request of so many chunks showed of the candidates; `auto` may pick one from now on."""
        if self._evidence is None:
            return
        self._evidence.take_in(chunks, trials)
        report = self._evidence.report()
        if report is None:
            if not self._evidence.candidates:
                _log.warning("no setting that was tried keeps %s: requests run prefix", self.budget)
                self._evidence = None
            return
        self._report = report  # before the pick: others may read meanwhile how far it speaks
        self._monitor = Monitor(self.budget, report.ladder(self.budget))
        evidence, self._evidence = self._evidence, None
        _log.warning("after %d replayed requests: %s", evidence.requests, self.summary)
        if self._path is not None:
            report.save(self._path)

    def draws(self, picked: bool = False) -> bool:
        if picked and self.candidates:
            return True
        exact = self.pick == self._talks.setting == PREFIX
        rate = max(self._rate, WATCH) if picked and not exact else self._rate
        return rate > 0 and self._random.random() < rate

    def drop(self, reason: str) -> None:
        self._counters[reason] += 1

    def observe(self, setting: Setting, exact: bool, seen: Divergence, covered: bool = True) -> None:
        """A request of this setting was replayed. exact: its answer was labelled so. covered: the report has such."""
        if self.observer is not None:
            self.observer(setting.strategy, seen)
        if exact and seen.kl > self._exact:
            self._fault(setting, seen)
        elif not exact and covered and not self.faulted:
            self._climb(setting, seen)
        self._counters["replayed"] += 1  # last: who waits for it sees what came of it

    def _climb(self, setting: Setting, seen: Divergence) -> None:
        monitor = self._talks if setting == MOVED else self._monitor
        before, verdict = monitor.setting, monitor.add(setting, seen)
        if verdict == "keep":
            return
        self._escalations[verdict] += 1
        after = monitor.setting
        raised = before.strategy == after.strategy and (before.ratio or 0.0) < (after.ratio or 0.0)
        how = "the recompute ratio was raised: " if raised else ""
        self._notice = (
            f"shadow replay found {before} outside the quality budget {self.budget}; {how}requests now run {after}"
        )
        _log.warning("%s", self._notice)
        if self._path is not None and self._report is not None and self._report.questions == LIVE:
            self._path.unlink(missing_ok=True)  # live requests made it, and now show otherwise

    def _fault(self, setting: Setting, seen: Divergence) -> None:
        """An answer that was labelled exact is not: kept KV is wrong, and nothing kept may be trusted."""
        known = self.faulted
        self._counters["faults"] += 1
        if known:
            return
        self._escalations["fault"] += 1
        self._notice = (
            f"shadow replay found an answer of {setting} that was labelled exact and is not (KL {seen.kl:.3g}); "
            "requests now run full attention"
        )
        _log.error("%s", self._notice)

    def stats(self) -> dict[str, float | dict[str, float]]:
        replays = {name: self._counters[name] for name in ("replayed", "dropped", "failed")}
        return {
            "shadow_replays_total": dict(replays),
            "shadow_escalations_total": {name: self._escalations[name] for name in ("raise", "exact", "fault")},
            "shadow_faults_total": self._counters["faults"],
        }
