"""The engine's loop in small, over a simulated device that checks every row: it sees the tokens before it alone."""

from __future__ import annotations

from collections import Counter

import numpy as np

from ragjax.cache.cache import KnowledgeCache
from ragjax.cache.policy.base import LRU
from ragjax.cache.pool import PagePool
from ragjax.core import NEVER, Grid, Kind, Prompt, Segment
from ragjax.reuse.base import Allocation
from ragjax.schedule import decoding
from ragjax.schedule.scheduler import Scheduler
from tests.support.audit import audit_cache
from tests.support.states import Started, table

PAGE = 4
STAGES = (0, 1, 2)
SMALL = Grid(rows=((2, 2), (4, 1, 0, True), (16, 8), (64, 16)), entries=(8, 96), logits=(2, 4))
MIXED = Grid(
    rows=((2, 2), (4, 1, 0, True), (8, 1, 0, True), (12, 8, 4, True), (24, 8, 8, True), (16, 8), (64, 16)),
    entries=(8, 96), wide=200,
)  # fmt: skip


def make_prompt(*segments):
    """Segments given as (kind, tokens)."""
    made = (Segment(f"s{i}", kind, np.asarray(tokens, np.int32)) for i, (kind, tokens) in enumerate(segments))
    return Prompt(tuple(made))


def text(length, seed=0):
    return np.random.default_rng(seed).integers(1000, 2000, length)


def simple(length, seed=0):
    return make_prompt((Kind.QUERY, text(length, seed)))


def indices(begin, end):
    return np.arange(begin, end, dtype=np.int32)


def read_table(table, page_size):
    """The same of every slot that a row could see."""
    for s in range(len(table)):
        for c in range(page_size):
            if table.index_SC[s, c] == NEVER:
                continue
            hidden = tuple(q for q in range(14) if table.hide_from_SC[s, c] <= q < table.hide_until_SC[s, c])
            yield int(table.page_S[s]), c, int(table.index_SC[s, c]), int(table.offset_S[s]), hidden


