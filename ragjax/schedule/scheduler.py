"""Which rows run next: requests as state machines, and batches of their rows packed into the compiled grid.

No jax here. A task owns one request's conversation; its rows (a pass's, tokens that were given, or the one token being
decoded) wait in `Work`. `next_batch` takes decoding tokens and prefill rows in turn, so that neither starves the other.
A move of cached KV has no rows: it waits in `Task.moving`, and whoever owns the device carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragjax.core import (
    NEVER,
    Grid,
    Measure,
    Move,
    OutOfPages,
    Pass,
    Plan,
    Prompt,
    RequestError,
    Results,
    Span,
    Step,
    StepMeasure,
    Tokens,
)
from ragjax.reuse.base import Allocation, Strategy, most_entries

Residual = Callable[[], NDArray[np.float32]]
"""Gives a step's residual rows, float32 [T, E]: asked only by a pass that goes on where the step ended."""


class PageTable:
    """Spans as entries: one per page and offset, so that short runs share one; int32 arrays [S] and [S, C]."""

    def __init__(self, spans: Sequence[Span], page_size: int):
        entries = _Entries()
        slots = [entries.take(span, page_size) for span in spans]
        total = len(entries.pages)
        self.page_S = np.array(entries.pages, np.int32)
        self.offset_S = np.array(entries.offsets, np.int32)
        self.index_SC = np.full((total, page_size), NEVER, np.int32)
        self.hide_from_SC = np.zeros((total, page_size), np.int32)
        self.hide_until_SC = np.zeros((total, page_size), np.int32)
        for span, slot in zip(spans, slots, strict=True):
            self.index_SC.reshape(-1)[slot] = span.indices
            if span.hidden[0] < span.hidden[1]:
                self.hide_from_SC.reshape(-1)[slot] = span.hidden[0]
                self.hide_until_SC.reshape(-1)[slot] = span.hidden[1]
        self._last = slots[-1] if slots else np.zeros(0, np.intp)

    def __len__(self) -> int:
        return len(self.page_S)

    def show(self, index: int, order: int) -> None:
        """Give the last span's token `index` an order."""
        self.index_SC.reshape(-1)[self._last[index]] = order

    def by_index(self, values_SC: NDArray[np.float32], size: int) -> NDArray[np.float32]:
        """Sum values of slots into their orders: [..., S, C] to [..., size]."""
        live = self.index_SC.reshape(-1) < size
        flat = values_SC.reshape(*values_SC.shape[:-2], -1)[..., live]
        out = np.zeros((*flat.shape[:-1], size), np.float32)
        np.add.at(out.T, self.index_SC.reshape(-1)[live], flat.T)  # axes turned: the order comes first
        return out


class _Entries:
    """Entries as spans take them. Slots of a chunk that stands twice at one offset are taken in entries of their
    own.
    """

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.offsets: list[int] = []
        self._taken: list[NDArray[np.bool_]] = []
        self._open: dict[tuple[int, int], int] = {}

    def take(self, span: Span, page_size: int) -> NDArray[np.intp]:
        """Index of each of the span's slots in [S, C], flat."""
        begin, end, found = span.run.start, span.run.start + span.run.length, []
        for i, page in enumerate(span.run.pages):
            low, high = max(begin - i * page_size, 0), min(end - i * page_size, page_size)
            found.append(self._entry(page, span.offset, low, high, page_size) * page_size + np.arange(low, high))
        return np.concatenate(found) if found else np.zeros(0, np.intp)

    def _entry(self, page: int, offset: int, low: int, high: int, page_size: int) -> int:
        entry = self._open.get((page, offset))
        if entry is None or self._taken[entry][low:high].any():
            entry = self._open[page, offset] = len(self.pages)
            self.pages.append(page)
            self.offsets.append(offset)
            self._taken.append(np.zeros(page_size, bool))
        self._taken[entry][low:high] = True
        return entry


@dataclass(frozen=True)
class Moving:
    """A move in slots (page * C + slot): what to copy where, and by how much to turn each key; int32 [n] each.

    layers: half-open, at boundaries of stages.
    """

    source_N: NDArray[np.int32]
    target_N: NDArray[np.int32]
    offset_N: NDArray[np.int32]
    layers: tuple[int, int]


