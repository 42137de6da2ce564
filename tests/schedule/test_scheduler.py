"""Entries, tasks and batches, without a model: a simulated device checks that every row sees exactly what it should.

The simulated device writes each row's token and position into its slot. A row that finds, through the step's entries,
the right token at the right position for every order it may see (and nothing else) proves entries, spans, packing and
the order of steps at once.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.core import NEVER, Grid, Kind, Measure, OutOfPages, Pass, Plan, Run, Span, StepMeasure
from ragjax.reuse import Full, Naive, Prefix
from ragjax.reuse.base import match_spans
from ragjax.schedule.lookup import Lookup
from ragjax.schedule.rows import SpanTable
from ragjax.schedule.scheduler import Scheduler, StepBudget
from tests.support.audit import audit_cache
from tests.support.bench import (
    MIXED,
    PAGE,
    SMALL,
    Bench,
    indices,
    knowledge_prompt,
    make_prompt,
    read_table,
    simple,
    text,
    work_on,
)  # fmt: skip
from tests.support.states import table

# -------------------------------------------------------------------------------------- entry table


@st.composite
def spans(draw, page_size):
    start, length = draw(st.integers(0, page_size - 1)), draw(st.integers(0, 3 * page_size))
    count = -(-(start + length) // page_size) if length else 0
    pages = tuple(draw(st.lists(st.integers(1, 50), min_size=count, max_size=count)))
    order = draw(st.lists(st.sampled_from([*range(12), int(NEVER)]), min_size=length, max_size=length))
    interval = draw(st.tuples(st.integers(0, 12), st.integers(0, 12)))
    run = Run(pages, start if length else 0, length)
    return Span(np.asarray(order, np.int32), run, draw(st.integers(-30, 30)), interval)


tables = st.sampled_from([1, 4, 16]).flatmap(lambda size: st.tuples(st.just(size), st.lists(spans(size), max_size=5)))


def read_slowly(span, page_size):
    """(page, slot, order, offset, orders it is hidden from) of each token, one at a time."""
    begin, end = span.hidden
    for i, order in enumerate(span.indices.tolist()):
        at = span.run.start + i
        hidden = tuple(q for q in range(14) if begin <= q < end)
        yield span.run.pages[at // page_size], at % page_size, order, span.offset, hidden


@settings(max_examples=40, deadline=None)
@given(tables)
def test_entries_say_what_spans_say(case):
    page_size, given_spans = case
    table = SpanTable(given_spans, page_size)
    pages = [(page, span.offset) for span in given_spans for page in span.run.pages]
    slots = [(*key[:2], span.offset) for span in given_spans for key in read_slowly(span, page_size)]
    assert len(set(pages)) <= len(table) <= len(pages)
    assert len(table) == len(set(pages)) or len(set(slots)) < len(slots)  # more only if slots are taken twice
    expected = [key for span in given_spans for key in read_slowly(span, page_size) if key[2] != NEVER]
    assert Counter(read_table(table, page_size)) == Counter(expected)
    for name in ("page_S", "offset_S", "index_SC", "hide_from_SC", "hide_until_SC"):
        assert getattr(table, name).dtype == np.int32
        assert getattr(table, name).shape == (len(table), page_size)[: 1 + name.endswith("SC")]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(tables, st.integers(0, 14), st.integers(0, 99))
def test_values_are_summed_by_order(case, size, seed):
    page_size, given_spans = case
    table = SpanTable(given_spans, page_size)
    values = np.random.default_rng(seed).random((2, len(table), page_size), np.float32)
    expected = np.zeros((2, size))
    for s in range(len(table)):
        for c in range(page_size):
            if table.index_SC[s, c] < size:
                expected[:, table.index_SC[s, c]] += values[:, s, c]
    found = table.by_index(values, size)
    assert found.dtype == np.float32 and found.shape == (2, size)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# ------------------------------------------------------------------------------- the state machine


class Scripted:
    """A strategy of given passes over a prompt in pages of its own; remembers what it was told."""

    name = "scripted"
    measures = frozenset({Measure.LOGITS, Measure.KEY_SCORE})

    def __init__(self, *passes):
        self.passes = passes
        self.results = []
        self.finished = None
        self.stopped = False

    def prefill(self, prompt, allocation, ratio=None):
        n = len(prompt)
        run = allocation.reserve(n + allocation.decode_tokens)
        spans = (Span.consecutive(0, run.slice(0, n, PAGE)),)
        try:
            for rows, measures, logits in self.passes or (
                (indices(0, n), self.measures - {Measure.KEY_SCORE}, (n - 1,)),
            ):
                self.results.append((yield Pass(rows, rows, spans, frozenset(measures), logits)))
        finally:
            self.stopped = True
        last = self.results[-1][Measure.LOGITS][-1]
        return Plan(spans, run.slice(n, run.length, PAGE), "full", (), last)

    def finish(self, prompt, plan, generated, allocation):
        self.finished = generated.tolist()


def logit_rows(prompt, *at):
    return [[prompt.tokens[i], i] for i in at]


def test_passes_get_their_results_and_end_in_a_plan():
    bench, prompt = Bench(), simple(21)
    strategy = Scripted(
        (indices(0, 9), {Measure.LOGITS}, (3, 8)), (indices(9, 12), (), ()), (indices(12, 21), (), (20,))
    )
    task = bench.start(prompt, strategy, limit=3)
    bench.step()
    assert not task.decoding and not task.decoded and len(strategy.results) == 1
    bench.step()
    bench.step()
    assert task.decoding and len(task.decoded) == 1 and strategy.stopped
    first, second, third = strategy.results
    assert first[Measure.LOGITS].tolist() == logit_rows(prompt, 3, 8)
    assert second == {}
    assert third[Measure.LOGITS].tolist() == logit_rows(prompt, 20)


def test_logits_come_in_the_order_asked_for_even_over_several_steps():
    bench, prompt = Bench(), simple(150)
    asked = (149, 0, 70, 63, 64, 1)
    strategy = Scripted((indices(0, 150), {Measure.LOGITS}, asked), (indices(149, 150), {Measure.LOGITS}, (149,)))
    bench.start(prompt, strategy, limit=1)
    bench.run()
    assert strategy.results[0][Measure.LOGITS].tolist() == logit_rows(prompt, *asked)


def test_key_score_is_the_whole_pass_s_though_it_ran_in_several_steps():
    bench, prompt = Bench(), simple(100)
    rows = np.concatenate([indices(0, 70), indices(90, 100)])
    both = {Measure.LOGITS, Measure.KEY_SCORE}
    strategy = Scripted((indices(0, 100), (), ()), (rows, both, (99,)))
    bench.start(simple(30, seed=1), Scripted((indices(0, 30), both, (29,))), limit=1)
    bench.start(prompt, strategy, limit=1)
    bench.run()
    assert Measure.KEY_SCORE not in strategy.results[0]
    score = strategy.results[1][Measure.KEY_SCORE]
    expected = [int((rows >= order).sum()) for order in range(100)]
    assert score.tolist() == [expected, [2 * count for count in expected]]


def test_a_request_that_measures_shares_a_step_with_one_that_does_not():
    bench, strategies = Bench(), []
    for seed in range(4):
        measures = {Measure.LOGITS, Measure.KEY_SCORE} if seed % 2 else {Measure.LOGITS}
        strategies.append(Scripted((indices(0, 5), measures, (4,))))
        bench.start(simple(5, seed), strategies[-1], limit=2)
    first = bench.step()
    assert len(first.parts) == 4 and first.step.measure is not None
    for seed, strategy in enumerate(strategies):
        scores = [5, 4, 3, 2, 1]
        found = strategy.results[0].get(Measure.KEY_SCORE)
        assert found is None if seed % 2 == 0 else found.tolist() == [scores, [2 * score for score in scores]]
    bench.run()


def measuring(what, layers):
    return StepMeasure(what, layers, {"asking_T": np.ones(5, np.int32)})


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [
        (None, None, True),
        (None, measuring(Measure.KEY_SCORE, (0, 1)), True),
        (measuring(Measure.KEY_SCORE, (0, 1)), measuring(Measure.KEY_SCORE, (1, 2)), True),
        (measuring(Measure.KEY_SCORE, (0, 1)), measuring(Measure.VALUED_SCORE, (0, 1)), False),
    ],
)
def test_what_passes_measure_says_whether_they_share_a_step(first, second, shared):
    scheduler = Scheduler(table(), SMALL, PAGE)
    for task, measure in zip(fixed_tasks(scheduler, [5, 5]), (first, second), strict=True):
        task.rows.measure = measure
    batch = scheduler.next_batch()
    assert len(batch.parts) == (2 if shared else 1)
    if first is not None and shared:
        assert batch.step.measure.layers == (0, 2), "all layers that one of them names"


def test_each_takes_the_layers_that_it_measures():
    scheduler = Scheduler(table(), SMALL, PAGE)
    tasks = fixed_tasks(scheduler, [5, 5])
    for task, layers in zip(tasks, ((0, 1), (1, 2)), strict=True):
        arrays = {"stale_T": np.zeros(5, np.int32), "offset_T": np.zeros(5, np.int32)}
        task.rows.measure = StepMeasure(Measure.DEVIATION, layers, arrays)
    batch = scheduler.next_batch()
    rows = len(batch.step.index_T)
    measured = np.arange(2 * rows, dtype=np.float32).reshape(2, rows)
    batch.deliver(np.zeros((0, 1), np.float32), measured)
    for task, piece, layer in zip(tasks, batch.parts, (0, 1), strict=True):
        at = slice(piece.row, piece.row + 5)
        assert task.rows.measured.tolist() == measured[layer : layer + 1, at].tolist()


def test_passes_through_other_layers_share_no_step():
    scheduler = Scheduler(table(), SMALL, PAGE)
    tasks = fixed_tasks(scheduler, [5, 5])
    tasks[1].rows.layers = (0, 1)
    assert [len(scheduler.next_batch().parts) for _ in range(2)] == [1, 1]


def test_decoding_goes_on_where_the_prompt_ends():
    bench, prompt, strategy = Bench(), simple(7), Scripted()
    task = bench.start(prompt, strategy, limit=6)
    bench.step()
    seen = []
    while bench.scheduler.requests.running:
        work = task.rows
        seen.append((int(work.index[0]), int(work.position[0]), int(work.slot[0]), work.context))
        bench.step()
    slots = task.plan.tail.slots(PAGE).tolist()
    assert seen == [(7 + i, 7 + i, slots[i], 8 + i) for i in range(5)]


def test_finish_is_told_of_the_tokens_whose_kv_exists():
    bench, strategy = Bench(), Scripted()
    task = bench.start(simple(7), strategy, limit=6)
    task.keep()
    assert strategy.finished is None, "there is no plan yet"
    bench.step()
    task.keep()
    assert strategy.finished == [], "the first token is chosen, its KV is not computed"
    bench.step()
    bench.step()
    task.keep()
    assert strategy.finished == task.decoded[:2] and len(task.decoded) == 3
    bench.run()
    assert strategy.finished == task.decoded and len(task.decoded) == 5


# ---------------------------------------------------------------------------------------- refusals


class Writes(Scripted):
    """A warm prefix in the cache, and one pass over spans that a test makes of match and run."""

    def __init__(self, spans_of, rows):
        super().__init__()
        self.spans_of, self.rows = spans_of, rows

    def prefill(self, prompt, allocation, ratio=None):
        match = allocation.prefix(prompt.tokens)
        run = allocation.reserve(len(prompt))
        yield Pass(self.rows, self.rows, self.spans_of(match, run))


def consecutive(match, run):
    return (*match_spans(match, 0), Span.consecutive(10, run.slice(10, 20, PAGE)))


def moved(match, run):
    return (Span.consecutive(0, run, offset=3),)


def hidden(match, run):
    return (Span(np.where(indices(0, 20) == 15, NEVER, indices(0, 20)), run),)


@pytest.mark.parametrize(
    ("spans_of", "rows"),
    [
        (consecutive, indices(9, 20)),  # token 9 is the cache's
        (consecutive, indices(0, 20)),
        (moved, indices(5, 6)),  # where an offset is, the row's own K would be stored at the wrong position
        (hidden, indices(14, 17)),  # row 15 has no slot
        (lambda match, run: (Span.consecutive(0, run.slice(0, 10, PAGE)),), indices(8, 12)),
    ],
)
def test_a_pass_that_would_write_what_is_not_the_request_s_own_is_refused(spans_of, rows):
    bench = Bench()
    prompt = simple(20)
    work_on(bench, make_prompt((Kind.QUERY, prompt.tokens[:10])), Prefix(), limit=1)
    before = bench.cache.metrics.pages_used
    task = bench.task(prompt, Writes(spans_of, rows))
    with pytest.raises(RuntimeError, match="scripted would write into cached pages"):
        task.begin()
    task.stop()
    audit_cache(bench.cache, live=())
    assert bench.cache.metrics.pages_used == before
    accepted = bench.task(prompt, Writes(consecutive, indices(10, 20)))
    accepted.begin()
    accepted.stop()


def test_a_pass_without_rows_is_refused():
    """It would never be done: no step could hold a row of it."""
    bench = Bench()
    task = bench.task(simple(8), Scripted((indices(0, 0), (), ()), (indices(0, 8), {Measure.LOGITS}, (7,))))
    with pytest.raises((RuntimeError, ValueError), match="rows"):
        task.begin()
    task.stop()


# ----------------------------------------------------------------------------------- giving back


def scripted_in_three():
    n = len(knowledge_prompt())
    return Scripted((indices(0, 9), (), ()), (indices(9, 30), (), ()), (indices(30, n), {Measure.LOGITS}, (n - 1,)))


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("strategy", [Full, Prefix, Naive, scripted_in_three])
def test_close_gives_everything_back_at_any_point(strategy, warm):
    for steps in range(12):
        bench = Bench(grid=Grid(rows=((2, 2), (4, 1), (16, 8)), entries=(8, 96), logits=(2,)))
        if warm:
            work_on(bench, knowledge_prompt(8, (3, 1)), strategy() if strategy is not scripted_in_three else Naive())
        task = bench.start(knowledge_prompt(), strategy(), limit=6)
        audit_cache(bench.cache, live=(task.id,))
        for _ in range(steps):
            bench.step()
        ended = not bench.scheduler.requests.running
        task.stop()
        task.stop()
        audit_cache(bench.cache, live=())
        bench.cache.clear()
        assert bench.cache.metrics.pages_used == 0
        if ended:
            return
    pytest.fail("the request never ended")


def test_close_before_the_start_and_without_work():
    bench = Bench()
    strategy = Scripted()
    task = bench.task(simple(5), strategy)
    task.stop()
    audit_cache(bench.cache, live=())
    assert bench.scheduler.next_batch() is None


@pytest.mark.parametrize("strategy", [Full, Prefix, Naive])
def test_no_room_at_the_start_leaves_nothing_behind(strategy):
    bench = Bench(pages=24)
    work_on(bench, make_prompt((Kind.SYSTEM, text(6)), (Kind.QUERY, text(2, 5))), strategy(), limit=1)
    holder = bench.start(simple(44, seed=3), Full(), limit=4)
    task = bench.task(knowledge_prompt(), strategy())
    with pytest.raises(OutOfPages):
        task.begin()
    audit_cache(bench.cache, live=(holder.id,))
    bench.stop(holder)
    bench.start(knowledge_prompt(), strategy())
    bench.run()


# ----------------------------------------------------------------------------------------- packing


COSTS = {2: 12, 7: 14, 32: 22, 128: 46, 512: 158}
"""Measured milliseconds of a step by its rows, for a model of 135M parameters on two cores."""


@cache
def least_cost(rows):
    """Of any series of steps that hold so many rows."""
    return min((cost + least_cost(rows - n) for n, cost in COSTS.items()), default=0) if rows > 0 else 0


class Fixed:
    """Work without a conversation: rows left, entries in use."""

    def __init__(self, rows, entries=1, decoding=False, score=False):
        bench = Bench(
            pages=rows // PAGE + entries + 3, grid=Grid(rows=SMALL.rows, entries=(rows // PAGE + 8,), logits=(2,))
        )
        measures = {Measure.KEY_SCORE} if score else ()
        self.task = bench.task(simple(rows), Scripted((indices(0, rows), measures, ())), limit=1)
        self.task.begin()
        pages = tuple(range(1, entries + 1))
        self.task.rows.table = SpanTable((Span(np.full(entries * PAGE, NEVER), Run(pages, 0, entries * PAGE)),), PAGE)
        if decoding:
            self.task.plan = Plan((), Run((), 0, 0), None, (), np.zeros(0, np.float32))


def fixed_tasks(scheduler, rows, **options):
    tasks = [Fixed(n, **options).task for n in rows]
    scheduler.requests.running += tasks
    return tasks


def run_fixed(scheduler, costs=COSTS):
    """Run until nothing is left; (milliseconds, batches)."""
    spent, batches = 0, []
    while (batch := scheduler.next_batch()) is not None:
        spent += costs[len(batch.step.index_T)]
        batches.append(batch)
        score = np.zeros((1, *batch.step.index_SC.shape), np.float32)
        for task in batch.deliver(np.zeros((len(batch.logit_rows), 1), np.float32), score):
            scheduler.requests.running.remove(task)
        assert len(batches) < 2000
    return spent, batches


def test_buckets_waste_less_than_half_for_any_number_of_rows():
    worst = {}
    task = Fixed(600).task
    for total in range(1, 601):
        task.rows.done = 600 - total
        scheduler = Scheduler(table(), Grid(), PAGE)
        scheduler.requests.running.append(task)
        spent, batches = run_fixed(scheduler)
        single = next((COSTS[rows] for rows in COSTS if rows >= total), least_cost(total))
        worst[total] = max(spent / least_cost(total), spent / single)
        assert sum(piece.end - piece.begin for batch in batches for piece in batch.parts) == total
    assert max(worst.values()) <= 2.0, sorted(worst.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize(("count", "rows"), [(8, 8), (16, 8), (20, 2), (5, 100), (3, 33), (2, 250)])
def test_requests_together_cost_no_more_than_one_after_another(count, rows):
    scheduler = Scheduler(table(), Grid(), PAGE)
    fixed_tasks(scheduler, [rows] * count)
    together, _ = run_fixed(scheduler)
    assert together <= count * min(COSTS[bucket] for bucket in COSTS if bucket >= rows)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=7))
def test_a_batch_never_mixes_requests_in_a_block(lefts):
    scheduler = Scheduler(table(), SMALL, PAGE)
    tasks = fixed_tasks(scheduler, lefts)
    _, batches = run_fixed(scheduler, dict.fromkeys((2, 4, 16, 64), 1))
    computed = {id(task): [] for task in tasks}
    for batch in batches:
        block = SMALL.shape(len(batch.step.index_T)).block
        for part in batch.step.request_T.reshape(-1, block):
            assert len(set(part.tolist()) - {-1}) <= 1
        for index, piece in enumerate(batch.parts):
            at = np.flatnonzero(batch.step.request_T == index)
            assert at.tolist() == [*range(piece.row, piece.row + piece.end - piece.begin)]
            computed[id(piece.state)] += batch.step.index_T[at].tolist()
            assert set(np.flatnonzero(batch.step.request_S == index)) == {piece.entry}
    assert [computed[id(task)] for task in tasks] == [[*range(n)] for n in lefts], "each row once, in order"


@pytest.mark.parametrize("group", [1, 7, 16, 17, 32, 128, 200])
def test_prompts_are_computed_in_the_shapes_of_a_gpu(group):
    """However many query heads share a KV head, a shape is left for prefill, alone and beside decoding tokens."""
    grid = Grid(rows=Grid.gpu_rows(group), entries=(64, 256))
    scheduler = Scheduler(table(), grid, PAGE)
    fixed_tasks(scheduler, [100])
    alone = scheduler.next_batch()
    fixed_tasks(scheduler, [1], decoding=True)
    beside = scheduler.next_batch()
    assert [grid.shape(len(batch.step.index_T)).mixed for batch in (alone, beside)] == [False, True]
    assert all(piece.end > piece.begin for batch in (alone, beside) for piece in batch.parts)


@pytest.mark.parametrize(("padding", "sizes"), [(1.0, [32, 32]), (0.1, [128])])
def test_where_padding_costs_little_one_large_step_replaces_two(padding, sizes):
    scheduler = Scheduler(table(), Grid(padding=padding), PAGE)
    fixed_tasks(scheduler, [41])
    _, batches = run_fixed(scheduler)
    assert [len(batch.step.index_T) for batch in batches] == sizes


# -------------------------------------------------------------------------------------------- turns


def is_decode(batch):
    return all(piece.state.decoding for piece in batch.parts)


def test_decode_and_prefill_take_turns():
    bench = Bench(pages=400)
    for seed in range(3):
        bench.start(simple(4, seed), Full(), limit=30)
    for _ in range(2):
        bench.step()
    for seed in range(6):
        bench.start(simple(100, 10 + seed), Full(), limit=2)
    bench.kinds.clear()
    while any(not task.decoding for task in bench.scheduler.requests.running):
        assert any(task.decoding for task in bench.scheduler.requests.running)
        bench.step()
    assert len(bench.kinds) > 10
    assert all(a != b for a, b in zip(bench.kinds, bench.kinds[1:], strict=False))
    bench.run()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 13), st.booleans())
def test_every_decoding_request_is_served_in_turn(count, busy):
    scheduler = Scheduler(table(), SMALL, PAGE)
    tasks = fixed_tasks(scheduler, [1] * count, decoding=True)
    if busy:
        fixed_tasks(scheduler, [2000])
    width = 4  # the widest bucket of blocks of one row
    due = -(-count // width)
    served = []
    while len(served) < 4 * due:
        batch = scheduler.next_batch()
        if is_decode(batch):
            served.append({id(piece.state) for piece in batch.parts})
            assert len(batch.step.index_T) == (2 if len(batch.parts) == 1 else 4)
        else:
            batch.deliver(None, None)
    for begin in range(3 * due + 1):
        assert set().union(*served[begin : begin + due]) == {id(task) for task in tasks}


def test_decoding_goes_on_in_every_step_while_others_are_prefilled():
    bench = Bench(pages=600, grid=MIXED)
    decoding = [bench.start(simple(4, seed), Full(), limit=60) for seed in range(5)]
    while not all(task.decoding for task in decoding):
        bench.step()
    bench.start(simple(150, 9), Full(), limit=2)
    bench.start(simple(90, 10), Naive(), limit=2)
    for _ in range(10):
        said = [len(task.decoded) for task in decoding]
        batch = bench.step()
        assert [len(task.decoded) for task in decoding] == [n + 1 for n in said]
        prefill = batch.parts[5:]
        assert [piece.row for piece in prefill] == [8, 16][: len(prefill)]
    bench.run()


@settings(max_examples=40, deadline=None)
@given(
    budget=st.builds(StepBudget, st.integers(1, 80), st.integers(1, 400)),
    lefts=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    count=st.integers(1, 12),
)
def test_the_budget_bounds_prefill_beside_decoding_tokens(budget, lefts, count):
    scheduler = Scheduler(table(), MIXED, PAGE, budget)
    fixed_tasks(scheduler, [1] * count, decoding=True)
    prefilling = fixed_tasks(scheduler, lefts)
    batch = scheduler.next_batch()
    decoded = [piece for piece in batch.parts if piece.state.decoding]
    taken = [piece.end - piece.begin for piece in batch.parts if not piece.state.decoding]
    assert len(decoded) == min(count, 8)
    assert taken and batch.parts[len(decoded)].state is prefilling[0], "the oldest prefill goes on"
    room = budget.room(len(decoded), scheduler._keys([piece.state for piece in decoded]), len(prefilling))
    assert taken[0] == 1 or sum(taken) <= room


def test_steps_of_the_background_are_no_longer_than_those_beside_decoding_tokens():
    for background, rows in ((True, 16), (False, 64)):
        scheduler = Scheduler(table(), SMALL, PAGE, StepBudget(9, keys=10**6))
        for task in fixed_tasks(scheduler, [40, 40]):
            task.request = replace(task.request, background=background)
        assert len(scheduler.next_batch().step.index_T) == rows


def test_a_step_grows_with_the_prompts_that_are_computed():
    """Whoever waits for the first token counts: two prompts get twice the rows that one gets beside decoding tokens."""
    taken = []
    for prompts in (1, 2):
        scheduler = Scheduler(table(), MIXED, PAGE, StepBudget(9, keys=10**6))
        fixed_tasks(scheduler, [1], decoding=True)
        fixed_tasks(scheduler, [16] * prompts)
        parts = [piece for piece in scheduler.next_batch().parts if not piece.state.decoding]
        taken.append(sum(piece.end - piece.begin for piece in parts))
    assert taken == [8, 16]


@pytest.mark.parametrize(("clients", "share", "rows"), [(1, 0.2, 4), (1, 0.0, 2), (7, 0.9, 40), (7, 0.1, 8)])
def test_tokens_are_proposed_where_they_are_worth_the_larger_step(clients, share, rows):
    """Of 7 requests with 3 proposed tokens each, a step of 40 rows is worth 19 accepted tokens, and not 2."""
    scheduler = Scheduler(table(), Grid(rows=((2, 2), (4, 4), (8, 1), (40, 4)), entries=(8, 96), logits=(2, 4)), PAGE)
    tasks = fixed_tasks(scheduler, [4] * clients, decoding=True)
    for task in tasks:
        task.rows.proposed, task.lookup = 3, Lookup(6, share=share)
    batch = scheduler.next_batch()
    assert [piece.state for piece in batch.parts] == tasks
    assert len(batch.step.index_T) == rows
    assert (batch.step.index_T >= 0).sum() == clients * (4 if rows in (4, 40) else 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 90)), min_size=1, max_size=12), st.integers(1, 96))
def test_rows_and_entries_of_a_mixed_step_have_room(decoding, entries):
    scheduler = Scheduler(table(), MIXED, PAGE)
    for rows, read in decoding:
        (task,) = fixed_tasks(scheduler, [min(rows, 4)], entries=read, decoding=True)
        task.rows.proposed = task.rows.left - 1
    fixed_tasks(scheduler, [40, 3], entries=entries)
    _, batches = run_fixed(scheduler, dict.fromkeys((2, 4, 8, 12, 24, 16, 64), 1))
    for batch in batches:
        used = sum(len(piece.state.rows.table) for piece in batch.parts)
        assert used == (batch.step.request_S >= 0).sum()


def test_a_prefill_that_leaves_layers_out_takes_turns_with_decoding():
    scheduler = Scheduler(table(), MIXED, PAGE)
    fixed_tasks(scheduler, [1], decoding=True)
    (task,) = fixed_tasks(scheduler, [2000])
    task.rows.layers = (0, 1)
    turns = []
    for _ in range(4):
        batch = scheduler.next_batch()
        turns.append(is_decode(batch))
        if not turns[-1]:
            batch.deliver(None, None)
            assert len(batch.step.index_T) <= 64
    assert turns == [True, False, True, False]


def test_the_oldest_request_is_prefilled_first():
    bench = Bench(pages=900)
    tasks = [bench.start(simple(70 + seed, seed), Full(), limit=3) for seed in range(6)]
    age = {id(task): i for i, task in enumerate(tasks)}
    waiting = set(age.values())
    while waiting:
        batch = bench.scheduler.next_batch()
        if not is_decode(batch):
            ages = [age[id(piece.state)] for piece in batch.parts]
            assert ages == sorted(ages) and ages[0] == min(waiting)
            assert ages == sorted(waiting)[: len(ages)], "nobody is passed over"
            assert all(piece.state.rows.left == piece.end - piece.begin for piece in batch.parts[:-1])
        for task in batch.deliver(*bench.device.run(batch)):
            bench.advance(task)
        waiting = {age[id(task)] for task in tasks if not task.decoding}
    bench.run()


@pytest.mark.parametrize("decoding", [False, True])
@settings(max_examples=40, deadline=None)
@given(entries=st.lists(st.integers(1, 96), min_size=1, max_size=8))
def test_entries_never_exceed_the_largest_bucket(decoding, entries):
    scheduler = Scheduler(table(), SMALL, PAGE)
    for n in entries:
        fixed_tasks(scheduler, [1], entries=n, decoding=decoding)
    _, batches = run_fixed(scheduler, dict.fromkeys((2, 4, 16, 64), 1))
    for batch in batches:
        used = sum(len(piece.state.rows.table) for piece in batch.parts)
        assert used == (batch.step.request_S >= 0).sum()
        assert len(batch.step.page_S) == (8 if used <= 8 else 96)


def test_a_request_that_fits_never_exceeds_the_entries():
    """However scattered its prefix lies: `fits` counts segments, not the runs that a prefix was found in."""
    grid = Grid(rows=SMALL.rows, entries=(8, 24), logits=(2,))
    bench = Bench(pages=200, grid=grid)
    prompt = simple(40)
    for n in range(2, 40):
        work_on(bench, make_prompt((Kind.QUERY, prompt.tokens[:n])), Prefix(), limit=1)
    assert bench.scheduler.limits.holds(44, 1)
    assert work_on(bench, prompt, Prefix(), limit=4) <= 40 + 3


def test_what_fits_is_told_beforehand():
    scheduler = Scheduler(table(), SMALL, PAGE)
    assert scheduler.limits.holds(94 * PAGE, 1) and not scheduler.limits.holds(94 * PAGE + 1, 1)
    assert scheduler.limits.holds(90 * PAGE, 3) and not scheduler.limits.holds(90 * PAGE, 4)


# ------------------------------------------------------------------------- everything at once


@pytest.mark.parametrize("grid", [SMALL, MIXED], ids=["small", "mixed"])
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_many_requests_see_exactly_their_own_keys(grid, seed):
    """Random prompts of shared parts, arriving and leaving at random, under all strategies in one small pool."""
    random = np.random.default_rng(seed)
    bench = Bench(pages=120, grid=grid)
    waiting = []
    for _ in range(int(random.integers(3, 12))):
        chunks = random.permutation(4)[: random.integers(0, 4)] + 1
        prompt = knowledge_prompt(int(random.integers(9, 12)), tuple(int(c) for c in chunks))
        waiting.append((prompt, (Full, Prefix, Naive)[random.integers(3)](), int(random.integers(1, 7))))
    while waiting or bench.scheduler.requests.running:
        if waiting and random.random() < 0.4:
            try:
                bench.start(*waiting[-1])
                waiting.pop()
            except OutOfPages:
                assert bench.scheduler.requests.running
        if bench.scheduler.requests.running and random.random() < 0.05:
            bench.stop(bench.scheduler.requests.running[random.integers(len(bench.scheduler.requests.running))])
        bench.step()
        audit_cache(bench.cache, live={task.id for task in bench.scheduler.requests.running})
    audit_cache(bench.cache, live=())
    bench.cache.clear()
    assert bench.cache.metrics.pages_used == 0
