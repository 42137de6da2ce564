"""The next work of a request: rows that wait for a step, or a move of cached KV.

`read_pass`, `read_move` and `read_compaction` check what a strategy yields and turn it into host arrays; results come
back by the same objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ragjax.core import NEVER, Chosen, Compaction, Measure, Move, Pass, Residual, Results, Run, Span, StepMeasure

if TYPE_CHECKING:
    from ragjax.schedule.state import RequestState


class SpanTable:
    """Spans as entries: one per page and offset, so that short runs share one; int32 arrays [S] and [S, C]."""

    def __init__(self, spans: Sequence[Span], page_size: int):
        pages, offsets, slots = list[int](), list[int](), list[NDArray[np.intp]]()
        taken: list[NDArray[np.bool_]] = []  # slots of each entry that a span has
        entries: dict[tuple[int, int], int] = {}
        for span in spans:
            begin, end, found = span.run.start, span.run.start + span.run.length, [np.zeros(0, np.intp)]
            for i, page in enumerate(span.run.pages):
                low, high = max(begin - i * page_size, 0), min(end - i * page_size, page_size)
                entry = entries.get((page, span.offset))
                if entry is None or taken[entry][low:high].any():  # a chunk may stand twice at one offset
                    entry = entries[page, span.offset] = len(pages)
                    pages.append(page)
                    offsets.append(span.offset)
                    taken.append(np.zeros(page_size, bool))
                taken[entry][low:high] = True
                found.append(entry * page_size + np.arange(low, high))
            slots.append(np.concatenate(found))
        total = len(pages)
        self.page_S = np.array(pages, np.int32)
        self.offset_S = np.array(offsets, np.int32)
        self.index_SC = np.full((total, page_size), NEVER, np.int32)
        self.hide_from_SC = np.zeros((total, page_size), np.int32)
        self.hide_until_SC = np.zeros((total, page_size), np.int32)
        for span, slot in zip(spans, slots, strict=True):
            self.index_SC.reshape(-1)[slot] = span.indices
            if span.hidden[0] < span.hidden[1]:
                self.hide_from_SC.reshape(-1)[slot] = span.hidden[0]
                self.hide_until_SC.reshape(-1)[slot] = span.hidden[1]
        self._last = slots[-1] if slots else np.zeros(0, np.intp)
        self._lasting: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.page_S)

    @property
    def lasting(self) -> NDArray[np.int64]:
        """The entries before those of the last span, as hashes: equal where entries are equal in all arrays."""
        if self._lasting is None:
            end = int(self._last.min()) // self.index_SC.shape[1] if len(self._last) else len(self)
            arrays = (self.index_SC, self.hide_from_SC, self.hide_until_SC)
            places = zip(self.page_S[:end].tolist(), self.offset_S[:end].tolist(), strict=True)
            slots = zip(*([x_C.tobytes() for x_C in x_SC[:end]] for x_SC in arrays), strict=True)
            self._lasting = np.array([hash(entry) for entry in zip(places, slots, strict=True)], np.int64)
        return self._lasting

    def relocate(self, moved: Mapping[int, int]) -> None:
        self.page_S = np.array([moved[page] for page in self.page_S.tolist()], np.int32)
        self._lasting = None

    def show(self, token: int, index: int) -> None:
        self.index_SC.reshape(-1)[self._last[token]] = index

    def grow(self, run: Run) -> None:
        """More slots behind those of the last span: a run of whole pages, at offset 0; tokens have no index yet."""
        total, page_size = self.index_SC.shape
        more = len(run.pages)
        hidden_SC, zeros_SC = np.full((more, page_size), NEVER, np.int32), np.zeros((more, page_size), np.int32)
        self.page_S = np.concatenate([self.page_S, np.array(run.pages, np.int32)])
        self.offset_S = np.concatenate([self.offset_S, np.zeros(more, np.int32)])
        self.index_SC = np.concatenate([self.index_SC, hidden_SC])
        self.hide_from_SC = np.concatenate([self.hide_from_SC, zeros_SC])
        self.hide_until_SC = np.concatenate([self.hide_until_SC, zeros_SC])
        self._last = np.concatenate([self._last, np.arange(total * page_size, (total + more) * page_size)])

    def by_index(self, values_SC: NDArray[np.float32], size: int) -> NDArray[np.float32]:
        """Sum values of slots by their index in the prompt: [..., S, C] to [..., size]."""
        live = self.index_SC.reshape(-1) < size
        flat = values_SC.reshape(*values_SC.shape[:-2], -1)[..., live]
        out = np.zeros((*flat.shape[:-1], size), np.float32)
        np.add.at(out.T, self.index_SC.reshape(-1)[live], flat.T)  # axes turned: the index comes first
        return out


def slots_of(spans: Iterable[Span], size: int, page_size: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Slot of each index of the prompt, -1 where there is none, and RoPE offset, int32 [size]."""
    slot, offset = np.full(size, -1, np.int32), np.zeros(size, np.int32)
    for span in spans:
        live = span.indices < size
        slot[span.indices[live]] = span.run.slots(page_size)[live]
        offset[span.indices[live]] = span.offset
    return slot, offset