@dataclass
class Work:
    """Rows that wait to be computed, and what has come back so far.

    token, order, position, slot: int32 [n]. logits_at: row index to result index. context: orders in use. layers: those
    to run, half-open. residual: what the rows bring from earlier layers, float32 [n, E], if these are not the first.
    measure: what is measured, its arrays those of the rows, [n], and of the table, [S, C]; segments as the prompt has.
    measured: per layer of the measure, by order, [..., context], or by row. ended: which rows each step did and
    what it left, if layers are left.
    """

    token: NDArray[np.int32]
    order: NDArray[np.int32]
    position: NDArray[np.int32]
    slot: NDArray[np.int32]
    table: PageTable
    logits_at: dict[int, int]
    context: int
    layers: tuple[int, int]
    residual: NDArray[np.float32] | None = None
    measure: StepMeasure | None = None
    measured: NDArray[np.float32] | None = None
    ended: list[tuple[Piece, Residual]] = field(default_factory=list)
    done: int = 0
    logits: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Rows not yet computed."""
        return len(self.token) - self.done

    @property
    def kind(self) -> tuple[object, ...]:
        """What works must have in common to share a step."""
        return self.layers, self.measure and (self.measure.what, self.measure.layers)

    def take_measured(self, measured: NDArray[np.float32], piece: Piece) -> None:
        """Add what a step measured of rows [piece.begin, piece.end): float32 [layers, ...], of the whole batch."""
        assert self.measure is not None
        rows = slice(piece.row, piece.row + piece.end - piece.begin)
        if self.measure.what is Measure.SEGMENT_SCORE:
            part, axis = measured[:, rows, : self.measure.segments], 1
        elif self.measure.what is Measure.DEVIATION:
            part, axis = measured[..., rows], 2
        else:
            part = self.table.by_index(measured[..., piece.entry : piece.entry + len(self.table), :], self.context)
            self.measured = part if self.measured is None else self.measured + part
            return
        self.measured = part if self.measured is None else np.concatenate([self.measured, part], axis)

    def residual_behind(self) -> NDArray[np.float32]:
        """What all rows bring from the steps that did them, float32 [n, E]."""
        parts = [(residual(), piece) for piece, residual in self.ended]
        return np.concatenate([x_TE[piece.row : piece.row + piece.end - piece.begin] for x_TE, piece in parts])

    def results(self, measures: frozenset[Measure]) -> Results:
        """What a pass with these wants gets, once all rows are computed."""
        found: dict[Measure, NDArray[np.float32]] = {}
        if self.logits_at:
            found[Measure.LOGITS] = np.stack([self.logits[i] for i in range(len(self.logits_at))])
        if self.measure is not None:
            assert self.measured is not None
            found |= _by_want(self.measure.what, self.measured)
        return {what: value for what, value in found.items() if what in measures or what is Measure.LOGITS}


def _by_want(what: Measure, measured: NDArray[np.float32]) -> dict[Measure, NDArray[np.float32]]:
    if what is Measure.VALUED_SCORE:
        return {Measure.KEY_SCORE: measured[:, 0], Measure.VALUED_SCORE: measured[:, 1]}
    return {what: measured.swapaxes(0, 1) if what is Measure.DEVIATION else measured}


class Task:
    """One request from its first pass to its last token.

    work: rows that wait for their turn. moving: a move that waits to be carried out; `pass_done` goes on behind it.
    """

    def __init__(
        self, prompt: Prompt, strategy: Strategy, allocation: Allocation, label: str, ratio: float | None = None
    ):
        self.prompt = prompt
        self.strategy = strategy
        self.allocation = allocation
        self.label = label
        self.plan: Plan | None = None
        self.work: Work | None = None
        self.moving: Moving | None = None
        self.generated: list[int] = []
        self._measures: frozenset[Measure] = frozenset()
        self._before: Work | None = None
        self._tail_N = np.zeros(0, np.int32)  # slots of generated tokens, once there may be any
        self._prefill = strategy.prefill(prompt, allocation, ratio)

    @property
    def decoding(self) -> bool:
        """Whether the prompt is done."""
        return self.plan is not None

    @property
    def ready(self) -> bool:
        """Whether all KV that its next rows read is on the device."""
        return self.allocation.ready and self.allocation.broken is None

    def start(self) -> None:
        """Match, reserve, and reach the first pass or move, or the plan of a conversation that needs none.

        Raises:
            OutOfPages: when there is no room now; the task holds nothing then and a fresh one may try later.
        """
        try:
            self._begin(next(self._prefill))
        except StopIteration as stop:
            self.plan = stop.value
        except OutOfPages:
            self.close()
            raise

    def pass_done(self) -> None:
        """Hand the results of the finished pass or move to the strategy; sets the next one, or the plan."""
        results: Results = {}
        if self.moving is None:
            self._before = self._finished_work()
            results = self._before.results(self._measures)
        try:
            self._begin(self._prefill.send(results))
        except StopIteration as stop:
            self.plan = stop.value
            self.work = self.moving = self._before = None

    def force(self, tokens: Tokens) -> None:
        """Set the work of computing given tokens, int32 [n], behind the prompt, before anything is decoded.

        The work comes back with the logits of all of them: `work.logits[i]` are those behind token i. Set `work` to
        None then, and decoding starts as if nothing had been: it writes over these tokens.

        Raises:
            ValueError: if there are none, or more than slots for generated tokens.
        """
        assert self.plan is not None and self.work is None
        n, size = len(tokens), len(self.prompt)
        if not 0 < n <= self.plan.tail.length:
            raise ValueError(f"{n} tokens were given; there are slots for {self.plan.tail.length}")
        table = self._open_tail(self.plan)
        for index in range(n):
            table.show(index, size + index)
        order, slot = np.arange(size, size + n, dtype=np.int32), self._tail_N[:n]
        logits_at = {i: i for i in range(n)}
        self.work = Work(np.asarray(tokens, np.int32), order, order, slot, table, logits_at, size + n, self._all_layers)

    def decode(self, token: int) -> None:
        """Take a generated token and set the work of computing it, which yields the next one's logits.

        The work comes back as `work.logits[0]`.
        """
        assert self.plan is not None
        table = self._open_tail(self.plan) if self.work is None else self.work.table
        index = len(self.generated)
        order = len(self.prompt) + index
        self.generated.append(token)
        table.show(index, order)
        row = np.array([order], np.int32)
        slot = self._tail_N[index : index + 1]
        self.work = Work(np.array([token], np.int32), row, row, slot, table, {0: 0}, order + 1, self._all_layers)

    def finish(self) -> None:
        """Let the strategy keep what it wants of the generated tokens whose KV exists."""
        if self.plan is None:
            return
        computed = len(self.generated) - (1 if self.work is not None and self.work.left else 0)
        self.strategy.finish(self.prompt, self.plan, np.array(self.generated[:computed], np.int32), self.allocation)

    def close(self) -> None:
        """Stop the conversation and give everything back. Safe at any pass boundary, and more than once."""
        self._prefill.close()
        self.work = self.moving = self._before = None
        self.allocation.close()

    @property
    def _all_layers(self) -> tuple[int, int]:
        return 0, self.allocation.stages[-1]

    def _begin(self, asked: Pass | Move) -> None:
        if isinstance(asked, Move):
            self.work, self.moving = None, self._moving(asked)
        else:
            self.work, self.moving, self._measures = self._work(asked), None, asked.measures

    def _moving(self, move: Move) -> Moving:
        page_size, size = self.allocation.page_size, len(self.prompt)
        source, offset = _places(move.source, size, page_size)
        target, _ = _places((span for span in move.target if span.offset == 0), size, page_size)
        self._expect((source[move.indices] >= 0).all(), "moves tokens that its source does not hold")
        self._check_own(target[move.indices])
        return Moving(source[move.indices], target[move.indices], offset[move.indices], move.layers)

    def _work(self, asked: Pass) -> Work:
        page_size, size, rows = self.allocation.page_size, len(self.prompt), asked.rows
        layers = asked.layers or self._all_layers
        self._check(asked, layers)
        slots, _ = _places((span for span in asked.spans if span.offset == 0), size, page_size)
        self._check_own(slots[rows])
        table = self._table(asked.spans)
        at = np.searchsorted(rows, np.array(asked.logits, np.int32))
        return Work(
            token=self.prompt.tokens[rows],
            order=rows,
            position=asked.positions,
            slot=slots[rows],
            table=table,
            logits_at={int(row): i for i, row in enumerate(at)},
            context=size,
            layers=layers,
            residual=self._residual(rows, layers[0]),
            measure=self._measure(asked, layers, table),
        )

    def _check(self, asked: Pass, layers: tuple[int, int]) -> None:
        begin, end = layers
        stages = self.allocation.stages
        self._expect(len(asked.rows) > 0, "made a pass without rows")
        self._expect(begin in stages and begin < end <= stages[-1], f"made a pass over layers {layers} of {stages}")
        self._expect(not asked.logits or end == stages[-1], "wants logits of a pass that ends before the last layer")
        for name, indices in (("logits", asked.logits), ("asking", () if asked.asking is None else asked.asking)):
            self._expect(np.isin(indices, asked.rows).all(), f"names orders in {name} that are not among the rows")
        low, high = asked.measured or layers
        self._expect(begin <= low < high <= end, f"measures layers {asked.measured} of a pass over {layers}")

    def _residual(self, rows: NDArray[np.int32], begin: int) -> NDArray[np.float32] | None:
        """What the rows bring from the pass before."""
        if begin == 0:
            return None
        before = self._before
        if before is None or before.layers[1] != begin:
            raise ValueError(f"{self.strategy.name} goes on at layer {begin}, where no pass ended before")
        self._expect(np.isin(rows, before.order).all(), "goes on with rows that the pass before did not have")
        return before.residual_behind()[np.searchsorted(before.order, rows)]

    def _measure(self, asked: Pass, layers: tuple[int, int], table: PageTable) -> StepMeasure | None:
        measures = asked.measures - {Measure.LOGITS}
        what = Measure.VALUED_SCORE if Measure.VALUED_SCORE in measures else next(iter(measures), None)
        if what is None:
            return None
        together = {what, Measure.KEY_SCORE} if what is Measure.VALUED_SCORE else {what}
        self._expect(measures <= together, f"wants {', '.join(sorted(measures))} of one pass")
        return StepMeasure(
            what, asked.measured or layers, self._measure_arrays(what, asked, table), len(self.prompt.segments)
        )

    def _measure_arrays(self, what: Measure, asked: Pass, table: PageTable) -> Mapping[str, NDArray[np.int32]]:
        if what is Measure.DEVIATION:
            stale, offset = _places(asked.stale, len(self.prompt), self.allocation.page_size)
            return {"stale_T": stale[asked.rows], "offset_T": offset[asked.rows]}
        if what is Measure.SEGMENT_SCORE:
            return {"segment_T": self._segment(asked.rows), "segment_SC": self._segment(table.index_SC)}
        counts = np.ones(len(asked.rows), bool) if asked.asking is None else np.isin(asked.rows, asked.asking)
        asking = {"asking_T": counts.astype(np.int32)}
        return asking | {"segment_SC": self._segment(table.index_SC)} if what is Measure.CHUNK_SCORE else asking

    def _segment(self, order: NDArray[np.int32]) -> NDArray[np.int32]:
        """The segment of each order, -1 behind the prompt."""
        segment = np.searchsorted(self.prompt.starts, order, side="right").astype(np.int32) - 1
        return np.where(order < len(self.prompt), segment, np.int32(-1))

    def _expect(self, held: bool | np.bool_, what: str) -> None:
        if not held:
            raise ValueError(f"{self.strategy.name} {what}")

    def _check_own(self, slots: NDArray[np.int32]) -> None:
        own = np.fromiter(self.allocation.own_pages, np.int32)
        if (slots < 0).any() or not np.isin(slots // self.allocation.page_size, own).all():
            raise RuntimeError(f"{self.strategy.name} would write into cached pages")

    def _open_tail(self, plan: Plan) -> PageTable:
        """The prompt's keys as generated tokens see them, and these, hidden as yet; where they go is known now."""
        hidden = np.full(plan.tail.length, NEVER, np.int32)
        self._tail_N = plan.tail.slots(self.allocation.page_size)
        return self._table((*plan.spans, Span(hidden, plan.tail)))

    def _table(self, spans: Sequence[Span]) -> PageTable:
        table = PageTable(spans, self.allocation.page_size)
        if len(table) > self.allocation.entries:
            raise RequestError(
                f"the prompt is in too many pieces for one step: {len(table)} entries, at most "
                f"{self.allocation.entries}. "
                "Shorten the prompt or use fewer chunks",
                param="messages",
                code="context_length_exceeded",
            )
        return table

    def _finished_work(self) -> Work:
        assert self.work is not None and not self.work.left
        return self.work


