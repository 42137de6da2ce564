"""Tails that grow page by page, and requests that give way to older ones: a simulated device checks every row.

`bench.Device` proves that each row sees the tokens before it, and nothing else; here requests are moved
off the device and back to other pages meanwhile.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragjax.core import NEVER, Kind, OutOfPages, Run, Span
from ragjax.reuse import Full, Naive, Prefix
from ragjax.schedule.admission import Admission, Allocations
from ragjax.schedule.pause import RECOMPUTED, Pauses
from ragjax.schedule.rows import SpanTable
from tests.support.audit import audit_cache
from tests.support.bench import PAGE, STAGES, Bench, knowledge_prompt, make_prompt, read_table, simple
from tests.support.states import Asked


class Copies:
    """Copies the slots of the simulated device; those given back hold garbage, so that whoever reads them notices."""

    lost = False

    def __init__(self, device):
        self.device = device

    def slots(self, pages):
        return (np.asarray(pages)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)

    def download(self, pages):
        at = self.slots(pages)
        copies = self.device.token[at].copy(), self.device.position[at].copy()
        return copies

    def restore(self, pages, copies):
        at = self.slots(pages)
        self.device.token[at], self.device.position[at] = copies


class Serving(Bench):
    """The bench with admission and pauses, as the engine's loop runs them.

    ended: tokens of each request that ended. failed: those that never can have their pages.
    """

    def __init__(self, pages):
        super().__init__(pages)
        allocations = Allocations(self.requests, self.cache, self.scheduler.limits, STAGES)
        self.admission = Admission(self.requests, self.cache, allocations)
        self.pauses = Pauses(self.requests, self.cache, allocations, Copies(self.device))
        self.ended, self.failed = {}, []

    def ask(self, prompt, strategy, limit, background=False):
        self.count += 1
        state = Asked(f"r{self.count:03}", prompt, strategy, limit, arrival=self.count, background=background)
        state.sink = lambda event: self.failed.append(state.id)
        self.requests.arrive(state)
        return state

    def advance(self, task):
        self.limits[task.id] = task.limit if isinstance(task, Asked) else self.limits[task.id]
        super().advance(task)

    def stop(self, state):
        if isinstance(state, Asked):
            self.ended[state.id] = state.said + len(state.decoded) + 1
        self.end(state)

    def end(self, state):
        self.requests.end(state, None)
        self.requests.blocked = False

    def iterate(self):
        """One iteration of the loop; whether anything is left to do."""
        self.pauses.resume()
        if not self.requests.paused:
            for _, error in self.admission.start_waiting():
                assert error is None, error
        self.pauses.make_room()
        self.step()
        live = {state.id for state in self.requests.running}
        audit_cache(self.cache, live=live)
        assert all(state.paused is not None and not state.running for state in self.requests.paused)
        return bool(live or self.requests.paused or list(self.requests.queue) or self.requests.background)

    def drain(self):
        while self.iterate():
            pass


def test_a_request_takes_pages_as_it_decodes():
    bench = Serving(100)
    state = bench.ask(simple(6), Full(), limit=60)
    bench.iterate()
    assert bench.cache.metrics.pages_used == 2, "six tokens and the first of the answer"
    while bench.iterate():
        needed = bench.cache.pool.pages_for(6 + len(state.decoded))
        assert needed <= bench.cache.metrics.pages_used <= needed + 1
    assert bench.ended == {state.id: 60}


@pytest.mark.parametrize("broken", ["download", "restore"])
def test_a_request_whose_kv_cannot_be_copied_is_computed_again_and_others_go_on(monkeypatch, broken):
    bench, refused = Serving(13), []

    def refuse(*_):
        refused.append(broken)
        raise MemoryError("no room for copies")

    copies = bench.pauses._copier
    monkeypatch.setattr(copies, broken, refuse)
    asked = [bench.ask(simple(6), Full(), limit=30) for _ in range(2)]
    bench.drain()
    assert refused and not bench.failed and set(bench.ended) == {state.id for state in asked}
    assert RECOMPUTED in asked[1].notices
    copies.lost = True  # then it is everybody's affair
    for _ in range(2):
        bench.ask(simple(6), Full(), limit=30)
    with pytest.raises(MemoryError):
        bench.drain()


def test_a_background_request_that_made_room_keeps_nobody_waiting():
    bench = Serving(17)
    states = [bench.ask(simple(6), Full(), limit=9, background=background) for background in (False, True)]
    bench.iterate()
    bench.pauses._copier.download = None  # nobody is paused, everybody is stopped
    for state, blocked in ((states[1], False), (states[0], True)):
        bench.pauses._give_way(state)
        assert bench.requests.blocked == blocked


def test_the_first_page_of_the_tail_is_there_when_a_prompt_fills_its_pages():
    bench = Serving(100)
    bench.ask(simple(2 * PAGE), Full(), limit=2)
    bench.iterate()
    assert bench.cache.metrics.pages_used == 3


def test_no_more_pages_are_taken_than_the_answer_can_need():
    bench = Serving(4)
    bench.ask(simple(2 * PAGE + 1), Full(), limit=3)  # exactly the pages that there are
    bench.drain()
    assert bench.ended and not bench.failed


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 9), st.integers(1, 9), st.lists(st.integers(1, 3), max_size=4))
def test_a_table_that_grew_equals_one_that_was_made_so(first, tail, more):
    """First tokens of a prompt, a tail up to the end of its page, and pages that come later."""
    start = first % PAGE
    tail = min(tail, PAGE - start)
    prompt, run = Run(tuple(range(1, 2 + first // PAGE)), 0, first), Run((1 + first // PAGE,), start, tail)
    tables = [SpanTable((Span.consecutive(0, prompt), Span(np.full(tail, NEVER), run)), PAGE)]
    at, whole = 50, run
    for pages in more:
        piece = Run(tuple(range(at, at + pages)), 0, pages * PAGE)
        tables[0].grow(piece)
        whole, at = Run((*whole.pages, *piece.pages), whole.start, whole.length + piece.length), at + pages
    slots = np.concatenate([run.slots(PAGE), *(np.arange(50 * PAGE, at * PAGE))[None]])
    for i in range(len(slots)):
        tables[0].show(i, first + i)
    seen = sorted((order, page * PAGE + slot) for page, slot, order, _, _ in read_table(tables[0], PAGE))
    assert [slot for _, slot in seen] == [*prompt.slots(PAGE).tolist(), *slots.tolist()]
    assert [order for order, _ in seen] == [*range(first + len(slots))]


def test_the_youngest_gives_way_and_goes_on_where_it_was():
    bench = Serving(12)
    old, young = bench.ask(simple(9, 1), Full(), limit=25), bench.ask(simple(9, 2), Full(), limit=25)
    paused = set()
    while bench.iterate():
        paused |= {state.id for state in bench.requests.paused}
    assert paused == {young.id} and not old.times.pauses
    assert bench.ended == {old.id: 25, young.id: 25}
    assert bench.requests.counters.pauses == bench.requests.counters.resumes > 0
    assert bench.device.computed[young.id] == 9 + 24, "nothing was computed twice"


def test_a_paused_request_goes_on_before_a_new_one_starts():
    bench = Serving(12)
    bench.ask(simple(9, 1), Full(), limit=25)
    young = bench.ask(simple(9, 2), Full(), limit=25)
    while not bench.requests.paused:
        bench.iterate()
    new = bench.ask(simple(2, 3), Full(), limit=1)
    while not new.running and new.id not in bench.ended:
        assert bench.iterate()
        assert young.running or bench.requests.paused or young.id in bench.ended
        assert not (bench.requests.paused and new.running)
    bench.drain()
    assert len(bench.ended) == 3


def test_the_background_gives_way_first():
    bench = Serving(17)
    background = bench.ask(simple(9, 1), Full(), limit=30, background=True)
    bench.iterate()
    front = [bench.ask(simple(9, 2 + i), Full(), limit=20) for i in range(2)]
    bench.iterate()
    assert background.running and all(state.running for state in front)
    while not all(state.id in bench.ended for state in front):
        assert bench.iterate()
    assert not bench.requests.counters.pauses and bench.requests.counters.stops == 1
    bench.drain()
    assert background.id in bench.ended


def test_the_background_gives_way_to_an_answer_that_may_need_its_room():
    bench = Serving(12)
    background = bench.ask(simple(9, 1), Full(), limit=30, background=True)
    bench.iterate()
    front = bench.ask(simple(9, 2), Full(), limit=25)
    bench.iterate()
    assert front.running and not background.running
    bench.drain()
    assert len(bench.ended) == 2


def test_who_is_still_in_its_prompt_starts_again():
    bench = Serving(16)
    old = bench.ask(simple(9, 1), Full(), limit=45)
    while not old.decoding:
        bench.iterate()
    young = bench.ask(simple(40, 2), Full(), limit=2)
    young.stuck = True
    while not bench.requests.counters.stops:
        assert bench.iterate()
    assert not young.running and not bench.requests.counters.pauses
    young.stuck = False
    bench.drain()
    assert bench.ended == {old.id: 45, young.id: 2}


def test_one_that_cannot_grow_though_it_is_alone_fails_and_says_why():
    bench = Serving(12)
    state = bench.ask(simple(9, 1), Full(), limit=30)
    while not state.decoding:
        bench.iterate()
    held = bench.cache.reserve(bench.cache.pool.reclaimable_pages * PAGE, "kept")
    errors = []
    state.sink = errors.append
    while not errors:
        bench.pauses.make_room()
        bench.step()
    assert "max_tokens" in str(errors[0]) and errors[0].code == "context_length_exceeded" and state.ended
    bench.cache.free(held)
    audit_cache(bench.cache, live=())


def test_room_that_nobody_who_runs_holds_is_known_at_the_start():
    """KV that outlives its request does not come back: an answer that needs its room is refused before it begins."""
    bench = Serving(12)
    held = bench.cache.reserve(5 * PAGE, "kept")
    state = bench.ask(simple(9, 1), Full(), limit=30)
    ((refused, error),) = list(bench.admission.start_waiting())
    assert refused is state and "lower max_tokens" in str(error)
    bench.end(state)
    bench.cache.free(held)
    bench.ask(simple(9, 1), Full(), limit=30)
    bench.drain()
    assert len(bench.ended) == 1


def test_kv_on_too_many_pages_is_not_started_with():
    """A prefix that lies scattered, a page for each piece, would leave no room for the answer, even alone."""
    bench = Serving(14)
    prompt = simple(24)
    for n in range(3, 25, 3):
        bench.start(make_prompt((Kind.QUERY, prompt.tokens[:n])), Prefix(), 1)
        bench.run()
    state = bench.task(prompt, Prefix(), limit=24)
    with pytest.raises(OutOfPages, match="may need"):
        state.begin()
    audit_cache(bench.cache, live=())
    bench.ask(prompt, Prefix(), limit=24)
    bench.drain()
    assert len(bench.ended) == 1 and not bench.failed


def test_where_copies_have_no_room_the_youngest_is_computed_again(monkeypatch):
    monkeypatch.setattr(Pauses, "pages", 1000)
    bench = Serving(12)
    old, young = bench.ask(simple(9, 1), Full(), limit=25), bench.ask(simple(9, 2), Full(), limit=25)
    bench.drain()
    assert bench.ended == {old.id: 25, young.id: 25} and not bench.requests.counters.pauses
    assert young.notices == [RECOMPUTED] and not old.notices


def test_a_paused_request_that_leaves_gives_everything_back():
    bench = Serving(12)
    bench.ask(simple(9, 1), Full(), limit=25)
    young = bench.ask(simple(9, 2), Full(), limit=25)
    while not bench.requests.paused:
        bench.iterate()
    bench.end(young)
    assert young.paused is None and not bench.requests.paused
    bench.drain()
    assert len(bench.ended) == 1


def test_what_a_resumed_request_keeps_is_what_it_computed():
    bench = Serving(13)
    old, young = bench.ask(simple(9, 1), Full(), limit=30), bench.ask(simple(9, 2), Prefix(), limit=20)
    bench.drain()
    assert young.times.pauses and not old.times.pauses
    for node in bench.cache.tree.nodes():
        slots = node.run.slots(PAGE)
        assert bench.device.token[slots].tolist() == np.frombuffer(node.raw, "<i4").tolist()
        assert bench.device.position[slots].tolist() == [*range(node.start, node.end)]


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_everyone_ends_whatever_the_pool(seed):
    """Random pools, lengths, strategies, cancels: each row sees its own tokens, the oldest is never paused, all end."""
    random = np.random.default_rng(seed)
    bench = Serving(int(random.integers(26, 60)))
    waiting = []
    for _ in range(int(random.integers(2, 9))):
        chunks = random.permutation(3)[: random.integers(0, 3)] + 1
        prompt = knowledge_prompt(int(random.integers(9, 12)), tuple(int(c) for c in chunks))
        waiting.append((prompt, (Full, Prefix, Naive)[random.integers(3)](), int(random.integers(1, 40))))
    states, cancelled = [], set()
    for _ in range(3000):
        if waiting and random.random() < 0.3:
            states.append(bench.ask(*waiting.pop(), background=random.random() < 0.15))
        if states and random.random() < 0.02:
            state = states[random.integers(len(states))]
            if state.id not in bench.ended:
                cancelled.add(state.id)
                bench.end(state)
        if not bench.iterate() and not waiting:
            break
    else:
        pytest.fail("they never end")
    assert not bench.failed
    for state in states:
        if state.id not in cancelled:
            assert bench.ended[state.id] == state.said + state.limit
    assert not [state for state in states[:1] if state.times.pauses and not state.background]
    audit_cache(bench.cache, live=())
    bench.cache.clear()
    assert bench.cache.metrics.pages_used == 0
