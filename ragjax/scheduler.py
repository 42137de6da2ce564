"""Which rows run next: requests as state machines, and batches of their rows packed into the compiled grid.

No jax here. A task owns one request's conversation; its rows (a pass's, or the one token being decoded) wait in
`Work`. `next_batch` takes decoding tokens and prefill rows in turn, so that neither starves the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragjax.core import NEVER, Grid, OutOfPages, Pass, Plan, Prompt, RequestError, Results, Span, Step, Want
from ragjax.reuse.base import Holding, Strategy, most_slots


class SlotTable:
    """Spans as slots: one per page and span; int32 arrays [S] and [S, C]."""

    def __init__(self, spans: Sequence[Span], page_size: int):
        counts = [len(span.run.pages) for span in spans]
        total = sum(counts)
        self.page_S = np.fromiter((page for span in spans for page in span.run.pages), np.int32, total)
        self.offset_S = np.repeat(np.array([span.offset for span in spans], np.int32), counts)
        self.order_SC = np.full((total, page_size), NEVER, np.int32)
        self.hide_from_SC = np.zeros((total, page_size), np.int32)
        self.hide_until_SC = np.zeros((total, page_size), np.int32)
        self._first: list[int] = []
        slot = 0
        for span, count in zip(spans, counts, strict=True):
            first = slot * page_size + span.run.start
            self._first.append(first)
            self.order_SC.reshape(-1)[first : first + span.run.length] = span.orders
            if span.hidden[0] < span.hidden[1]:
                self.hide_from_SC[slot : slot + count] = span.hidden[0]
                self.hide_until_SC[slot : slot + count] = span.hidden[1]
            slot += count

    def __len__(self) -> int:
        return len(self.page_S)

    def show(self, index: int, order: int) -> None:
        """Give token `index` of the last span an order: it takes part from now on."""
        self.order_SC.reshape(-1)[self._first[-1] + index] = order

    def by_order(self, values_SC: NDArray[np.float32], size: int) -> NDArray[np.float32]:
        """Sum values of cells into their orders: [..., S, C] to [..., size]."""
        live = self.order_SC.reshape(-1) < size
        flat = values_SC.reshape(*values_SC.shape[:-2], -1)[..., live]
        out = np.zeros((*flat.shape[:-1], size), np.float32)
        np.add.at(out.T, self.order_SC.reshape(-1)[live], flat.T)  # axes turned: the order comes first
        return out


@dataclass
class Work:
    """Rows that wait to be computed, and what has come back so far.

    token, order, position, cell: int32 [n]. logits: row index to result index. context: orders in use.
    """

    token: NDArray[np.int32]
    order: NDArray[np.int32]
    position: NDArray[np.int32]
    cell: NDArray[np.int32]
    table: SlotTable
    logits_at: dict[int, int]
    context: int
    mass: NDArray[np.float32] | None = None
    wants_mass: bool = False
    done: int = 0
    logits: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Rows not yet computed."""
        return len(self.token) - self.done