@dataclass(frozen=True)
class PendingMove:
    """A move in slots (page * C + slot): what to copy where, and by how much to rotate each key; int32 [n] each."""

    source_N: NDArray[np.int32]
    target_N: NDArray[np.int32]
    offset_N: NDArray[np.int32]
    layers: tuple[int, int]


@dataclass(frozen=True)
class PendingCompaction:
    """A compaction in slots: where each token lies, how much its key is rotated, where those kept go; int32."""

    asked: Compaction
    source_N: NDArray[np.int32]
    offset_N: NDArray[np.int32]
    target_B: NDArray[np.int32]
    layers: tuple[int, int]


@dataclass(frozen=True)
class Carried:
    """Residuals of rows from earlier layers: each is a row of a step that ended there.

    steps: what these left. step_N, row_N: of each row the number of the step, and its place there, int32 [n].
    """

    steps: tuple[Residual, ...]
    step_N: NDArray[np.int32]
    row_N: NDArray[np.int32]

    def pick(self, chosen_N: NDArray[np.int32]) -> Carried:
        return Carried(self.steps, self.step_N[chosen_N], self.row_N[chosen_N])

    def at(self, begin: int, end: int, row: int) -> Residual | None:
        """The step in which rows [begin, end) were where they are to be again, from `row` on; None: there is none."""
        step_N, places_N = self.step_N[begin:end], np.arange(row, row + end - begin)
        if (step_N != step_N[0]).any() or (self.row_N[begin:end] != places_N).any():
            return None
        return self.steps[int(step_N[0])]

    def read(self, begin: int, end: int) -> NDArray[np.float32]:
        step_N, row_N = self.step_N[begin:end], self.row_N[begin:end]
        arrays = {number: np.asarray(self.steps[number]) for number in np.unique(step_N)}
        return np.stack([arrays[number][row] for number, row in zip(step_N, row_N, strict=True)])


