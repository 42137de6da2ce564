"""Whether a guess pays: how often the documents of a search's stage were the final ones, and how long the rest took.

Algorithm 2 of RAGCache begins with whatever a stage knows. Where early stages are seldom right, as in a flat index, the
device is then busy with wrong documents when the final ones are known. Here a generation begins only where the time
that it is expected to gain is more than the time that it is expected to lose:

    p min(left, compute) > (1 - p) max(compute - left, 0)

p is the share of past searches whose documents after this stage were the final ones, `left` the mean time from this
stage to the last one, and `compute` the time that the whole prompt takes, as what is kept of it is not known yet. Every
search counts, guessed or not.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

LEARNED = 8
"""Searches that are guessed at whatever they are, before what was learned counts."""

FADES = 0.95
"""Weight of past searches, at each new one."""


@dataclass
class _Stage:
    searches: float = 0.0
    right: float = 0.0
    left_s: float = 0.0


@dataclass
class Odds:
    """What past searches tell of the next one, by stage. Any thread may call it."""

    _stages: list[_Stage] = field(default_factory=list)
    _seen: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, right: Sequence[bool], left_s: Sequence[float]) -> None:
        """A search has ended.

        Args:
            right: of each stage but the last, whether its documents were the final ones.
            left_s: of each, seconds from its end to that of the last.
        """
        with self._lock:
            self._seen += 1
            self._stages += [_Stage() for _ in range(len(right) - len(self._stages))]
            for stage, was_right, seconds in zip(self._stages, right, left_s, strict=False):
                stage.searches = FADES * stage.searches + 1
                stage.right = FADES * stage.right + was_right
                stage.left_s = FADES * stage.left_s + seconds

    def pays(self, stage: int, compute_s: float | None) -> bool:
        """Whether to begin with the documents of a stage, counted from 0; yes while too little is known.

        compute_s: seconds that the device takes for the prompt, if known.
        """
        with self._lock:
            if self._seen < LEARNED or compute_s is None or stage >= len(self._stages):
                return True
            known = self._stages[stage]
            share, left_s = known.right / known.searches, known.left_s / known.searches
        return share * min(left_s, compute_s) > (1 - share) * max(compute_s - left_s, 0.0)
