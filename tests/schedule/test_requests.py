"""The table of live requests: one phase each, and every end told once."""

from __future__ import annotations

import pytest

from ragjax.core import Answer, OverloadError, RequestError, Timings
from ragjax.reuse import Full
from ragjax.schedule.admission import Admission, Allocations
from ragjax.schedule.requests import RESTARTS, QueueLimit
from ragjax.schedule.state import Phase
from tests.support.audit import audit_cache
from tests.support.bench import STAGES, Bench, simple
from tests.support.states import Asked


class Table(Bench):
    """A table and who starts its requests. told: what each request's owner was told."""

    def __init__(self, pages=40):
        super().__init__(pages)
        allocations = Allocations(self.requests, self.cache, self.scheduler.limits, STAGES)
        self.admission = Admission(self.requests, self.cache, allocations)
        self.told = {}

    def ask(self, background=False):
        self.count += 1
        state = Asked(f"r{self.count}", simple(6, self.count), Full(), 4, arrival=self.count, background=background)
        self.told[state] = []
        state.sink = self.told[state].append
        self.requests.arrive(state)
        return state

    def begin(self):
        assert all(error is None for _, error in self.admission.start_waiting())


def answer():
    return Answer(
        text="", finish_reason="stop", tokens=(), prompt_tokens=6, cached_tokens=0, strategy="full", exact_to="full",
        segments=(), timings=Timings(),
    )  # fmt: skip


def test_a_request_is_in_one_phase_from_its_arrival_to_its_end():
    bench = Table()
    states = [bench.ask() for _ in range(4)]
    assert bench.requests.live == states and {state.phase for state in states} == {Phase.WAITING}
    bench.begin()
    assert {state.phase for state in states} == {Phase.RUNNING} and not len(bench.requests.queue)
    first, second, third, fourth = states
    bench.requests.finish(first, answer())
    bench.requests.fail(second, RuntimeError("a defect"))
    third.cancelled = True
    bench.requests.end_cancelled()
    assert bench.requests.live == [fourth] and {state.phase for state in states[:3]} == {Phase.ENDED}
    assert [len(bench.told[state]) for state in states] == [1, 1, 0, 0]
    counters = bench.requests.counters
    assert (counters.requests["full"], counters.errors, counters.cancelled) == (1, 1, 1)
    assert [state for state, _ in bench.requests.take_answered()] == [first] and not bench.requests.answered
    for state in states[:3]:
        bench.requests.end(state, RuntimeError("again"))
    assert sum(map(len, bench.told.values())) == 2, "an end is told once"
    bench.requests.end(fourth, None)
    audit_cache(bench.cache, live=())


def test_one_that_starts_again_is_before_all_others_and_fails_in_the_end():
    bench = Table()
    first = bench.ask()
    bench.begin()
    other = bench.ask()
    error = RuntimeError("the step failed")
    for _ in range(RESTARTS):
        bench.requests.retry(first, "again", error)
        assert bench.requests.live == [first, other] and first.phase is Phase.WAITING
        bench.begin()
    bench.requests.retry(first, "again", error)
    assert first.ended and bench.told[first] == [error] and first.notices == ["again"] * RESTARTS
    bench.requests.end(other, None)
    audit_cache(bench.cache, live=())


def test_an_error_that_is_the_clients_is_no_error_of_the_engine():
    bench = Table()
    bench.requests.fail(bench.ask(), RequestError("too long"))
    bench.requests.fail(bench.ask(background=True), RuntimeError("a defect"))
    assert not bench.requests.counters.errors and not bench.requests.live


def test_a_speculation_counts_when_it_is_confirmed():
    bench = Table()
    right, wrong = bench.ask(), bench.ask()
    for state in (right, wrong):
        state.speculative = True
    bench.begin()
    bench.requests.finish(right, answer())
    assert not bench.requests.counters.requests and not bench.requests.answered
    bench.requests.confirm(right)
    bench.requests.refute(wrong)
    assert bench.requests.counters.requests == {"full": 1} and len(bench.requests.answered) == 1
    assert bench.requests.counters.speculations == {"hit": 1, "wrong": 1}
    assert wrong.ended and not bench.told[wrong]
    audit_cache(bench.cache, live=())


def test_the_queue_refuses_whom_it_has_no_place_for():
    bench, limit = Table(), QueueLimit(1)
    first, second, third = (bench.ask() for _ in range(3))
    limit.enter(first)
    place = limit.hold_place()  # with nothing running, the first counts as running
    with pytest.raises(OverloadError):
        limit.check_room()
    limit.enter(second, place)
    with pytest.raises(OverloadError, match="1 requests wait"):
        limit.enter(third)
    limit.leave(first)
    limit.enter(third)
    bench.requests.end(second, None)
    limit.leave(second)
    limit.enter(second)
    assert limit.counted == {third}, "one that ended takes no place"
