"""Which rows run next. The scheduler owns the running requests; admission (`admission.py`) decides who runs.

Decoding tokens and prefill rows take turns, so that neither starves the other. A move of cached KV has no rows:
whoever owns the device carries it out.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragjax.core import Grid, StepLimits
from ragjax.schedule.batch import Batch, pack, rows_of
from ragjax.schedule.state import RequestState

STEP_ROWS = 35
"""Rows that would take as long to compute as a step costs at any size."""

BLOCK_ROWS = 48
"""Rows that would take as long to compute as a block of rows, of any size, costs: it sweeps a thousand keys or so."""


class Scheduler:
    """Running requests and whose turn it is.

    running: requests that were started, in the order in which their turn comes.
    """

    def __init__(self, grid: Grid, page_size: int):
        self.grid = grid
        self.limits = StepLimits(grid.entries[-1], page_size)
        self.running: list[RequestState] = []
        self._decoded_last = False

    def add(self, state: RequestState) -> None:
        """Take a started request in."""
        self.running.append(state)

    def remove(self, state: RequestState) -> None:
        """Let a request go; nothing happens if it is not here."""
        self.running = [other for other in self.running if other is not state]

    @property
    def in_front(self) -> list[RequestState]:
        """Running requests that are not in the background."""
        return [state for state in self.running if not state.background]

    @property
    def in_background(self) -> list[RequestState]:
        """Running requests in the background."""
        return [state for state in self.running if state.background]

    def _active(self) -> list[RequestState]:
        """Requests in the background rest while any other runs."""
        return self.in_front or self.running

    def next_batch(self) -> Batch | None:
        """The next step's rows, or None when no request has rows, or all wait for KV that is being loaded.

        Decoding tokens go together in small steps; prefill rows of several requests share a step, oldest first.
        """
        waiting = [s for s in self._active() if s.rows is not None and s.rows.left and (s.decoding or s.ready)]
        decoding = [state for state in waiting if state.decoding and len(rows_of(state).token) == 1]
        prefilling = [state for state in waiting if state not in decoding]
        if decoding and (not prefilling or not self._decoded_last):
            self._decoded_last = True
            return self._decode_batch(decoding)
        self._decoded_last = False
        return self._prefill_batch(prefilling) if prefilling else None

    def moving(self) -> list[RequestState]:
        """Requests whose next step is a move, of KV that is on the device."""
        return [state for state in self._active() if state.move is not None and state.ready]

    def _decode_batch(self, states: list[RequestState]) -> Batch:
        widest = max((rows for rows, block in self.grid.rows if block == 1), default=1)
        chosen = self._within_entries(states[:widest])
        # those served go to the back, so that all get their turn
        self.running = [state for state in self.running if state not in chosen] + chosen
        single = [(rows, block) for rows, block in self.grid.rows if block == 1 and rows >= len(chosen)]
        bucket = self.grid.rows[0] if len(chosen) == 1 else single[0]
        return self._pack([(state, 1) for state in chosen], *bucket)

    def _prefill_batch(self, states: list[RequestState]) -> Batch:
        kind = rows_of(states[0]).kind
        states = self._within_entries([state for state in states if rows_of(state).kind == kind])
        lefts = [rows_of(state).left for state in states]
        buckets = [bucket for bucket in self.grid.rows if bucket[1] > 1]
        rows, block = max(buckets, key=lambda bucket: _pace(lefts, *bucket))
        return self._pack(list(zip(states, _takes(lefts, rows, block), strict=False)), rows, block)

    def _within_entries(self, states: list[RequestState]) -> list[RequestState]:
        """The first of the requests, as many as one step can read."""
        entries = 0
        for i, state in enumerate(states):
            entries += len(rows_of(state).table)
            if i and entries > self.limits.entries:
                return states[:i]
        return states

    def _pack(self, parts: Sequence[tuple[RequestState, int]], rows: int, block: int) -> Batch:
        return pack(parts, rows, block, self.grid, self.limits.page_size)


def _pace(lefts: Sequence[int], rows: int, block: int) -> float:
    """Rows of a step of this shape that are of use, over what it costs, in rows."""
    takes = _takes(lefts, rows, block)
    blocks = sum(-(-take // block) for take in takes)
    return sum(takes) / (rows + STEP_ROWS + BLOCK_ROWS * blocks)


def _takes(lefts: Sequence[int], rows: int, block: int) -> list[int]:
    """Rows of each request that a step of this shape takes, oldest first, until it is full."""
    takes = []
    for left in lefts:
        if rows == 0:
            break
        takes.append(min(left, rows))
        rows -= -(-takes[-1] // block) * block
    return takes
