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
    Move,
    OutOfPages,
    Pass,
    Plan,
    Probe,
    Prompt,
    RequestError,
    Results,
    Span,
    Step,
    Tokens,
    Want,
)
from ragjax.reuse.base import Holding, Strategy, most_slots

Residual = Callable[[], NDArray[np.float32]]
"""Gives a step's residual rows, float32 [T, E]: asked only by a pass that goes on where the step ended."""


class SlotTable:
    """Spans as slots: one per page and offset, so that short runs share one; int32 arrays [S] and [S, C]."""

    def __init__(self, spans: Sequence[Span], page_size: int):
        slots = _Slots()
        cells = [slots.take(span, page_size) for span in spans]
        total = len(slots.pages)
        self.page_S = np.array(slots.pages, np.int32)
        self.offset_S = np.array(slots.offsets, np.int32)
        self.order_SC = np.full((total, page_size), NEVER, np.int32)
        self.hide_from_SC = np.zeros((total, page_size), np.int32)
        self.hide_until_SC = np.zeros((total, page_size), np.int32)
        for span, cell in zip(spans, cells, strict=True):
            self.order_SC.reshape(-1)[cell] = span.orders
            if span.hidden[0] < span.hidden[1]:
                self.hide_from_SC.reshape(-1)[cell] = span.hidden[0]
                self.hide_until_SC.reshape(-1)[cell] = span.hidden[1]
        self._last = cells[-1] if cells else np.zeros(0, np.intp)

    def __len__(self) -> int:
        return len(self.page_S)

    def show(self, index: int, order: int) -> None:
        """Give the last span's token `index` an order."""
        self.order_SC.reshape(-1)[self._last[index]] = order

    def by_order(self, values_SC: NDArray[np.float32], size: int) -> NDArray[np.float32]:
        """Sum values of cells into their orders: [..., S, C] to [..., size]."""
        live = self.order_SC.reshape(-1) < size
        flat = values_SC.reshape(*values_SC.shape[:-2], -1)[..., live]
        out = np.zeros((*flat.shape[:-1], size), np.float32)
        np.add.at(out.T, self.order_SC.reshape(-1)[live], flat.T)  # axes turned: the order comes first
        return out


class _Slots:
    """Slots as spans take them. Cells of a chunk that stands twice at one offset are taken in slots of their own."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.offsets: list[int] = []
        self._taken: list[NDArray[np.bool_]] = []
        self._open: dict[tuple[int, int], int] = {}

    def take(self, span: Span, page_size: int) -> NDArray[np.intp]:
        """Index of each of the span's cells in [S, C], flat."""
        begin, end, found = span.run.start, span.run.start + span.run.length, []
        for i, page in enumerate(span.run.pages):
            low, high = max(begin - i * page_size, 0), min(end - i * page_size, page_size)
            found.append(self._slot(page, span.offset, low, high, page_size) * page_size + np.arange(low, high))
        return np.concatenate(found) if found else np.zeros(0, np.intp)

    def _slot(self, page: int, offset: int, low: int, high: int, page_size: int) -> int:
        slot = self._open.get((page, offset))
        if slot is None or self._taken[slot][low:high].any():
            slot = self._open[page, offset] = len(self.pages)
            self.pages.append(page)
            self.offsets.append(offset)
            self._taken.append(np.zeros(page_size, bool))
        self._taken[slot][low:high] = True
        return slot


@dataclass(frozen=True)
class Moving:
    """A move in cells (page * C + cell): what to copy where, and by how much to turn each key; int32 [n] each.

    layers: half-open, at boundaries of stages.
    """

    source_N: NDArray[np.int32]
    target_N: NDArray[np.int32]
    offset_N: NDArray[np.int32]
    layers: tuple[int, int]