class Task:
    """One request from its first pass to its last token."""

    def __init__(self, prompt: Prompt, strategy: Strategy, holding: Holding, label: str):
        self.prompt = prompt
        self.strategy = strategy
        self.holding = holding
        self.label = label
        self.plan: Plan | None = None
        self.work: Work | None = None
        self.generated: list[int] = []
        self._conversation = strategy.carry_out(prompt, holding)

    @property
    def decoding(self) -> bool:
        """Whether the prompt is done."""
        return self.plan is not None

    @property
    def ready(self) -> bool:
        """Whether all KV that its next rows read is on the device."""
        return self.holding.ready and self.holding.broken is None

    def start(self) -> None:
        """Match, reserve, and reach the first pass.

        Raises:
            OutOfPages: when there is no room now; the task holds nothing then and a fresh one may try later.
        """
        try:
            self._begin(next(self._conversation))
        except OutOfPages:
            self.close()
            raise

    def pass_done(self) -> None:
        """Hand the finished pass's results to the strategy; sets the next pass's work, or the plan."""
        work = self._finished_work()
        results: Results = {}
        if work.logits_at:
            results = {Want.LOGITS: np.stack([work.logits[i] for i in range(len(work.logits_at))])}
        if work.mass is not None:
            results = {**results, Want.KEY_MASS: work.mass}
        try:
            self._begin(self._conversation.send(results))
        except StopIteration as stop:
            self.plan = stop.value
            self.work = None

    def decode(self, token: int) -> None:
        """Take a generated token and set the work of computing it, which yields the next one's logits.

        The work comes back as `work.logits[0]`.
        """
        assert self.plan is not None
        page_size = self.holding.page_size
        if self.work is None:
            hidden = np.full(self.plan.tail.length, NEVER, np.int32)
            self._tail_cells = self.plan.tail.cells(page_size)
            table = self._table((*self.plan.spans, Span(hidden, self.plan.tail)))
        else:
            table = self.work.table
        index = len(self.generated)
        order = len(self.prompt) + index
        self.generated.append(token)
        table.show(index, order)
        row = np.array([order], np.int32)
        cell = self._tail_cells[index : index + 1]
        self.work = Work(np.array([token], np.int32), row, row, cell, table, {0: 0}, order + 1)

    def finish(self) -> None:
        """Let the strategy keep what it wants of the generated tokens whose KV exists."""
        if self.plan is None:
            return
        computed = len(self.generated) - (1 if self.work is not None and self.work.left else 0)
        self.strategy.finish(self.prompt, self.plan, np.array(self.generated[:computed], np.int32), self.holding)

    def close(self) -> None:
        """Stop the conversation and give everything back. Safe at any pass boundary, and more than once."""
        self._conversation.close()
        self.work = None
        self.holding.close()

    def _begin(self, next_pass: Pass) -> None:
        if not len(next_pass.rows):
            raise ValueError(f"{self.strategy.name} made a pass without rows")
        page_size, size = self.holding.page_size, len(self.prompt)
        cell_by_order = np.full(size, -1, np.int32)
        for span in next_pass.spans:
            if span.offset == 0:
                live = span.orders < size
                cell_by_order[span.orders[live]] = span.run.cells(page_size)[live]
        cells = cell_by_order[next_pass.rows]
        own = np.fromiter(self.holding.own_pages, np.int32)
        if (cells < 0).any() or not np.isin(cells // page_size, own).all():
            raise RuntimeError(f"{self.strategy.name} would write into cached pages")
        at = np.searchsorted(next_pass.rows, np.array(next_pass.logits, np.int32))
        self.work = Work(
            token=self.prompt.tokens[next_pass.rows],
            order=next_pass.rows,
            position=next_pass.positions,
            cell=cells,
            table=self._table(next_pass.spans),
            logits_at={int(row): i for i, row in enumerate(at)},
            context=size,
            wants_mass=Want.KEY_MASS in next_pass.wants,
        )

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

    def deliver(self, logits: NDArray[np.float32] | None, mass_LSC: NDArray[np.float32] | None) -> list[Task]:
        """Hand results to the tasks' work; return the tasks whose work is done."""
        done, taken = [], 0
        for piece in self.pieces:
            work = piece.task.work
            assert work is not None
            for row in range(piece.begin, piece.end):
                if row in work.logits_at:
                    assert logits is not None
                    work.logits[work.logits_at[row]] = logits[taken]
                    taken += 1
            if work.wants_mass:
                assert mass_LSC is not None
                part = work.table.by_order(mass_LSC[:, piece.slot : piece.slot + len(work.table)], work.context)
                work.mass = part if work.mass is None else work.mass + part
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
        decoding = [task for task in self.tasks if task.decoding and task.work is not None]
        prefilling = [task for task in self.tasks if not task.decoding and task.ready]
        if decoding and (not prefilling or not self._decoded_last):
            self._decoded_last = True
            return self._decode_batch(decoding)
        self._decoded_last = False
        return self._prefill_batch(prefilling) if prefilling else None

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
        tasks = self._within_slots(tasks, len(tasks))
        mass = _work(tasks[0]).wants_mass
        tasks = [task for task in tasks if _work(task).wants_mass == mass]
        lefts = [_work(task).left for task in tasks]
        buckets = [bucket for bucket in self.grid.rows if bucket[1] > 1]
        rows, block = max(buckets, key=lambda bucket: sum(_takes(lefts, *bucket)) / (bucket[0] + STEP_ROWS))
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
        slots = Grid.fit(self.grid.slots, sum(len(_work(task).table) for task, _, _ in parts))
        step = _empty_step(rows, slots, self.page_size, any(_work(task).wants_mass for task, _, _ in parts))
        pieces, logit_rows, row, slot = [], [], 0, 0
        for index, (task, begin, end) in enumerate(parts):
            work = _work(task)
            _fill(step, work, index, begin, end, row, slot)
            pieces.append(Piece(task, begin, end, row, slot))
            logit_rows += [row + i - begin for i in range(begin, end) if i in work.logits_at]
            row += -(-(end - begin) // block) * block
            slot += len(work.table)
        return Batch(tuple(pieces), step, tuple(logit_rows))


STEP_ROWS = 35
"""Rows that would take as long to compute as a step costs at any size."""


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


def _empty_step(rows: int, slots: int, page_size: int, mass: bool) -> Step:
    def zeros(*shape: int) -> NDArray[np.int32]:
        return np.zeros(shape, np.int32)

    return Step(
        token_T=zeros(rows),
        order_T=np.full(rows, -1, np.int32),
        position_T=zeros(rows),
        request_T=np.full(rows, -1, np.int32),
        cell_T=zeros(rows),
        page_S=zeros(slots),
        offset_S=zeros(slots),
        request_S=np.full(slots, -1, np.int32),
        order_SC=np.full((slots, page_size), NEVER, np.int32),
        hide_from_SC=zeros(slots, page_size),
        hide_until_SC=zeros(slots, page_size),
        mass=mass,
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
