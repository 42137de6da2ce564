"""Rows of several requests packed into one step of the compiled grid, and its results handed back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Chosen, Grid, Residual, RowShape, Step, StepMeasure
from ragjax.core.step import STEP_ARRAYS, padding
from ragjax.schedule.rows import PendingRows, SpanTable
from ragjax.schedule.state import RequestState

BLOCK_READS = 2.0
"""What an entry costs that a block of rows reads together, in reads of a row alone."""


@dataclass(frozen=True)
class Group:
    """Requests that share the first entries of their page tables."""

    members: tuple[int, ...]
    entries: int
    blocks: int  # of rows that read them together
    saved: float  # reads of an entry by a row alone that this saves

    @property
    def listed(self) -> int:
        return self.entries * self.blocks


def find_groups(tables: Sequence[SpanTable], rows: Sequence[int], sharing: tuple[int, int]) -> list[Group]:
    """Find requests that share the first entries of their page tables, so that their rows read these keys together.

    Each row then looks at the rest alone; both parts merge exactly (Hydragen, arXiv 2402.05099; cascade inference in
    FlashInfer, arXiv 2501.01005). A request is in one group at most; of nested groups those are taken that save most.
    rows: how many each request has. sharing: places for rows, and places of a block (`core.RowShape.sharing`).
    """
    places, block = sharing
    if not places or len(tables) < 2:
        return []
    lasting = [table.lasting for table in tables]

    def best(members: Sequence[int]) -> list[Group]:
        """The groups of some requests that together save most."""
        lists = [lasting[i][: min(len(lasting[j]) for j in members)] for i in members]
        same = (np.stack(lists) == lists[0]).all(0)
        common = len(same) if same.all() else int(same.argmin())
        parts: dict[int, list[int]] = {}
        for i in members:
            if len(lasting[i]) > common:
                parts.setdefault(int(lasting[i][common]), []).append(i)
        apart = [group for part in parts.values() if len(part) > 1 for group in best(part)]
        count = sum(rows[i] for i in members)
        blocks = -(-count // block)
        together = Group(tuple(members), common, blocks, common * (count - BLOCK_READS * blocks))
        return [together] if together.saved > sum(group.saved for group in apart) else apart

    found = best(range(len(tables)))
    chosen, left = [], places // block
    for group in sorted(found, key=lambda group: -group.saved):
        if group.blocks <= left:
            chosen.append(group)
            left -= group.blocks
    return chosen


def rows_of(state: RequestState) -> PendingRows:
    assert state.rows is not None
    return state.rows


@dataclass(frozen=True)
class ScheduledRows:
    """Rows [row, ...) and page-table entries [entry, ...) that a step has for a request's pending rows [begin, end)."""

    state: RequestState
    rows: PendingRows
    begin: int
    end: int
    row: int
    entry: int

    @property
    def count(self) -> int:
        return self.end - self.begin

    @property
    def taken(self) -> slice:
        return slice(self.row, self.row + self.count)

    @property
    def live(self) -> bool:
        """True if the request still waits for them: it has neither ended nor been started again."""
        return self.rows is self.state.rows

    @property
    def reads_logits(self) -> bool:
        """True if the host looks at the logits of its rows, not only at the tokens that the device chooses."""
        if self.rows.sampled:
            return self.state.wants_logits
        return self.state.decoding or self.state.reads_logits

    @property
    def logit_rows(self) -> list[int]:
        return [row for row in range(self.begin, self.end) if row in self.rows.logits_now]


@dataclass(frozen=True)
class Batch:
    """Rows that run in one step."""

    parts: tuple[ScheduledRows, ...]
    step: Step
    logit_rows: tuple[int, ...]  # those whose logits are wanted

    @property
    def states(self) -> list[RequestState]:
        return [part.state for part in self.parts if part.live]

    def deliver(
        self,
        logits: NDArray[np.float32] | Mapping[int, NDArray[np.float32]] | None,
        measured: NDArray[np.float32] | None = None,
        residual: Residual | None = None,
        chosen: Sequence[Chosen] | None = None,
    ) -> list[RequestState]:
        """Hand results to the rows; return the requests whose rows are all computed.

        Args:
            logits: float32 [n, V] of `logit_rows`, or [V] of some of them by number.
            measured: float32 [layers, ...].
            residual: what the step left of its rows.
            chosen: tokens for `logit_rows`; they count where rows are sampled, and behind a prompt.
        """
        done, taken = [], 0
        for part in self.parts:
            first, taken = taken, taken + len(part.logit_rows)
            if not part.live:
                continue
            rows = part.rows
            scores = part.state.plan is not None and part.state.wants_scores
            for at, row in enumerate(part.logit_rows, first):
                number = rows.logits_at[row]
                if logits is not None and (not isinstance(logits, Mapping) or at in logits):
                    read = logits[at]
                    rows.logits[number] = part.state.read(read, number + 1) if scores else read
                if chosen is not None and (rows.sampled or number == rows.first_at):
                    rows.chosen[number] = chosen[at]
            if rows.measure_now is not None:
                assert measured is not None and self.step.measure is not None
                rows.take_measured(measured, part.taken, part.entry, self.step.measure.layers[0])
            if residual is not None and rows.layers[1] < part.state.all_layers[1]:
                rows.ended.append((part.row, part.count, residual))
            rows.done = part.end
            if not rows.left and not rows.go_on():
                done.append(part.state)
        return done


Takes = Sequence[tuple[RequestState, int]]
"""Requests, and how many of their next rows a step takes."""