def _places(spans: Iterable[Span], size: int, page_size: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Slot of each order, -1 where there is none, and RoPE offset, int32 [size]."""
    slot, offset = np.full(size, -1, np.int32), np.zeros(size, np.int32)
    for span in spans:
        live = span.indices < size
        slot[span.indices[live]] = span.run.slots(page_size)[live]
        offset[span.indices[live]] = span.offset
    return slot, offset


@dataclass(frozen=True)
class Piece:
    """Rows [begin, end) of a task's work, at rows [row, ...) and entries [entry, ...) of the batch."""

    task: Task
    begin: int
    end: int
    row: int
    entry: int


@dataclass(frozen=True)
class Batch:
    """What runs in one step."""

    pieces: tuple[Piece, ...]
    step: Step
    logit_rows: tuple[int, ...]

    def deliver(
        self,
        logits: NDArray[np.float32] | None,
        measured: NDArray[np.float32] | None = None,
        residual: Residual | None = None,
    ) -> list[Task]:
        """Hand results to the tasks' work; return the tasks whose work is done.

        Args:
            logits: float32 [n, V] of `logit_rows`.
            measured: what the step's measure asked for, float32 [layers, ...].
            residual: gives what the step left of its rows.
        """
        done, taken = [], 0
        for piece in self.pieces:
            work = _work(piece.task)
            for row in range(piece.begin, piece.end):
                if row in work.logits_at:
                    assert logits is not None
                    work.logits[work.logits_at[row]] = logits[taken]
                    taken += 1
            if work.measure is not None:
                assert measured is not None
                work.take_measured(measured, piece)
            if residual is not None and work.layers[1] < piece.task.allocation.stages[-1]:
                work.ended.append((piece, residual))
            work.done = piece.end
            if not work.left:
                done.append(piece.task)
        return done


class Scheduler:
    """Running tasks and whose turn it is."""

    def __init__(self, grid: Grid, page_size: int):
        self.grid = grid
        self.page_size = page_size
        self.tasks: list[Task] = []
        self._decoded_last = False

    def fits(self, spans: int, tokens: int) -> bool:
        """Whether a request of that many spans and tokens (generated ones included) fits the largest entry bucket."""
        return most_entries(tokens, spans, self.page_size) <= self.grid.entries[-1]

    def next_batch(self) -> Batch | None:
        """The next step's rows, or None when no task has work, or all wait for KV that is being loaded.

        Decoding tokens go together in small steps; prefill rows of several tasks share a step, oldest first.
        """
        waiting = [t for t in self.tasks if t.work is not None and t.work.left and (t.decoding or t.ready)]
        decoding = [task for task in waiting if task.decoding and len(_work(task).token) == 1]
        prefilling = [task for task in waiting if task not in decoding]
        if decoding and (not prefilling or not self._decoded_last):
            self._decoded_last = True
            return self._decode_batch(decoding)
        self._decoded_last = False
        return self._prefill_batch(prefilling) if prefilling else None

    def moving(self) -> list[Task]:
        """Tasks whose next step is a move, of KV that is on the device."""
        return [task for task in self.tasks if task.moving is not None and task.ready]

    def _decode_batch(self, tasks: list[Task]) -> Batch:
        widest = max((rows for rows, block in self.grid.rows if block == 1), default=1)
        chosen = self._within_entries(tasks, widest)
        # those served go to the back, so that all get their turn
        self.tasks = [task for task in self.tasks if task not in chosen] + chosen
        if len(chosen) == 1:
            return self._pack([(chosen[0], 0, 1)], *self.grid.rows[0])
        rows, block = next((rows, block) for rows, block in self.grid.rows if block == 1 and rows >= len(chosen))
        return self._pack([(task, 0, 1) for task in chosen], rows, block)

    def _prefill_batch(self, tasks: list[Task]) -> Batch:
        kind = _work(tasks[0]).kind
        tasks = [task for task in tasks if _work(task).kind == kind]
        tasks = self._within_entries(tasks, len(tasks))
        lefts = [_work(task).left for task in tasks]
        buckets = [bucket for bucket in self.grid.rows if bucket[1] > 1]
        rows, block = max(buckets, key=lambda bucket: _pace(lefts, *bucket))
        takes = _takes(lefts, rows, block)
        begins = [_work(task).done for task in tasks]
        parts = zip(tasks, begins, takes, strict=False)
        return self._pack([(task, begin, begin + take) for task, begin, take in parts], rows, block)

    def _within_entries(self, tasks: list[Task], most: int) -> list[Task]:
        chosen: list[Task] = []
        entries = 0
        for task in tasks[:most]:
            entries += len(_work(task).table)
            if chosen and entries > self.grid.entries[-1]:
                break
            chosen.append(task)
        return chosen

    def _pack(self, parts: list[tuple[Task, int, int]], rows: int, block: int) -> Batch:
        works = [_work(task) for task, _, _ in parts]
        entries = Grid.fit(self.grid.entries, sum(len(work.table) for work in works))
        step = _empty_step(rows, entries, self.page_size, works, self.grid)
        pieces, logit_rows, row, entry = [], [], 0, 0
        for index, (task, begin, end) in enumerate(parts):
            work = works[index]
            _fill(step, work, index, begin, end, row, entry)
            pieces.append(Piece(task, begin, end, row, entry))
            logit_rows += [row + i - begin for i in range(begin, end) if i in work.logits_at]
            row += -(-(end - begin) // block) * block
            entry += len(work.table)
        return Batch(tuple(pieces), step, tuple(logit_rows))


STEP_ROWS = 35
"""Rows that would take as long to compute as a step costs at any size."""

BLOCK_ROWS = 48
"""Rows that would take as long to compute as a block of rows, of any size, costs: it sweeps a thousand keys or so."""


def _pace(lefts: Sequence[int], rows: int, block: int) -> float:
    """Rows of a step of this shape that are of use, over what it costs, in rows."""
    takes = _takes(lefts, rows, block)
    blocks = sum(-(-take // block) for take in takes)
    return sum(takes) / (rows + STEP_ROWS + BLOCK_ROWS * blocks)


def _takes(lefts: Sequence[int], rows: int, block: int) -> list[int]:
    """Rows of each task that a step of this shape takes, oldest first, until it is full."""
    takes = []
    for left in lefts:
        if rows == 0:
            break
        takes.append(min(left, rows))
        rows -= -(-takes[-1] // block) * block
    return takes


def _work(task: Task) -> Work:
    assert task.work is not None
    return task.work


PADDING = {"asking_T": 0, "segment_T": -1, "segment_SC": -1, "stale_T": -1, "offset_T": 0}
"""What a measure's arrays hold for rows of padding and unused entries."""


def _empty_step(rows: int, entries: int, page_size: int, works: Sequence[Work], grid: Grid) -> Step:
    """A step for works of one kind, as yet without their rows and entries."""

    def filled(value: int, *shape: int) -> NDArray[np.int32]:
        return np.full(shape, value, np.int32)

    first = works[0]
    measure = residual_TE = None
    if first.residual is not None:
        residual_TE = np.zeros((rows, first.residual.shape[1]), np.float32)
    if first.measure is not None:
        sizes = {"T": (rows,), "SC": (entries, page_size)}
        arrays = {name: filled(PADDING[name], *sizes[name.rsplit("_", 1)[1]]) for name in first.measure.arrays}
        most = max(work.measure.segments for work in works if work.measure is not None)
        by_segment = "segment_SC" in arrays
        measure = StepMeasure(
            first.measure.what, first.measure.layers, arrays, grid.fit_segments(most) if by_segment else 0
        )
    return Step(
        token_T=filled(0, rows),
        index_T=filled(-1, rows),
        position_T=filled(0, rows),
        request_T=filled(-1, rows),
        slot_T=filled(0, rows),
        page_S=filled(0, entries),
        offset_S=filled(0, entries),
        request_S=filled(-1, entries),
        index_SC=filled(int(NEVER), entries, page_size),
        hide_from_SC=filled(0, entries, page_size),
        hide_until_SC=filled(0, entries, page_size),
        layers=first.layers,
        residual_TE=residual_TE,
        measure=measure,
    )


def _fill(step: Step, work: Work, request: int, begin: int, end: int, row: int, entry: int) -> None:
    rows, taken = slice(row, row + end - begin), slice(begin, end)
    step.token_T[rows] = work.token[taken]
    step.index_T[rows] = work.order[taken]
    step.position_T[rows] = work.position[taken]
    step.slot_T[rows] = work.slot[taken]
    step.request_T[rows] = request
    entries = slice(entry, entry + len(work.table))
    step.page_S[entries] = work.table.page_S
    step.offset_S[entries] = work.table.offset_S
    step.request_S[entries] = request
    step.index_SC[entries] = work.table.index_SC
    step.hide_from_SC[entries] = work.table.hide_from_SC
    step.hide_until_SC[entries] = work.table.hide_until_SC
    if step.residual_TE is not None and work.residual is not None:
        step.residual_TE[rows] = work.residual[taken]
    if step.measure is not None and work.measure is not None:
        for name, x in work.measure.arrays.items():
            if name.endswith("_SC"):
                step.measure.arrays[name][entries] = x
            else:
                step.measure.arrays[name][rows] = x[taken]