@dataclass
class PendingRows:
    """Rows that wait to be computed, and what has come back so far."""

    token: NDArray[np.int32]  # [n], as are index, position and slot
    index: NDArray[np.int32]
    position: NDArray[np.int32]
    slot: NDArray[np.int32]
    table: SpanTable
    logits_at: Mapping[int, int]  # row -> number of its result
    context: int  # token indices in use
    layers: tuple[int, int]  # those to run, half-open
    residual: Carried | None = None  # what the rows bring from earlier layers, if these are not the first
    measure: StepMeasure | None = None  # its arrays are those of the rows, [n], and of the table, [S, C]
    measured: NDArray[np.float32] | None = None  # per layer of the measure, by token index [..., context], or by row
    last: int | None = None  # the layer that the pass ends with, if it is cut (`cut`) and ends later than these
    ended: list[tuple[int, int, Residual]] = field(default_factory=list)  # of each step: its first row, count, and rest
    done: int = 0  # rows computed
    proposed: int = 0  # how many of the last rows are only proposed
    sampled: bool = False  # results are tokens, chosen on the device; logits come only where they are wanted
    first_at: int | None = None  # number of the result by which the token behind the prompt is chosen, on the device
    logits: dict[int, NDArray[np.float32]] = field(default_factory=dict)  # results by number, [V]
    chosen: dict[int, Chosen] = field(default_factory=dict)  # tokens by number
    _measured: list[NDArray[np.float32]] = field(default_factory=list)  # in layers before these

    @property
    def end(self) -> int:
        return self.layers[1] if self.last is None else self.last

    @property
    def logits_now(self) -> Mapping[int, int]:
        return self.logits_at if self.layers[1] == self.end else {}

    @property
    def measure_now(self) -> StepMeasure | None:
        if self.measure is None:
            return None
        low, high = (min(max(layer, self.layers[0]), self.layers[1]) for layer in self.measure.layers)
        return replace(self.measure, layers=(low, high)) if low < high else None

    def cut(self, end: int) -> None:
        """Run the layers up to this one first, and those after it later; no row may have been computed."""
        assert not self.done and self.layers[0] < end <= self.end
        self.last, self.layers = self.end, (self.layers[0], end)

    def go_on(self) -> bool:
        """True if there are layers left to run after these, whose rows are all computed; they are next then."""
        if self.layers[1] == self.end:
            return False
        self.residual, self.layers = self.carried(), (self.layers[1], self.end)
        if self.measured is not None:
            self._measured.append(self.measured)
        self.ended, self.measured, self.done = [], None, 0
        return True

    @property
    def left(self) -> int:
        return len(self.token) - self.done

    def shorten(self) -> None:
        assert not self.done and self.measure is None and self.residual is None
        n, self.proposed = len(self.token) - self.proposed, 0
        arrays = (self.token, self.index, self.position, self.slot)
        self.token, self.index, self.position, self.slot = (x_N[:n] for x_N in arrays)
        self.logits_at = {row: at for row, at in self.logits_at.items() if row < n}

    def shares(self, other: PendingRows) -> bool:
        """True if both can be computed in one step: through the same layers, measuring the same, or one nothing."""
        if self.layers != other.layers:
            return False
        mine, theirs = self.measure_now, other.measure_now
        return mine is None or theirs is None or mine.what is theirs.what

    def relocate(self, moved: Mapping[int, int], page_size: int) -> None:
        self.table.relocate(moved)
        page, at = np.divmod(self.slot, page_size)
        self.slot = np.array([moved[one] for one in page.tolist()], np.int32) * np.int32(page_size) + at

    def take_measured(self, measured: NDArray[np.float32], rows: slice, entry: int, first: int) -> None:
        """Add what a step measured of these rows: of the whole batch, float32 [layers, ...], from layer `first` on."""
        measure = self.measure_now
        assert measure is not None
        low, high = measure.layers
        measured = measured[low - first : high - first]
        if measure.what in (Measure.KEY_SCORE, Measure.VALUED_SCORE):
            part = self.table.by_index(measured[..., entry : entry + len(self.table), :], self.context)
            self.measured = part if self.measured is None else self.measured + part
            return
        part = measured[:, rows, : measure.segments] if measure.what is Measure.SEGMENT_SCORE else measured[:, rows]
        self.measured = part if self.measured is None else np.concatenate([self.measured, part], axis=1)

    def carried(self) -> Carried:
        rows = [np.arange(row, row + count, dtype=np.int32) for row, count, _ in self.ended]
        numbers = np.repeat(np.arange(len(rows), dtype=np.int32), [len(row_N) for row_N in rows])
        return Carried(tuple(residual for *_, residual in self.ended), numbers, np.concatenate(rows))

    def results(self, measures: frozenset[Measure]) -> Results:
        found: dict[Measure, NDArray[np.float32]] = {}
        if self.logits_at:
            numbers = range(len(self.logits_at))
            on_host = all(i in self.logits for i in numbers)
            found[Measure.LOGITS] = (
                np.stack([self.logits[i] for i in numbers]) if on_host else np.zeros((len(numbers), 0), np.float32)
            )
        if self.measure is not None:
            measured = [*self._measured, *([] if self.measured is None else [self.measured])]
            what, values = self.measure.what, np.concatenate(measured)
            if what is Measure.VALUED_SCORE:
                found |= {Measure.KEY_SCORE: values[:, 0], Measure.VALUED_SCORE: values[:, 1]}
            else:
                found[what] = values
        return {what: value for what, value in found.items() if what in measures or what is Measure.LOGITS}


def table_of(state: RequestState, spans: Sequence[Span]) -> SpanTable:
    table = SpanTable(spans, state.held.page_size)
    state.held.limits.check(len(table))
    return table


def read_pass(state: RequestState, asked: Pass, before: PendingRows | None) -> PendingRows:
    """The rows of a pass; `before` are those of the pass before. ValueError: a strategy must not yield it."""
    rows, layers = asked.rows, asked.layers or state.all_layers
    _check(state, asked, layers)
    slot, _ = _slots(state, (span for span in asked.spans if span.offset == 0))
    _check_own(state, slot[rows])
    table = table_of(state, asked.spans)
    at = np.searchsorted(rows, np.array(asked.logits, np.int32))
    return PendingRows(
        token=state.full_prompt.tokens[rows],
        index=rows,
        position=asked.positions,
        slot=slot[rows],
        table=table,
        logits_at={int(row): i for i, row in enumerate(at)},
        first_at=next((i for i, index in enumerate(asked.logits) if index == len(state.full_prompt) - 1), None),
        context=len(state.full_prompt),
        layers=layers,
        residual=_residual(state, rows, layers[0], before),
        measure=_measure(state, asked, layers, table),
    )


