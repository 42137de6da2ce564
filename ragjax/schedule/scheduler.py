"""Chooses the rows that run next, among the running requests; admission (`admission.py`) decides who runs.

A step has the next tokens of all decoding requests, as far as they have room, and beside them as many prefill rows as
the budget allows (`StepBudget`): a long prompt does not stop those who decode, nor they it. A move of cached KV has no
rows: whoever owns the device carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ragjax.core import Grid, RowShape, StepLimits, StepMeasure
from ragjax.core.step import PREFILL_ROWS
from ragjax.schedule.batch import Batch, Group, find_groups, pack, rows_of
from ragjax.schedule.requests import Requests
from ragjax.schedule.state import RequestState

FADES = 0.7
"""What the past counts for the pace of prefill after each step."""


def depth(stages: int, prefill_s: float, load_s: float) -> int:
    """Stages that must have arrived before the first one runs, so that none is waited for later (equation 16).

    prefill_s, load_s: seconds that the whole pass computes, and that its KV is loaded.
    """
    if load_s <= prefill_s:
        return 1
    return max(1, math.ceil((stages - 1) * (1 - prefill_s / load_s) + 1 - 1e-9))


def reach(first: int, last: int, arrived: int, lead: int, stages: int) -> int:
    """The stage before which a pass over stages [first, last) has to stop for now; `first`: it cannot begin."""
    if first == 0 and arrived < min(lead, stages):
        return first
    return max(first, min(last, arrived))


@dataclass
class Preload:
    """Cuts passes whose KV has arrived in part: layer-wise loading (Cache-Craft, section 3.4.2, Algorithm 2).

    KV arrives a stage of layers at a time (`core.tiers.Load`), so a pass is cut where stages begin. It begins once the
    preloading depth L_p has arrived; from then on a stage runs as soon as it is there. Of loads from several tiers the
    slowest counts; while either time is not known, all stages are waited for.
    """

    keys: int  # as in `StepBudget`
    _units: float = 0.0
    _seconds: float = 0.0

    def note(self, batch: Batch, seconds: float) -> None:
        """Learn the pace of prefill from a step that was waited for, as the logits of a whole pass are."""
        units = sum(
            self._cost(part.state, part.count)
            for part in batch.parts
            if part.live and not part.state.decoding and batch.step.layers == part.state.all_layers
        )
        if units and batch.logit_rows:
            self._units, self._seconds = FADES * self._units + units, FADES * self._seconds + seconds

    def may_run(self, state: RequestState) -> bool:
        """True if rows of a request that computes its prompt may run now; they are cut to what may."""
        allocation, rows = state.held, rows_of(state)
        if rows.done and allocation.broken is None:
            return True
        boundaries = allocation.stages
        first = boundaries.index(rows.layers[0])
        last = next(i for i, layer in enumerate(boundaries) if layer >= rows.end)
        stages, load_s = len(boundaries) - 1, allocation.load_seconds
        lead = stages
        if load_s is not None and self._units:
            lead = depth(stages, self._cost(state, len(rows.token)) * self._seconds / self._units, load_s)
        stop = reach(first, last, state.stages_ready, lead, stages)
        if stop == first:
            return False
        rows.cut(min(boundaries[stop], rows.end))
        return True

    def _cost(self, state: RequestState, rows: int) -> float:
        return rows * (1 + len(rows_of(state).table) * state.held.page_size / self.keys)


STRETCH = 3.0
"""How many times longer than the step of decoding tokens alone a step may take, for each prompt that is computed."""

READING_S = 0.125
"""Seconds that such a step may take anyhow: eight tokens a second come sooner than people read them."""


@dataclass(frozen=True)
class StepBudget:
    """Limits what a step computes while requests decode, so that their next tokens do not wait long.

    A step grows with the prompts that are being computed, and with what the decoding tokens read: requests that wait
    for their first token count as much as those that decode.
    """

    tokens: int = 64  # rows of a step, decoding tokens included, if they read no more than a few keys
    keys: int = 1536  # keys whose attention costs as much as the rest of a row: rows that read many count for more
    decode_keys: int = 128  # likewise for decoding tokens, which compute little (two cores: 6.6 µs a key, 0.8 ms a row)

    @staticmethod
    def fitted(decode_s: float, mixed_s: Mapping[int, float], key_s: float, keys: int) -> StepBudget:
        """The most tokens whose step takes at most `READING_S`, or `STRETCH` times as long as one of decoding tokens.

        mixed_s: seconds of steps by rows, of two numbers of rows at least; between and beyond them time is taken to
        grow evenly. key_s: seconds for each key that decoding tokens read.
        """
        (few, few_s), (many, many_s) = min(mixed_s.items()), max(mixed_s.items())
        row_s = max((many_s - few_s) / (many - few), 1e-9)
        tokens = max(few, min(int(few + (max(STRETCH * decode_s, READING_S) - few_s) / row_s), many))
        return StepBudget(tokens, keys, max(1, int(row_s / max(key_s, 1e-9))))

    def room(self, decoding: int, decode_keys: int, prompts: int) -> float:
        return self.tokens * prompts + (STRETCH * prompts - 1) * decode_keys / self.decode_keys - decoding

    def takes(self, room: float, lefts: Sequence[int], reads: Sequence[int]) -> list[int]:
        """Rows of each prompt that have room in a step, oldest first; the oldest gets one at least."""
        takes = list[int]()
        for left, keys in zip(lefts, reads, strict=True):
            cost = 1 + keys / self.keys
            take = min(left, max(int(room / cost), 0 if takes else 1))
            if not take:
                break
            takes.append(take)
            room -= take * cost
        return takes


FEW = PREFILL_ROWS
"""Decoding requests bring fewer rows than this to a step, in blocks smaller than this; more rows are prefilled."""

STEP_ROWS = 35
"""Rows that would take as long to compute as a step costs at any size."""

BLOCK_ROWS = 4
"""Rows that would take as long to compute as a block of rows, of any size, costs: it gathers a thousand keys or so."""


Shapes = Callable[[tuple[int, int], StepMeasure | None], tuple[RowShape, ...]]
"""Tells the shapes of steps over these layers that no program is missing for."""


class Scheduler:
    """Chooses whose turn it is among the running requests. shapes: those that can run now (None: all)."""

    def __init__(
        self,
        requests: Requests,
        grid: Grid,
        page_size: int,
        budget: StepBudget | None = None,
        shapes: Shapes | None = None,
    ):
        self.requests = requests
        self.grid = grid
        self.budget = budget or StepBudget()
        self.preload = Preload(self.budget.keys)
        self.limits = StepLimits(grid.entries[-1], page_size)
        self._decoded_last = self._suspected_last = False
        self._shapes = shapes
        self._most = max((min(shape.rows, FEW - 1) for shape in grid.rows if _is_alone(shape)), default=1)

    def _active(self) -> list[RequestState]:
        return self.requests.in_front or self.requests.running

    def next_batch(self) -> Batch | None:
        """The next step's rows, or None when no request has rows, or all wait for KV that is being loaded.

        Requests decode and prefill in one step. They take turns only where no shape of the grid holds both, and for a
        prefill that leaves layers out.
        """
        waiting = [s for s in self._active() if s.rows is not None and s.rows.left]
        waiting = [state for state in waiting if state.decoding or self.preload.may_run(state)]
        suspects = [state for state in waiting if state.suspect]  # each alone, in turns with all others
        others = [state for state in waiting if not state.suspect]
        self._suspected_last = bool(suspects) and not (self._suspected_last and others)
        waiting = suspects[:1] if self._suspected_last else others
        decoding = []  # a generated token, and tokens proposed behind it, rather than many that were given
        for state in waiting:
            rows = rows_of(state)
            if state.decoding and rows.left - rows.proposed == 1 and rows.left <= self._most:
                decoding.append(state)
        prefilling = [state for state in waiting if state not in decoding]
        if not prefilling:
            return self._decode_batch(decoding) if decoding else None
        sharing: list[RequestState] = []
        for state in prefilling:
            if all(rows_of(state).shares(rows_of(other)) for other in sharing):
                sharing.append(state)
        prefilling = sharing
        if not decoding:  # a request that comes waits for no more than a short step of those in the background
            return self._prefill_batch(prefilling, bounded=prefilling[0].background)
        first = rows_of(prefilling[0])
        batch = self._mixed_batch(decoding, prefilling) if first.layers == prefilling[0].all_layers else None
        if batch is not None:
            return batch
        self._decoded_last = not self._decoded_last
        return self._decode_batch(decoding) if self._decoded_last else self._prefill_batch(prefilling, bounded=True)

    def _shapes_for(self, states: Sequence[RequestState]) -> tuple[RowShape, ...]:
        """Shapes of a step of these requests, of which the last one says which layers run."""
        if self._shapes is None:
            return self.grid.rows
        pending = [rows_of(state) for state in states]
        measure = next((one.measure_now for one in pending if one.measure_now is not None), None)
        return self._shapes(pending[-1].layers, measure)

    def moving(self) -> list[RequestState]:
        """Requests whose next step is a move, of KV that is on the device."""
        return [state for state in self._active() if state.can_move]

    def _decode_batch(self, states: list[RequestState]) -> Batch:
        """The step that brings the most tokens for what it costs; proposed tokens keep no request out."""
        shapes = self._shapes_for(states)
        alone = [shape for shape in shapes if _is_alone(shape)]
        if not alone:
            chosen = self._take_turns(states, 1, self.limits.entries)
            return self._pack([], _whole(chosen), shapes[0])
        widest = max(alone, key=lambda shape: shape.rows // shape.block)
        chosen = self._take_turns(states, widest.rows // widest.block, self.grid.entries_of(widest)[-1])
        best = self._cheapest(alone, chosen, [rows_of(state).left for state in chosen])
        if any(rows_of(state).proposed for state in chosen):
            plain = self._cheapest(alone, chosen, [1] * len(chosen))
            looking = [(state.lookup, rows_of(state).proposed) for state in chosen]
            brought = len(chosen) + sum(proposed * lookup.share for lookup, proposed in looking if lookup is not None)
            # tokens that a step with the proposals is expected to bring for its cost, against one without them
            if best is None or (
                plain is not None and brought * (STEP_ROWS + plain[0]) <= len(chosen) * (STEP_ROWS + best[0])
            ):
                for state in chosen:
                    rows_of(state).shorten()
                best = plain
        assert best is not None  # the widest shape has a block for each
        return self._pack([], _whole(chosen), best[1])

    def _cheapest(
        self, shapes: Sequence[RowShape], states: Sequence[RequestState], lefts: Sequence[int]
    ) -> tuple[float, RowShape] | None:
        """The shape with room for so many rows of each that costs least, and its cost; None if none has room."""
        entries = sum(len(rows_of(state).table) for state in states)
        costs = [
            (self._cost(shape, states, lefts), shape)
            for shape in shapes
            if _blocks(lefts, shape) * shape.block <= shape.rows and entries <= self.grid.entries_of(shape)[-1]
        ]
        return min(costs, default=None)

    def _cost(self, shape: RowShape, states: Sequence[RequestState], lefts: Sequence[int]) -> float:
        """Cost of a decode step, in rows: a block reads the keys of its request once, but for those that are shared."""
        tables = [rows_of(state).table for state in states]
        entries = sum(-(-left // shape.block) * len(table) for left, table in zip(lefts, tables, strict=True))
        saved = sum(group.saved for group in self._groups(shape, states, lefts))
        keys = (entries - saved) * self.limits.page_size / self.budget.decode_keys
        return self._rows(shape.rows, sum(lefts)) + keys

    def _rows(self, rows: int, live: int) -> float:
        """Cost of rows of which so many hold tokens, in such rows."""
        return live + self.grid.padding * (rows - live)

    def _groups(self, shape: RowShape, states: Sequence[RequestState], lefts: Sequence[int]) -> list[Group]:
        """Groups of requests that share keys, with so many rows each; their rows are in blocks of one."""
        pending = [rows_of(state) for state in states]
        if any(rows.measure_now is not None for rows in pending):
            return []
        return find_groups([rows.table for rows in pending], lefts, shape.sharing)

    def _prefill_batch(self, states: list[RequestState], *, bounded: bool = False) -> Batch:
        states = self._within(states, self.limits.entries)
        lefts = self._bounded([], states) if bounded else [rows_of(state).left for state in states]
        fitting = (s for s in self._shapes_for(states) if not s.mixed)
        shapes = [s for s in fitting if s.block >= FEW or s.rows == s.block > 1]
        return self._pack([], *self._fill(states, lefts, shapes))

    def _mixed_batch(self, decoding: list[RequestState], prefilling: list[RequestState]) -> Batch | None:
        """A step in which the oldest prefill has its place, and the decoding requests that have room beside it.

        None if nobody has. Decoding requests that find no room are first in the next step.
        """
        mixed = [shape for shape in self._shapes_for([*decoding, prefilling[0]]) if shape.mixed]
        if not mixed:
            return None
        entries = max(self.grid.entries_of(shape)[-1] for shape in mixed)
        beside = entries - len(rows_of(prefilling[0]).table)
        chosen = self._take_turns(decoding, max(shape.single for shape in mixed), beside)
        if not chosen:
            return None
        for state in chosen:  # the budget is that of one token a request
            rows_of(state).shorten()
        states = self._within(prefilling, entries - sum(len(rows_of(state).table) for state in chosen))
        fitting = [shape for shape in mixed if shape.single >= len(chosen)]
        return self._pack(_whole(chosen), *self._fill(states, self._bounded(chosen, states), fitting))

    def _bounded(self, decoding: Sequence[RequestState], states: Sequence[RequestState]) -> list[int]:
        prompts = sum(not (state.decoding or state.background) for state in self._active())
        room = self.budget.room(len(decoding), self._keys(decoding), max(prompts, 1))
        return self.budget.takes(room, [rows_of(state).left for state in states], [self._keys([s]) for s in states])

    def _keys(self, states: Sequence[RequestState]) -> int:
        """Slots of all pages that these requests read; of a page that several read, once."""
        pages = set[int]().union(*(rows_of(state).table.page_S.tolist() for state in states))
        return len(pages) * self.limits.page_size

    def _fill(
        self, states: Sequence[RequestState], lefts: Sequence[int], shapes: Sequence[RowShape]
    ) -> tuple[list[tuple[RequestState, int]], RowShape]:
        """Prefill rows of a step, and its shape: the one whose steps compute all of these rows for the least cost."""

        def cost(shape: RowShape) -> float:
            blocks = _blocks(lefts, shape)
            steps = -(-blocks * shape.block // (shape.rows - shape.single))
            return self._rows(steps * shape.rows, sum(lefts)) + STEP_ROWS * steps + BLOCK_ROWS * blocks

        shape = min(shapes, key=cost)
        return list(zip(states, _takes(lefts, shape), strict=False)), shape

    def _take_turns(self, states: Sequence[RequestState], rows: int, entries: int) -> list[RequestState]:
        """The first of the decoding requests, as many as have room with a row each; they go to the back."""
        chosen: list[RequestState] = []
        for state in states:
            pending = rows_of(state)
            rows, entries = rows - 1, entries - len(pending.table)
            if rows < 0 or entries < 0:
                break
            chosen.append(state)
        self.requests.running = [state for state in self.requests.running if state not in chosen] + chosen
        return chosen

    def _within(self, states: list[RequestState], entries: int) -> list[RequestState]:
        for i, state in enumerate(states):
            entries -= len(rows_of(state).table)
            if i and entries < 0:
                return states[:i]
        return states

    def _pack(
        self, single: Sequence[tuple[RequestState, int]], many: Sequence[tuple[RequestState, int]], shape: RowShape
    ) -> Batch:
        ones = [state for state, _ in (many if shape.block == 1 else single)]
        lefts = [rows_of(state).left for state in ones]
        return pack(single, many, shape, self.grid, self.limits.page_size, self._groups(shape, ones, lefts))


def _is_alone(shape: RowShape) -> bool:
    return shape.block < FEW and not shape.mixed


def _blocks(lefts: Sequence[int], shape: RowShape) -> int:
    return sum(-(-left // shape.block) for left in lefts)


def _whole(states: Sequence[RequestState]) -> list[tuple[RequestState, int]]:
    return [(state, rows_of(state).left) for state in states]


def _takes(lefts: Sequence[int], shape: RowShape) -> list[int]:
    """Rows of each request that a step of this shape takes, oldest first, until it is full."""
    takes, rows = [], shape.rows - shape.single
    for left in lefts:
        if rows == 0:
            break
        takes.append(min(left, rows))
        rows -= -(-takes[-1] // shape.block) * shape.block
    return takes