@dataclass
class Work:
    """Rows that wait to be computed, and what has come back so far.

    token, order, position, cell: int32 [n]. logits_at: row index to result index. context: orders in use. layers: those
    to run, half-open. residual: what the rows bring from earlier layers, float32 [n, E], if these are not the first.
    probe: what is measured, its arrays those of the rows, [n], and of the table, [S, C]; segments as the prompt has.
    measured: per layer of the probe, by order, [..., context], or by row. ended: which rows each step did and
    what it left, if layers are left.
    """

    token: NDArray[np.int32]
    order: NDArray[np.int32]
    position: NDArray[np.int32]
    cell: NDArray[np.int32]
    table: SlotTable
    logits_at: dict[int, int]
    context: int
    layers: tuple[int, int]
    residual: NDArray[np.float32] | None = None
    probe: Probe | None = None
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
        return self.layers, self.probe and (self.probe.want, self.probe.layers)

    def take_measured(self, measured: NDArray[np.float32], piece: Piece) -> None:
        """Add what a step measured of rows [piece.begin, piece.end): float32 [layers, ...], of the whole batch."""
        assert self.probe is not None
        rows = slice(piece.row, piece.row + piece.end - piece.begin)
        if self.probe.want is Want.SEGMENT_MASS:
            part, axis = measured[:, rows, : self.probe.segments], 1
        elif self.probe.want is Want.DEVIATION:
            part, axis = measured[..., rows], 2
        else:
            part = self.table.by_order(measured[..., piece.slot : piece.slot + len(self.table), :], self.context)
            self.measured = part if self.measured is None else self.measured + part
            return
        self.measured = part if self.measured is None else np.concatenate([self.measured, part], axis)

    def residual_behind(self) -> NDArray[np.float32]:
        """What all rows bring from the steps that did them, float32 [n, E]."""
        parts = [(residual(), piece) for piece, residual in self.ended]
        return np.concatenate([x_TE[piece.row : piece.row + piece.end - piece.begin] for x_TE, piece in parts])

    def results(self, wants: frozenset[Want]) -> Results:
        """What a pass with these wants gets, once all rows are computed."""
        found: dict[Want, NDArray[np.float32]] = {}
        if self.logits_at:
            found[Want.LOGITS] = np.stack([self.logits[i] for i in range(len(self.logits_at))])
        if self.probe is not None:
            assert self.measured is not None
            found |= _by_want(self.probe.want, self.measured)
        return {want: value for want, value in found.items() if want in wants or want is Want.LOGITS}


def _by_want(want: Want, measured: NDArray[np.float32]) -> dict[Want, NDArray[np.float32]]:
    if want is Want.VALUED_MASS:
        return {Want.KEY_MASS: measured[:, 0], Want.VALUED_MASS: measured[:, 1]}
    return {want: measured.swapaxes(0, 1) if want is Want.DEVIATION else measured}


