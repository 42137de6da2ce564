"""What a request has to compute next: rows that wait for a step, or a move of cached KV.

`PassReader` checks what a strategy yields and turns it into host arrays; results come back by the same objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Measure, Move, Pass, Prompt, Results, Span, StepMeasure
from ragjax.reuse.base import Allocation
from ragjax.schedule.table import PageTable, slots_of

Residual = Callable[[], NDArray[np.float32]]
"""Gives a step's residual rows, float32 [T, E]: asked only by a pass that goes on where the step ended."""


@dataclass(frozen=True)
class PendingMove:
    """A move in slots (page * C + slot): what to copy where, and by how much to rotate each key; int32 [n] each.

    layers: half-open, at boundaries of stages.
    """

    source_N: NDArray[np.int32]
    target_N: NDArray[np.int32]
    offset_N: NDArray[np.int32]
    layers: tuple[int, int]


@dataclass(frozen=True)
class Placed:
    """Where a step has rows of a request: rows [row, ...) and page-table entries [entry, ...) of the batch.

    begin, end: half-open range of the request's pending rows.
    """

    begin: int
    end: int
    row: int
    entry: int


@dataclass
class PendingRows:
    """Rows that wait to be computed, and what has come back so far.

    token, index, position, slot: int32 [n]. logits_at: row -> number of its result. context: token indices in use.
    layers: those to run, half-open. residual: what the rows bring from earlier layers, float32 [n, E], if these are not
    the first. measure: what is measured, its arrays those of the rows, [n], and of the table, [S, C]; segments as the
    prompt has. measured: per layer of the measure, by token index, [..., context], or by row. ended: which rows each
    step computed and what it left, if layers are left. done: rows computed. logits: results by number, float32 [V]
    each.
    """

    token: NDArray[np.int32]
    index: NDArray[np.int32]
    position: NDArray[np.int32]
    slot: NDArray[np.int32]
    table: PageTable
    logits_at: Mapping[int, int]
    context: int
    layers: tuple[int, int]
    residual: NDArray[np.float32] | None = None
    measure: StepMeasure | None = None
    measured: NDArray[np.float32] | None = None
    ended: list[tuple[Placed, Residual]] = field(default_factory=list)
    done: int = 0
    logits: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Rows not yet computed."""
        return len(self.token) - self.done

    def shares(self, other: PendingRows) -> bool:
        """Whether both can be computed in one step: through the same layers, measuring the same, or one nothing."""
        if self.layers != other.layers:
            return False
        return self.measure is None or other.measure is None or self.measure.what is other.measure.what

    def relocate(self, moved: Mapping[int, int], page_size: int) -> None:
        """Read and write pages under their new numbers."""
        self.table.page_S = np.array([moved[page] for page in self.table.page_S.tolist()], np.int32)
        page, at = np.divmod(self.slot, page_size)
        self.slot = np.array([moved[one] for one in page.tolist()], np.int32) * np.int32(page_size) + at

    def take_measured(self, measured: NDArray[np.float32], placed: Placed, first: int) -> None:
        """Add what a step measured of these rows.

        measured: of the whole batch, float32 [layers, ...], from layer `first` on.
        """
        assert self.measure is not None
        low, high = self.measure.layers
        measured = measured[low - first : high - first]
        rows = slice(placed.row, placed.row + placed.end - placed.begin)
        if self.measure.what is Measure.SEGMENT_SCORE:
            part, axis = measured[:, rows, : self.measure.segments], 1
        elif self.measure.what is Measure.DEVIATION:
            part, axis = measured[..., rows], 2
        else:
            part = self.table.by_index(measured[..., placed.entry : placed.entry + len(self.table), :], self.context)
            self.measured = part if self.measured is None else self.measured + part
            return
        self.measured = part if self.measured is None else np.concatenate([self.measured, part], axis)

    def residual_after(self) -> NDArray[np.float32]:
        """What all rows bring from the steps that computed them, float32 [n, E]."""
        parts = [(residual(), placed) for placed, residual in self.ended]
        return np.concatenate([x_TE[at.row : at.row + at.end - at.begin] for x_TE, at in parts])

    def results(self, measures: frozenset[Measure]) -> Results:
        """What a pass with these measures gets, once all rows are computed."""
        found: dict[Measure, NDArray[np.float32]] = {}
        if self.logits_at:
            found[Measure.LOGITS] = np.stack([self.logits[i] for i in range(len(self.logits_at))])
        if self.measure is not None:
            assert self.measured is not None
            found |= _by_measure(self.measure.what, self.measured)
        return {what: value for what, value in found.items() if what in measures or what is Measure.LOGITS}


def _by_measure(what: Measure, measured: NDArray[np.float32]) -> dict[Measure, NDArray[np.float32]]:
    if what is Measure.VALUED_SCORE:
        return {Measure.KEY_SCORE: measured[:, 0], Measure.VALUED_SCORE: measured[:, 1]}
    return {what: measured.swapaxes(0, 1) if what is Measure.DEVIATION else measured}


@dataclass(frozen=True)
class PassReader:
    """Turns the passes and moves of a prompt's prefill into pending rows and moves.

    strategy: its name, for errors.

    Every method raises ValueError or RuntimeError for what a strategy must not yield, and RequestError for a prompt
    that no step can read.
    """

    prompt: Prompt
    allocation: Allocation
    strategy: str

    @property
    def all_layers(self) -> tuple[int, int]:
        """Half-open range of the model's layers."""
        return 0, self.allocation.stages[-1]

    def table(self, spans: Sequence[Span]) -> PageTable:
        """The page table of these spans."""
        table = PageTable(spans, self.allocation.page_size)
        self.allocation.limits.check(len(table))
        return table

    def rows(self, asked: Pass, before: PendingRows | None) -> PendingRows:
        """A pass's rows; `before` are those of the pass before."""
        rows, layers = asked.rows, asked.layers or self.all_layers
        self._check(asked, layers)
        slot, _ = self._slots(span for span in asked.spans if span.offset == 0)
        self._check_own(slot[rows])
        table = self.table(asked.spans)
        at = np.searchsorted(rows, np.array(asked.logits, np.int32))
        return PendingRows(
            token=self.prompt.tokens[rows],
            index=rows,
            position=asked.positions,
            slot=slot[rows],
            table=table,
            logits_at={int(row): i for i, row in enumerate(at)},
            context=len(self.prompt),
            layers=layers,
            residual=self._residual(rows, layers[0], before),
            measure=self._measure(asked, layers, table),
        )

    def move(self, move: Move) -> PendingMove:
        """A move's slots."""
        source, offset = self._slots(move.source)
        target, _ = self._slots(span for span in move.target if span.offset == 0)
        self._expect((source[move.indices] >= 0).all(), "moves tokens that its source does not hold")
        self._check_own(target[move.indices])
        return PendingMove(source[move.indices], target[move.indices], offset[move.indices], move.layers)

    def _slots(self, spans: Iterable[Span]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        return slots_of(spans, len(self.prompt), self.allocation.page_size)

    def _check(self, asked: Pass, layers: tuple[int, int]) -> None:
        begin, end = layers
        stages = self.allocation.stages
        self._expect(len(asked.rows) > 0, "made a pass without rows")
        self._expect(begin in stages and begin < end <= stages[-1], f"made a pass over layers {layers} of {stages}")
        self._expect(not asked.logits or end == stages[-1], "wants logits of a pass that ends before the last layer")
        for name, indices in (("logits", asked.logits), ("asking", () if asked.asking is None else asked.asking)):
            self._expect(np.isin(indices, asked.rows).all(), f"names indices in {name} that are not among the rows")
        low, high = asked.measured or layers
        self._expect(begin <= low < high <= end, f"measures layers {asked.measured} of a pass over {layers}")

    def _residual(self, rows: NDArray[np.int32], begin: int, before: PendingRows | None) -> NDArray[np.float32] | None:
        """What the rows bring from the pass before."""
        if begin == 0:
            return None
        if before is None or before.layers[1] != begin:
            raise ValueError(f"{self.strategy} goes on at layer {begin}, where no pass ended before")
        self._expect(np.isin(rows, before.index).all(), "goes on with rows that the pass before did not have")
        return before.residual_after()[np.searchsorted(before.index, rows)]

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
            stale, offset = self._slots(asked.stale)
            return {"stale_T": stale[asked.rows], "offset_T": offset[asked.rows]}
        if what is Measure.SEGMENT_SCORE:
            return {"segment_T": self._segment(asked.rows), "segment_SC": self._segment(table.index_SC)}
        counts = np.ones(len(asked.rows), bool) if asked.asking is None else np.isin(asked.rows, asked.asking)
        asking = {"asking_T": counts.astype(np.int32)}
        return asking | {"segment_SC": self._segment(table.index_SC)} if what is Measure.CHUNK_SCORE else asking

    def _segment(self, index: NDArray[np.int32]) -> NDArray[np.int32]:
        """The segment of each token index, -1 beyond the prompt."""
        segment = np.searchsorted(self.prompt.starts, index, side="right").astype(np.int32) - 1
        return np.where(index < len(self.prompt), segment, np.int32(-1))

    def _expect(self, held: bool | np.bool_, what: str) -> None:
        if not held:
            raise ValueError(f"{self.strategy} {what}")

    def _check_own(self, slots: NDArray[np.int32]) -> None:
        own = np.fromiter(self.allocation.own_pages, np.int32)
        if (slots < 0).any() or not np.isin(slots // self.allocation.page_size, own).all():
            raise RuntimeError(f"{self.strategy} would write into cached pages")
