"""Evidence that live requests give of settings without a report, until it is enough for one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from ragjax.core import Divergence
from ragjax.quality.report import Budget, Measurement, Report, Setting, bounds

CANDIDATES = (
    Setting("naive"),
    Setting("anchor", 0.0),
    Setting("fusion", 0.0),
    Setting("anchor", 0.05),
    Setting("anchor", 0.15),
)
"""Settings that are tried, from the one on that is expected to be fastest."""

NEEDED = 32  # live requests behind each figure of a report
MOST = 96  # live requests after which settings that are still in doubt are given up
LIVE = "live requests"  # the questions of a report that was made of them


@dataclass(frozen=True)
class ShadowTrial:
    """One request by one setting: its distance from `full`, milliseconds of prefill, share of chunk tokens computed."""

    seen: Divergence
    prefill_ms: float
    share: float


class LiveEvidence:
    """Trials of the candidates, and the report that they make.

    A setting whose KL is surely above the budget, or is not finite, is not tried again. blank: the report, but for what
    is measured.
    """

    def __init__(self, blank: Report, budget: Budget, candidates: Sequence[Setting]):
        self._blank = blank
        self._budget = budget
        self._trials: dict[Setting, list[ShadowTrial]] = {setting: [] for setting in candidates}
        self._chunks: list[int] = []

    @property
    def candidates(self) -> tuple[Setting, ...]:
        found, limit = [], self._budget.kl
        for setting, trials in self._trials.items() if len(self._chunks) < MOST else ():
            seen = [trial.seen.kl for trial in trials]
            beyond = limit is not None and len(seen) >= NEEDED // 2 and bounds(seen)[0] > limit
            if all(map(math.isfinite, seen)) and not beyond:
                found.append(setting)
        return tuple(found)

    @property
    def requests(self) -> int:
        return len(self._chunks)

    def take_in(self, chunks: int, trials: Mapping[Setting, ShadowTrial]) -> None:
        self._chunks.append(chunks)
        for setting, trial in trials.items():
            self._trials[setting].append(trial)

    def report(self) -> Report | None:
        """The report of the settings that were tried often enough, if one lies inside the budget.

        It speaks of as many chunks as half of the requests had at least.
        """
        rows = tuple(
            Measurement.of(setting, [t.seen for t in trials], [t.prefill_ms for t in trials], [t.share for t in trials])
            for setting, trials in self._trials.items()
            if len(trials) >= NEEDED and all(math.isfinite(trial.seen.kl) for trial in trials)
        )
        now = datetime.now(UTC).isoformat(timespec="seconds")
        usual = sorted(self._chunks)[len(self._chunks) // 2] if self._chunks else 1
        made = replace(self._blank, created=now, questions=LIVE, top_k=usual, measurements=rows)
        return None if made.cheapest(self._budget) is None else made
