"""Layer-wise loading: a pass begins before all KV that it reads has arrived (Cache-Craft, section 3.4.2, Algorithm 2).

KV arrives a stage of layers at a time (`core.tiers.Load`), so the pass is cut where stages begin. It begins once S_p
stages have arrived, the paper's preloading depth L_p in units of stages; from then on a stage runs as soon as it is
there. If loads and passes take as long as predicted, no stage is waited for. Algorithm 2 loads L_p layers beyond the
one that runs. Here loads never stop for passes, so nobody has to wait for layers that run later.

What the paper leaves open: of loads from several tiers the slowest counts; while either time is not known, all stages
are waited for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ragjax.schedule.batch import Batch, rows_of
from ragjax.schedule.state import RequestState

FADES = 0.7
"""What the past counts for the pace of prefill after each step."""


def depth(stages: int, prefill_s: float, load_s: float) -> int:
    """Stages that must have arrived before the first one runs, so that none is waited for later (equation 16).

    stages: how many there are, S. prefill_s, load_s: seconds that the whole pass computes, and that its KV is loaded.
    """
    if load_s <= prefill_s:
        return 1
    return max(1, math.ceil((stages - 1) * (1 - prefill_s / load_s) + 1 - 1e-9))


def reach(first: int, last: int, arrived: int, lead: int, stages: int) -> int:
    """The stage before which a pass over stages [first, last) has to stop for now; `first`: it cannot begin.

    arrived: how many have, of `stages` in all. lead: the preloading depth.
    """
    if first == 0 and arrived < min(lead, stages):
        return first
    return max(first, min(last, arrived))


@dataclass
class Preload:
    """Cuts passes whose KV has arrived in part.

    keys: keys whose attention costs as much as the rest of a row.
    """

    keys: int
    _units: float = 0.0
    _seconds: float = 0.0

    def note(self, batch: Batch, seconds: float) -> None:
        """Learn the pace of prefill from a step that was waited for, as the logits of a whole pass are."""
        units = sum(
            self._cost(part.state, part.placed.count)
            for part in batch.parts
            if part.live and not part.state.decoding and batch.step.layers == part.state.reader.all_layers
        )
        if units and batch.logit_rows:
            self._units, self._seconds = FADES * self._units + units, FADES * self._seconds + seconds

    def seconds(self, tokens: int) -> float | None:
        """How long so many tokens take to compute, by the last prefill steps; None if there were none."""
        return tokens * self._seconds / self._units if self._units else None

    def may_run(self, state: RequestState) -> bool:
        """Whether rows of a request that computes its prompt may run now; they are cut to what may."""
        allocation, rows = state.reader.allocation, rows_of(state)
        if rows.done and allocation.broken is None:
            return True
        boundaries = allocation.stages
        first = boundaries.index(rows.layers[0])
        last = next(i for i, layer in enumerate(boundaries) if layer >= rows.end)
        stop = reach(first, last, state.stages_ready, self._lead(state), len(boundaries) - 1)
        if stop == first:
            return False
        rows.cut(min(boundaries[stop], rows.end))
        return True

    def _lead(self, state: RequestState) -> int:
        """The preloading depth of a request; all stages if it is not known how long loads or passes take."""
        allocation, rows = state.reader.allocation, rows_of(state)
        stages, load_s = len(allocation.stages) - 1, allocation.load_seconds
        if load_s is None or not self._units:
            return stages
        return depth(stages, self._cost(state, len(rows.token)) * self._seconds / self._units, load_s)

    def _cost(self, state: RequestState, rows: int) -> float:
        """Of so many rows through all layers."""
        return rows * (1 + len(rows_of(state).table) * state.reader.allocation.page_size / self.keys)