class Device:
    """Slots that remember token and position, and steps that check what their rows see."""

    def __init__(self, pages, grid):
        self.grid = grid
        self.token = np.full(pages * PAGE, -1, np.int64)
        self.position = np.full(pages * PAGE, -1, np.int64)
        self.computed = Counter()
        self.shared = 0  # rows that read keys together with others

    def run(self, batch):
        """(logits, mass) of a batch: a logits row is (token, order); mass counts the rows that see each key."""
        step = batch.step
        self._check_shape(batch)
        live = np.flatnonzero(step.index_T >= 0)
        self.token[step.slot_T[live]] = step.token_T[live]
        self.position[step.slot_T[live]] = step.position_T[live]
        slot_SC = step.page_S[:, None] * PAGE + np.arange(PAGE)
        score_SC = np.zeros(step.index_SC.shape, np.float32)
        for row in live:
            order = step.index_T[row]
            seen = np.isin(step.request_S, self._requests(step, row))[:, None] & (step.index_SC <= order)
            seen &= ~((step.hide_from_SC <= order) & (order < step.hide_until_SC))
            score_SC += seen
            task = batch.parts[step.request_T[row]].state
            self.computed[task.id] += 1
            offset = np.broadcast_to(step.offset_S[:, None], seen.shape)[seen]
            self._check_row(task, step, row, step.index_SC[seen], slot_SC[seen], offset)
        logits = np.stack([step.token_T, step.index_T], 1).astype(np.float32)[list(batch.logit_rows)]
        return logits if batch.logit_rows else None, np.stack([score_SC, 2 * score_SC]) if step.measure else None

    def _requests(self, step, row):
        """The requests whose entries a row looks at: its own, and that of its block of places, if it has a place."""
        places = np.flatnonzero(step.sharer_O == row)
        assert len(places) <= 1
        self.shared += len(places)
        block = self.grid.sharing(len(step.index_T))[1]
        return [step.request_T[row], *(len(step.index_T) + places // block)]

    def _check_row(self, task, step, row, order, slot, offset):
        sequence = np.concatenate([task.prompt.tokens, np.asarray(task.decoded, np.int32)])
        assert step.token_T[row] == sequence[step.index_T[row]]
        expected, positions = visible(task, step.index_T[row])
        by_index = np.argsort(order, kind="stable")
        order, slot, offset = order[by_index], slot[by_index], offset[by_index]
        assert order.tolist() == expected
        assert self.token[slot].tolist() == sequence[order].tolist(), "a key is another token's, or not computed yet"
        assert (self.position[slot] + offset).tolist() == positions
        assert step.position_T[row] == positions[-1]

    def _check_shape(self, batch):
        step = batch.step
        rows, entries = len(step.index_T), len(step.page_S)
        shape = self.grid.shape(rows)
        assert entries in self.grid.entries_of(shape)
        for part in step.request_T[shape.single :].reshape(-1, shape.block):
            assert len(set(part.tolist()) - {-1}) <= 1, "a block holds rows of two requests"
        padding = step.index_T < 0
        assert (step.index_T[padding] == -1).all() and (step.request_T[padding] == -1).all()
        assert (step.slot_T[padding] < PAGE).all(), "padding writes into page 0 alone"
        assert (step.slot_T[~padding] >= PAGE).all()
        assert len(set(step.slot_T[~padding].tolist())) == (~padding).sum(), "two rows write one slot"
        assert (step.request_T[~padding] >= 0).all()
        assert step.sharer_O.shape == shape.sharing[:1]
        assert not padding[step.sharer_O[step.sharer_O >= 0]].any(), "padding has a place"
        unused = step.request_S < 0
        assert (step.index_SC[unused] == NEVER).all() and (step.page_S[unused] == 0).all()
        assert (~padding).sum() == sum(piece.end - piece.begin for piece in batch.parts)


def visible(task, order):
    """(orders, positions) of the keys that a row sees, ascending."""
    prompt = task.prompt
    segment = np.searchsorted(prompt.starts, order, side="right") - 1
    isolated = task.strategy.name == "naive" and order < len(prompt) and prompt.segments[segment].kind is Kind.CHUNK
    if not isolated:
        return [*range(order + 1)], [*range(order + 1)]
    system, start = prompt.starts[1], prompt.starts[segment]
    own = range(start, order + 1)
    return [*range(system), *own], [*range(system), *range(system, system + len(own))]


class Bench:
    """The engine's loop in small."""

    def __init__(self, pages=200, grid=SMALL):
        self.cache = KnowledgeCache(b"model", PagePool(pages, PAGE), LRU())
        self.requests = table(self.cache)
        self.scheduler = Scheduler(self.requests, grid, PAGE)
        self.device = Device(pages, grid)
        self.limits = {}
        self.kinds = []  # of each step: whether its tasks were decoding, and whether it measured mass
        self.random = np.random.default_rng(0)
        self.count = 0

    def task(self, prompt, strategy, limit=4):
        self.count += 1
        label = f"request-{self.count}"
        limits = self.scheduler.limits
        allocation = Allocation(self.cache, tenant="", label=label, decode_tokens=limit, limits=limits, stages=STAGES)
        self.limits[label] = limit
        return Started(prompt, strategy, allocation)

    def start(self, prompt, strategy, limit=4):
        task = self.task(prompt, strategy, limit)
        task.begin()
        self.requests.running.append(task)
        return task

    def step(self):
        """One batch, or None when there is nothing to do."""
        batch = self.scheduler.next_batch()
        if batch is None:
            return None
        self.kinds.append({(piece.state.decoding, piece.state.rows.measure is not None) for piece in batch.parts})
        for task in batch.deliver(*self.device.run(batch)):
            self.advance(task)
        return batch

    def advance(self, task):
        if task.plan is None:
            task.advance()
            if task.plan is None:
                return
            logits = task.plan.logits
        else:
            logits = task.rows.logits[0]
        sequence = [*task.prompt.tokens.tolist(), *task.decoded]
        assert logits.tolist() == [sequence[-1], len(sequence) - 1], "these are the logits of another row"
        if len(task.decoded) + 1 >= self.limits[task.id]:
            task.keep()
            self.stop(task)
            return
        decoding.decode(task, int(self.random.integers(1000, 2000)))

    def stop(self, task):
        task.stop()
        self.requests.running.remove(task)

    def run(self, most=10_000):
        """Steps until nothing is left to do; the batches."""
        batches = []
        while (batch := self.step()) is not None:
            batches.append(batch)
            assert len(batches) < most
        assert not self.requests.running
        audit_cache(self.cache, live=())
        return batches


def knowledge_prompt(question_seed=9, chunks=(1, 2, 3)):
    return make_prompt(
        (Kind.SYSTEM, text(6)),
        *((Kind.CHUNK, text(5 + 3 * seed, seed)) for seed in chunks),
        (Kind.QUERY, text(7, question_seed)),
    )


def work_on(bench, prompt, strategy, limit=4):
    """Start and run alone; number of rows computed."""
    task = bench.start(prompt, strategy, limit)
    bench.run()
    return bench.device.computed[task.id]