def pack(
    single: Takes, many: Takes, shape: RowShape, grid: Grid, page_size: int, groups: Sequence[Group] = ()
) -> Batch:
    """One step of a shape, from the next rows of requests.

    single: whose rows go in front, in blocks of one. many: whose rows go behind; each request's begin in a block of
    their own. groups: which requests, counted from the first, share keys, of those whose rows are in blocks of one.
    """
    pending = [rows_of(state) for state, _ in (*single, *many)]
    shared = {member: group.entries for group in groups for member in group.members}
    listed = sum(len(one.table) - shared.get(i, 0) for i, one in enumerate(pending))
    step = _empty_step(shape, listed + sum(group.listed for group in groups), page_size, pending, grid)
    scheduled, logit_rows, entry = [], [], 0
    for request, (state, take, row) in enumerate(_places(single, many, shape)):
        one = rows_of(state)
        part = ScheduledRows(state, one, one.done, one.done + take, row, entry)
        _fill(step, part, request, shared.get(request, 0))
        scheduled.append(part)
        logit_rows += [row + i - part.begin for i in part.logit_rows]
        entry += len(one.table) - shared.get(request, 0)
    _share(step, groups, scheduled, shape, entry)
    return Batch(tuple(scheduled), _carry(step, scheduled), tuple(logit_rows))


def _carry(step: Step, scheduled: Sequence[ScheduledRows]) -> Step:
    """The step with what its rows bring from the layers before: as it lies on the device, if they keep their places."""
    parts = [(part, carried) for part in scheduled if (carried := part.rows.residual) is not None]
    if not parts:
        return step
    steps = [carried.at(part.begin, part.end, part.row) for part, carried in parts]
    if steps[0] is not None and all(one is steps[0] for one in steps) and len(steps[0]) == len(step.token_T):
        return replace(step, residual_TE=steps[0])
    arrays = [carried.read(part.begin, part.end) for part, carried in parts]
    residual_TE = np.zeros((len(step.token_T), arrays[0].shape[1]), np.float32)
    for (part, _), x_NE in zip(parts, arrays, strict=True):
        residual_TE[part.taken] = x_NE
    return replace(step, residual_TE=residual_TE)


def _places(single: Takes, many: Takes, shape: RowShape) -> Iterator[tuple[RequestState, int, int]]:
    """Requests, how many rows each has in the step, and the first of them."""
    row = 0
    for state, take in single:
        yield state, take, row
        row += take
    row = shape.single
    for state, take in many:
        yield state, take, row
        row += -(-take // shape.block) * shape.block


def _share(
    step: Step, groups: Sequence[Group], scheduled: Sequence[ScheduledRows], shape: RowShape, entry: int
) -> None:
    """Place the rows of groups, and list the keys that they share, from an entry on."""
    block, number = shape.sharing[1], 0
    for group in groups:
        members = [scheduled[member] for member in group.members]
        rows = [row for part in members for row in range(part.row, part.row + part.count)]
        for begin in range(0, len(rows), block):
            chosen = rows[begin : begin + block]
            step.sharer_O[number * block : number * block + len(chosen)] = chosen
            put_table(step, entry, shape.rows + number, rows_of(members[0].state).table, 0, group.entries)
            number, entry = number + 1, entry + group.entries


def empty_step(shape: RowShape, entries: int, page_size: int) -> Step:
    arrays: dict[str, Any] = {**padding(STEP_ARRAYS, shape.rows, entries, page_size, shape.sharing[0])}
    return Step(**arrays)


def put_table(step: Step, entry: int, request: int, table: SpanTable, begin: int, end: int) -> None:
    """Write entries [begin, end) of a page table into the step, as a request's, from an entry on."""
    at, taken = slice(entry, entry + end - begin), slice(begin, end)
    step.page_S[at] = table.page_S[taken]
    step.offset_S[at] = table.offset_S[taken]
    step.request_S[at] = request
    step.index_SC[at] = table.index_SC[taken]
    step.hide_from_SC[at] = table.hide_from_SC[taken]
    step.hide_until_SC[at] = table.hide_until_SC[taken]


def _empty_step(shape: RowShape, need: int, page_size: int, pending: Sequence[PendingRows], grid: Grid) -> Step:
    rows, entries = shape.rows, Grid.fit(grid.entries_of(shape), need)
    first = pending[-1]  # decoding tokens come first, and have no say
    measure = None  # one for requests that measure the same, in all layers that one of them names
    if measured := [measure for one in pending if (measure := one.measure_now) is not None]:
        arrays = padding(measured[0].arrays, rows, entries, page_size)
        segments = grid.fit_segments(max(one.segments for one in measured)) if "segment_SC" in arrays else 0
        layers = min(one.layers[0] for one in measured), max(one.layers[1] for one in measured)
        measure = StepMeasure(measured[0].what, layers, arrays, segments)
    return replace(empty_step(shape, entries, page_size), layers=first.layers, measure=measure)


def _fill(step: Step, part: ScheduledRows, request: int, shared: int) -> None:
    pending, taken, rows = part.rows, slice(part.begin, part.end), part.taken
    entries = slice(part.entry, part.entry + len(pending.table) - shared)
    step.token_T[rows] = pending.token[taken]
    step.index_T[rows] = pending.index[taken]
    step.position_T[rows] = pending.position[taken]
    step.slot_T[rows] = pending.slot[taken]
    step.request_T[rows] = request
    put_table(step, part.entry, request, pending.table, shared, len(pending.table))
    if step.measure is not None and (measure := pending.measure_now) is not None:
        for name, x in measure.arrays.items():
            if name.endswith("_SC"):
                step.measure.arrays[name][entries] = x
            else:
                step.measure.arrays[name][rows] = x[taken]