def read_move(state: RequestState, move: Move) -> PendingMove:
    source, offset = _slots(state, move.source)
    target, _ = _slots(state, (span for span in move.target if span.offset == 0))
    _expect(state, (source[move.indices] >= 0).all(), "moves tokens that its source does not hold")
    _check_own(state, target[move.indices])
    return PendingMove(source[move.indices], target[move.indices], offset[move.indices], move.layers)


def read_compaction(state: RequestState, asked: Compaction) -> PendingCompaction:
    source, offset = slots_of(asked.source, asked.tokens, state.held.page_size)
    _expect(state, (source >= 0).all(), "compresses tokens that its spans do not hold")
    target = asked.target.slots(state.held.page_size)
    _check_own(state, target)
    return PendingCompaction(asked, source, offset, target, state.all_layers)


def _slots(state: RequestState, spans: Iterable[Span]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    return slots_of(spans, len(state.full_prompt), state.held.page_size)


def _check(state: RequestState, asked: Pass, layers: tuple[int, int]) -> None:
    begin, end = layers
    stages = state.held.stages
    _expect(state, len(asked.rows) > 0, "made a pass without rows")
    _expect(state, begin in stages and begin < end <= stages[-1], f"made a pass over layers {layers} of {stages}")
    _expect(state, not asked.logits or end == stages[-1], "wants logits of a pass that ends before the last layer")
    for name, indices in (("logits", asked.logits), ("asking", () if asked.asking is None else asked.asking)):
        _expect(state, np.isin(indices, asked.rows).all(), f"names indices in {name} that are not among the rows")
    low, high = asked.measured or layers
    _expect(state, begin <= low < high <= end, f"measures layers {asked.measured} of a pass over {layers}")


def _residual(state: RequestState, rows: NDArray[np.int32], begin: int, before: PendingRows | None) -> Carried | None:
    if begin == 0:
        return None
    if before is None or before.layers[1] != begin:
        raise ValueError(f"{state.strategy.name} goes on at layer {begin}, where no pass ended before")
    _expect(state, np.isin(rows, before.index).all(), "goes on with rows that the pass before did not have")
    return before.carried().pick(np.searchsorted(before.index, rows).astype(np.int32))


def _measure(state: RequestState, asked: Pass, layers: tuple[int, int], table: SpanTable) -> StepMeasure | None:
    measures = asked.measures - {Measure.LOGITS}
    what = Measure.VALUED_SCORE if Measure.VALUED_SCORE in measures else next(iter(measures), None)
    if what is None:
        return None
    together = {what, Measure.KEY_SCORE} if what is Measure.VALUED_SCORE else {what}
    _expect(state, measures <= together, f"wants {', '.join(sorted(measures))} of one pass")
    arrays: Mapping[str, NDArray[np.int32]] = {}
    if what is Measure.DEVIATION:
        stale, offset = _slots(state, asked.stale)
        arrays = {"stale_T": stale[asked.rows], "offset_T": offset[asked.rows]}
    elif what is Measure.SEGMENT_SCORE:
        arrays = {"segment_T": _segment(state, asked.rows), "segment_SC": _segment(state, table.index_SC)}
    elif what is not Measure.QUERY:
        counts = np.ones(len(asked.rows), bool) if asked.asking is None else np.isin(asked.rows, asked.asking)
        arrays = {"asking_T": counts.astype(np.int32)}
    return StepMeasure(what, asked.measured or layers, arrays, len(state.full_prompt.segments))


def _segment(state: RequestState, index: NDArray[np.int32]) -> NDArray[np.int32]:
    """The segment of each token index, -1 beyond the prompt."""
    segment = np.searchsorted(state.full_prompt.starts, index, side="right").astype(np.int32) - 1
    return np.where(index < len(state.full_prompt), segment, np.int32(-1))


def _expect(state: RequestState, held: bool | np.bool_, what: str) -> None:
    if not held:
        raise ValueError(f"{state.strategy.name} {what}")


def _check_own(state: RequestState, slots: NDArray[np.int32]) -> None:
    own = np.fromiter(state.held.own_pages, np.int32)
    if (slots < 0).any() or not np.isin(slots // state.held.page_size, own).all():
        raise RuntimeError(f"{state.strategy.name} would write into cached pages")
