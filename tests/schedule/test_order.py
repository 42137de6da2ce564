"""Orders on the papers' examples, starvation, and agreement of names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

import benchmarks.baseline  # noqa: F401 (registers its names)
from ragjax.cache.lookahead import Look
from ragjax.schedule.order import ORDERS, WINDOW, Queue, Waiting


def fixed(total: int, cached: int) -> Waiting:
    """A request of which so much is kept."""
    return Waiting(total=total, look=lambda: Look({b"": cached}))


class Documents:
    """A cache of whole documents, the one used longest ago leaves first; requests ask for one of them each.

    kept: what the cache has at first, of each document the tokens kept. A request computes its question too.
    """

    def __init__(self, capacity: int, kept: dict[str, int], sizes: dict[str, int]):
        self.capacity, self.sizes = capacity, sizes
        self.kept = OrderedDict(kept)
        self.computed = 0

    def waiting(self, document: str) -> Waiting:
        def look() -> Look:
            return Look({b"": self.kept.get(document, 0)})

        return Waiting(total=self.sizes[document] + 1, look=look)

    def serve(self, document: str) -> bool:
        """Whether nothing of the document had to be computed."""
        size = self.sizes[document]
        new = size - self.kept.get(document, 0)
        self.computed += new
        self.kept[document] = size
        self.kept.move_to_end(document)
        while sum(self.kept.values()) > self.capacity:
            self.kept.popitem(last=False)
        return not new


def serve_all(cache: Documents, order: str, documents: Sequence[str], window: int = WINDOW) -> tuple[list[int], int]:
    """Numbers of the requests, from 1 on, in the order in which they were served, and hits."""
    queue: Queue[Waiting] = Queue(ORDERS[order](window))
    number = {}
    for i, document in enumerate(documents, 1):
        waiting = cache.waiting(document)
        number[waiting] = i
        queue.add(waiting)
    served, hits = [], 0
    while (chosen := queue.next()) is not None:
        queue.start(chosen)
        served.append(number[chosen])
        hits += cache.serve(documents[number[chosen] - 1])
    return served, hits


def test_a_server_has_two_orders_and_the_tables_one_more():
    assert {"fcfs", "ratio", "lpm"} <= set(ORDERS)
    assert [name for name, order in ORDERS.items() if order.__module__.startswith("ragjax")] == ["fcfs", "ratio"]


FIGURE_10A = (4, {"Q1": 2, "Q2": 1}, {"Q1": 4, "Q2": 3})
FIGURE_10B = (5, {"Q1": 2, "Q2": 2}, {"Q1": 4, "Q2": 3})
"""RAGCache: capacity, cached tokens, tokens of the two requests."""


@pytest.mark.parametrize("figure, better, worse", [(FIGURE_10A, 5, 6), (FIGURE_10B, 3, 5)])
def test_the_cheaper_order_of_two_requests(figure, better, worse):
    """Larger cached contexts go first, and shorter computations; both arrive in the dearer order."""
    dearer = ["Q2", "Q1"] if figure is FIGURE_10A else ["Q1", "Q2"]
    for order, cost in (("fcfs", worse), ("ratio", better)):
        capacity, kept, sizes = figure
        cache = Documents(capacity, dict(sorted(kept.items(), reverse=dearer[0] == "Q1")), sizes)
        serve_all(cache, order, dearer)
        assert cache.computed == cost


def test_the_longest_match_looks_at_the_cached_length_alone():
    first, second = fixed(5, 2), fixed(4, 2)
    assert ORDERS["ratio"]().pick([first, second]) is second
    assert ORDERS["lpm"]().pick([first, second]) is first


@pytest.mark.parametrize("order", ["ratio", "lpm"])
def test_odd_and_even(order):
    """RAGCache, section 5.2: two documents by turns, room for one, and a window of 2."""
    asked = ["D1", "D2"] * 3 + ["D1"]
    sizes = {"D1": 4, "D2": 4}
    served, hits = serve_all(Documents(4, {}, sizes), order, asked, window=2)
    assert served == [1, 3, 5, 2, 4, 6, 7] and hits == 4  # all of them among the first six
    served, hits = serve_all(Documents(4, {}, sizes), "fcfs", asked, window=2)
    assert served == [1, 2, 3, 4, 5, 6, 7] and hits == 0


def test_a_request_computes_its_last_token_whatever_is_kept():
    full, part = fixed(8, 8), fixed(8, 7)
    assert full.cached == part.cached == 7
    assert ORDERS["ratio"]().pick([part, full]) is part


@given(
    st.sampled_from(sorted(ORDERS)),
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 9)), max_size=40),
)
def test_nobody_is_overtaken_more_often_than_the_window_allows(order, window, arrivals):
    """Requests arrive and start by turns; some that started come back, and some may not start for a while."""
    queue: Queue[Waiting] = Queue(ORDERS[order](window))
    arrived: list[Waiting] = []
    started: list[Waiting] = []

    def start_one(barred: Sequence[Waiting] = ()) -> None:
        chosen = queue.next(lambda waiting: waiting not in barred)
        if chosen is None:
            return
        queue.start(chosen)
        if chosen not in started:
            started.append(chosen)
        if len(started) % 5 == 0 and chosen.total % 2:
            chosen.total += 1
            queue.put_back(chosen)

    for starts, total, cached in arrivals:
        waiting = fixed(total, cached)
        arrived.append(waiting)
        queue.add(waiting)
        for _ in range(starts):
            start_one(arrived[-3:])
    while len(queue):
        assert queue.ahead(3)[: len(queue)] == queue.ahead(len(queue))[:3]
        start_one()
    assert set(started) == set(arrived)
    for waiting in arrived:
        younger = arrived[arrived.index(waiting) + 1 :]
        overtook = [other for other in started[: started.index(waiting)] if other in younger]
        assert len(overtook) <= window and waiting.overtaken == len(overtook)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=20))
def test_first_come_first_served(requests):
    queue: Queue[Waiting] = Queue(ORDERS["fcfs"]())
    entries = [fixed(*request) for request in requests]
    for waiting in entries:
        queue.add(waiting)
    assert queue.ahead(99) == entries
    for waiting in entries:
        assert queue.next() is waiting
        queue.start(waiting)
    assert queue.next() is None