class Task:
    """One request from its first pass to its last token.

    work: rows that wait for their turn. moving: a move that waits to be carried out; `pass_done` goes on behind it.
    """

    def __init__(self, prompt: Prompt, strategy: Strategy, holding: Holding, label: str, ratio: float | None = None):
        self.prompt = prompt
        self.strategy = strategy
        self.holding = holding
        self.label = label
        self.plan: Plan | None = None
        self.work: Work | None = None
        self.moving: Moving | None = None
        self.generated: list[int] = []
        self._wants: frozenset[Want] = frozenset()
        self._before: Work | None = None
        self._tail_N = np.zeros(0, np.int32)  # cells of generated tokens, once there may be any
        self._conversation = strategy.carry_out(prompt, holding, ratio)

    @property
    def decoding(self) -> bool:
        """Whether the prompt is done."""
        return self.plan is not None

    @property
    def ready(self) -> bool:
        """Whether all KV that its next rows read is on the device."""
        return self.holding.ready and self.holding.broken is None

    def start(self) -> None:
        """Match, reserve, and reach the first pass or move, or the plan of a conversation that needs none.

        Raises:
            OutOfPages: when there is no room now; the task holds nothing then and a fresh one may try later.
        """
        try:
            self._begin(next(self._conversation))
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
            results = self._before.results(self._wants)
        try:
            self._begin(self._conversation.send(results))
        except StopIteration as stop:
            self.plan = stop.value
            self.work = self.moving = self._before = None

    def force(self, tokens: Tokens) -> None:
        """Set the work of computing given tokens, int32 [n], behind the prompt, before anything is decoded.

        The work comes back with the logits of all of them: `work.logits[i]` are those behind token i. Set `work` to
        None then, and decoding starts as if nothing had been: it writes over these tokens.

        Raises:
            ValueError: if there are none, or more than cells for generated tokens.
        """
        assert self.plan is not None and self.work is None
        n, size = len(tokens), len(self.prompt)
        if not 0 < n <= self.plan.tail.length:
            raise ValueError(f"{n} tokens were given; there are cells for {self.plan.tail.length}")
        table = self._open_tail(self.plan)
        for index in range(n):
            table.show(index, size + index)
        order, cell = np.arange(size, size + n, dtype=np.int32), self._tail_N[:n]
        logits_at = {i: i for i in range(n)}
        self.work = Work(np.asarray(tokens, np.int32), order, order, cell, table, logits_at, size + n, self._all_layers)

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
        cell = self._tail_N[index : index + 1]
        self.work = Work(np.array([token], np.int32), row, row, cell, table, {0: 0}, order + 1, self._all_layers)

    def finish(self) -> None:
        """Let the strategy keep what it wants of the generated tokens whose KV exists."""
        if self.plan is None:
            return
        computed = len(self.generated) - (1 if self.work is not None and self.work.left else 0)
        self.strategy.finish(self.prompt, self.plan, np.array(self.generated[:computed], np.int32), self.holding)

    def close(self) -> None:
        """Stop the conversation and give everything back. Safe at any pass boundary, and more than once."""
        self._conversation.close()
        self.work = self.moving = self._before = None
        self.holding.close()

    @property
    def _all_layers(self) -> tuple[int, int]:
        return 0, self.holding.stages[-1]

    def _begin(self, asked: Pass | Move) -> None:
        if isinstance(asked, Move):
            self.work, self.moving = None, self._moving(asked)
        else:
            self.work, self.moving, self._wants = self._work(asked), None, asked.wants

    def _moving(self, move: Move) -> Moving:
        page_size, size = self.holding.page_size, len(self.prompt)
        source, offset = _places(move.source, size, page_size)
        target, _ = _places((span for span in move.target if span.offset == 0), size, page_size)
        self._expect((source[move.orders] >= 0).all(), "moves tokens that its source does not hold")
        self._check_own(target[move.orders])
        return Moving(source[move.orders], target[move.orders], offset[move.orders], move.layers)

    def _work(self, asked: Pass) -> Work:
        page_size, size, rows = self.holding.page_size, len(self.prompt), asked.rows
        layers = asked.layers or self._all_layers
        self._check(asked, layers)
        cells, _ = _places((span for span in asked.spans if span.offset == 0), size, page_size)
        self._check_own(cells[rows])
        table = self._table(asked.spans)
        at = np.searchsorted(rows, np.array(asked.logits, np.int32))
        return Work(
            token=self.prompt.tokens[rows],
            order=rows,
            position=asked.positions,
            cell=cells[rows],
            table=table,
            logits_at={int(row): i for i, row in enumerate(at)},
            context=size,
            layers=layers,
            residual=self._residual(rows, layers[0]),
            probe=self._probe(asked, layers, table),
        )

    def _check(self, asked: Pass, layers: tuple[int, int]) -> None:
        begin, end = layers
        stages = self.holding.stages
        self._expect(len(asked.rows) > 0, "made a pass without rows")
        self._expect(begin in stages and begin < end <= stages[-1], f"made a pass over layers {layers} of {stages}")
        self._expect(not asked.logits or end == stages[-1], "wants logits of a pass that ends before the last layer")
        for name, orders in (("logits", asked.logits), ("asking", () if asked.asking is None else asked.asking)):
            self._expect(np.isin(orders, asked.rows).all(), f"names orders in {name} that are not among the rows")
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

    def _probe(self, asked: Pass, layers: tuple[int, int], table: SlotTable) -> Probe | None:
        wants = asked.wants - {Want.LOGITS}
        want = Want.VALUED_MASS if Want.VALUED_MASS in wants else next(iter(wants), None)
        if want is None:
            return None
        together = {want, Want.KEY_MASS} if want is Want.VALUED_MASS else {want}
        self._expect(wants <= together, f"wants {', '.join(sorted(wants))} of one pass")
        return Probe(want, asked.measured or layers, self._probe_arrays(want, asked, table), len(self.prompt.segments))

    def _probe_arrays(self, want: Want, asked: Pass, table: SlotTable) -> Mapping[str, NDArray[np.int32]]:
        if want is Want.DEVIATION:
            stale, offset = _places(asked.stale, len(self.prompt), self.holding.page_size)
            return {"stale_T": stale[asked.rows], "turn_T": offset[asked.rows]}
        if want is Want.SEGMENT_MASS:
            return {"segment_T": self._segment(asked.rows), "segment_SC": self._segment(table.order_SC)}
        counts = np.ones(len(asked.rows), bool) if asked.asking is None else np.isin(asked.rows, asked.asking)
        asking = {"asking_T": counts.astype(np.int32)}
        return asking | {"segment_SC": self._segment(table.order_SC)} if want is Want.CHUNK_MASS else asking

    def _segment(self, order: NDArray[np.int32]) -> NDArray[np.int32]:
        """The segment of each order, -1 behind the prompt."""
        segment = np.searchsorted(self.prompt.starts, order, side="right").astype(np.int32) - 1
        return np.where(order < len(self.prompt), segment, np.int32(-1))

    def _expect(self, held: bool | np.bool_, what: str) -> None:
        if not held:
            raise ValueError(f"{self.strategy.name} {what}")

    def _check_own(self, cells: NDArray[np.int32]) -> None:
        own = np.fromiter(self.holding.own_pages, np.int32)
        if (cells < 0).any() or not np.isin(cells // self.holding.page_size, own).all():
            raise RuntimeError(f"{self.strategy.name} would write into cached pages")

    def _open_tail(self, plan: Plan) -> SlotTable:
        """The prompt's keys as generated tokens see them, and these, hidden as yet; where they go is known now."""
        hidden = np.full(plan.tail.length, NEVER, np.int32)
        self._tail_N = plan.tail.cells(self.holding.page_size)
        return self._table((*plan.spans, Span(hidden, plan.tail)))

    def _table(self, spans: Sequence[Span]) -> SlotTable:
        table = SlotTable(spans, self.holding.page_size)
        if len(table) > self.holding.slots:
            raise RequestError(
                f"the prompt is in too many pieces for one step: {len(table)} slots, at most {self.holding.slots}. "
                "Shorten the prompt or use fewer chunks",
                param="messages",
                code="context_length_exceeded",
            )
        return table

    def _finished_work(self) -> Work:
        assert self.work is not None and not self.work.left
        return self.work


def _places(spans: Iterable[Span], size: int, page_size: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Cell of each order, -1 where there is none, and RoPE offset, int32 [size]."""
    cell, offset = np.full(size, -1, np.int32), np.zeros(size, np.int32)
    for span in spans:
        live = span.orders < size
        cell[span.orders[live]] = span.run.cells(page_size)[live]
        offset[span.orders[live]] = span.offset
    return cell, offset


@dataclass(frozen=True)
class Piece:
    """Rows [begin, end) of a task's work, at rows [row, ...) and slots [slot, ...) of the batch."""

    task: Task
    begin: int
    end: int
    row: int
    slot: int


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
            measured: what the step's probe asked for, float32 [layers, ...].
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
            if work.probe is not None:
                assert measured is not None
                work.take_measured(measured, piece)
            if residual is not None and work.layers[1] < piece.task.holding.stages[-1]:
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
        """Whether a request of that many spans and tokens (generated ones included) fits the largest slot bucket."""
        return most_slots(tokens, spans, self.page_size) <= self.grid.slots[-1]

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
        chosen = self._within_slots(tasks, widest)
        # those served go to the back, so that all get their turn
        self.tasks = [task for task in self.tasks if task not in chosen] + chosen
        if len(chosen) == 1:
            return self._pack([(chosen[0], 0, 1)], *self.grid.rows[0])
        rows, block = next((rows, block) for rows, block in self.grid.rows if block == 1 and rows >= len(chosen))
        return self._pack([(task, 0, 1) for task in chosen], rows, block)

    def _prefill_batch(self, tasks: list[Task]) -> Batch:
        kind = _work(tasks[0]).kind
        tasks = [task for task in tasks if _work(task).kind == kind]
        tasks = self._within_slots(tasks, len(tasks))
        lefts = [_work(task).left for task in tasks]
        buckets = [bucket for bucket in self.grid.rows if bucket[1] > 1]
        rows, block = max(buckets, key=lambda bucket: _pace(lefts, *bucket))
        takes = _takes(lefts, rows, block)
        begins = [_work(task).done for task in tasks]
        parts = zip(tasks, begins, takes, strict=False)
        return self._pack([(task, begin, begin + take) for task, begin, take in parts], rows, block)

    def _within_slots(self, tasks: list[Task], most: int) -> list[Task]:
        chosen: list[Task] = []
        slots = 0
        for task in tasks[:most]:
            slots += len(_work(task).table)
            if chosen and slots > self.grid.slots[-1]:
                break
            chosen.append(task)
        return chosen

    def _pack(self, parts: list[tuple[Task, int, int]], rows: int, block: int) -> Batch:
        works = [_work(task) for task, _, _ in parts]
        slots = Grid.fit(self.grid.slots, sum(len(work.table) for work in works))
        step = _empty_step(rows, slots, self.page_size, works, self.grid)
        pieces, logit_rows, row, slot = [], [], 0, 0
        for index, (task, begin, end) in enumerate(parts):
            work = works[index]
            _fill(step, work, index, begin, end, row, slot)
            pieces.append(Piece(task, begin, end, row, slot))
            logit_rows += [row + i - begin for i in range(begin, end) if i in work.logits_at]
            row += -(-(end - begin) // block) * block
            slot += len(work.table)
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


PADDING = {"asking_T": 0, "segment_T": -1, "segment_SC": -1, "stale_T": -1, "turn_T": 0}
"""What a probe's arrays hold for rows of padding and unused slots."""


def _empty_step(rows: int, slots: int, page_size: int, works: Sequence[Work], grid: Grid) -> Step:
    """A step for works of one kind, as yet without their rows and slots."""

    def filled(value: int, *shape: int) -> NDArray[np.int32]:
        return np.full(shape, value, np.int32)

    first = works[0]
    probe = residual_TE = None
    if first.residual is not None:
        residual_TE = np.zeros((rows, first.residual.shape[1]), np.float32)
    if first.probe is not None:
        sizes = {"T": (rows,), "SC": (slots, page_size)}
        arrays = {name: filled(PADDING[name], *sizes[name.rsplit("_", 1)[1]]) for name in first.probe.arrays}
        most = max(work.probe.segments for work in works if work.probe is not None)
        by_segment = "segment_SC" in arrays
        probe = Probe(first.probe.want, first.probe.layers, arrays, grid.fit_segments(most) if by_segment else 0)
    return Step(
        token_T=filled(0, rows),
        order_T=filled(-1, rows),
        position_T=filled(0, rows),
        request_T=filled(-1, rows),
        cell_T=filled(0, rows),
        page_S=filled(0, slots),
        offset_S=filled(0, slots),
        request_S=filled(-1, slots),
        order_SC=filled(int(NEVER), slots, page_size),
        hide_from_SC=filled(0, slots, page_size),
        hide_until_SC=filled(0, slots, page_size),
        layers=first.layers,
        residual_TE=residual_TE,
        probe=probe,
    )


def _fill(step: Step, work: Work, request: int, begin: int, end: int, row: int, slot: int) -> None:
    rows, taken = slice(row, row + end - begin), slice(begin, end)
    step.token_T[rows] = work.token[taken]
    step.order_T[rows] = work.order[taken]
    step.position_T[rows] = work.position[taken]
    step.cell_T[rows] = work.cell[taken]
    step.request_T[rows] = request
    slots = slice(slot, slot + len(work.table))
    step.page_S[slots] = work.table.page_S
    step.offset_S[slots] = work.table.offset_S
    step.request_S[slots] = request
    step.order_SC[slots] = work.table.order_SC
    step.hide_from_SC[slots] = work.table.hide_from_SC
    step.hide_until_SC[slots] = work.table.hide_until_SC
    if step.residual_TE is not None and work.residual is not None:
        step.residual_TE[rows] = work.residual[taken]
    if step.probe is not None and work.probe is not None:
        for name, x in work.probe.arrays.items():
            if name.endswith("_SC"):
                step.probe.arrays[name][slots] = x
            else:
                step.probe.arrays[name][rows] = x[taken]
