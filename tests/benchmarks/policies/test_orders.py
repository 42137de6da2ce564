"""Orders in the simulator: the engine's own, and rows that add up."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.policies import orders
from benchmarks.policies.cell import Cell, modelled
from benchmarks.policies.simulator import Simulator
from benchmarks.policies.source import Forest, Request, Workload
from ragjax.cache.policy.base import LRU
from ragjax.cache.policy.lacr import LACR
from ragjax.core import Kind, Prompt, Segment
from ragjax.schedule.order import ORDERS
from tests.support import tiny

SYSTEM, DOCUMENT, QUESTION = 12, 25, 7


def stream(seed: int, count: int = 12) -> list[tuple[int, ...]]:
    """Documents of each request, in order."""
    random = np.random.default_rng(seed)
    return [tuple(int(n) for n in random.permutation(4)[: random.integers(1, 4)]) for _ in range(count)]


def workload(asked: list[tuple[int, ...]]) -> Workload:
    forest, requests = Forest(), []
    system = forest.child(-1, "system", SYSTEM)
    for documents in asked:
        nodes = [system]
        for document in documents:
            nodes.append(forest.child(nodes[-1], document, DOCUMENT, document=True))
        requests.append(Request(tuple(nodes), QUESTION, len(documents)))
    return forest.workload("stream", requests)


def prompt(documents: tuple[int, ...], question: int) -> Prompt:
    def segment(kind: Kind, seed: int, n: int) -> Segment:
        return Segment(f"{kind} {seed}", kind, np.random.default_rng(seed).integers(0, 256, n).astype(np.int32))

    chunks = (segment(Kind.CHUNK, document, DOCUMENT) for document in documents)
    return Prompt((segment(Kind.SYSTEM, 99, SYSTEM), *chunks, segment(Kind.QUERY, 100 + question, QUESTION)))


@pytest.mark.parametrize("order", ORDERS)
def test_the_engine_starts_requests_as_the_simulator_does(order: str) -> None:
    asked = stream(5)
    simulator = Simulator(workload(asked), LRU(), 10**6)
    simulator.run(len(asked), ORDERS[order]())
    ended: list[int] = []
    held = threading.Event()
    with tiny.engine(order=order, max_running=1) as engine:
        engine._loop._inbox.put(lambda: held.wait(30))  # type: ignore[arg-type, func-returns-value, return-value]
        futures = [engine.begin_prompt(prompt(documents, i), max_tokens=1) for i, documents in enumerate(asked)]
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: ended.append(i))  # type: ignore[misc]
        held.set()
        for future in futures:
            future.result(60)
    assert ended == simulator.sequence


@pytest.mark.parametrize("order", ORDERS)
def test_every_request_is_served_once_and_the_books_add_up(order: str) -> None:
    work = workload(stream(1, 200))
    simulator = Simulator(work, LACR(), 90, 100)
    served = simulator.run(order=ORDERS[order]())
    simulator.audit()
    assert sorted(simulator.sequence) == list(range(200)) and len(served) == 200
    assert (simulator.sequence == list(range(200))) == (order == "fcfs")


def test_in_order_of_arrival_all_is_as_it_was() -> None:
    work = workload(stream(2, 150))
    one, other = Simulator(work, LACR(), 90), Simulator(work, LACR(), 90)
    by_queue, by_number = one.run(), [other.serve(at) for at in range(150)]
    assert [(s.hit, s.moved) for s in by_queue] == [(s.hit, s.moved) for s in by_number]


def test_rows_have_what_replacement_leaves() -> None:
    work = replace(workload(stream(3, 80)), name="zipf")
    rows = [
        orders.serve(Cell(work, 100, 0), policy, order, modelled()) for policy in orders.POLICIES for order in ORDERS
    ]
    for row in rows:
        assert 0 < row["token_hit_rate"] <= row["served_min"] <= 1 and row["prefill_s"] > 0
        assert row["recomputed_tokens"] == round((1 - row["found_share"]) * sum(work.totals))
    gains = orders.gains(rows)
    assert [row["over_lacr"] for row in gains if row["policy"] == "lacr" and row["order"] == "fcfs"] == [0]
    assert max(row["over_best_order"] for row in gains if row["policy"] != "lacr") == 0
