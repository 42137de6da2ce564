"""KV of waiting requests comes to the device while they queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragjax.core import Answer, Request
from ragjax.core.step import StepLimits
from ragjax.core.tiers import Tier
from ragjax.engine import Engine
from ragjax.schedule.admission import PREFETCH, Allocations, Prefetch, Preview
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.disks import Faults, open_store, paced
from tests.support.matrix import few
from tests.support.pace import lasting, until
from tests.support.states import table
from tests.support.transfers import PAGE, Bench, FakeDiskIndex, tokens

GIGA = 2**30
A, B, C = ([n] * 8 for n in (1, 2, 3))


# ------------------------------------------------------------------------------------------ the cache


def state_of(bench: Bench) -> tuple[Any, ...]:
    metrics = bench.cache.metrics
    notes = {node.key: (node.note, node.hits) for node in bench.cache.tree.nodes()}
    counts = metrics.lookups, metrics.exact_hit_tokens, metrics.missed_tokens, dict(metrics.tier_hit_tokens)
    return notes, counts


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_look_ahead_loads_and_counts_nothing(tier: str) -> None:
    disk = FakeDiskIndex() if tier == "disk" else None
    bench = Bench(8, host_bytes=0 if disk is not None else 10**6, disk_index=disk, lag=True)
    bench.put(A)
    bench.squeeze()
    bench.settle()
    before = state_of(bench)[1]
    with bench.cache.looking_ahead(2) as taken:
        bench.cache.matcher.match_prefix(tokens(*A, 9)).release()
        assert taken() == 2 and bench.cache.loading == 1
    bench.settle()
    assert state_of(bench)[1] == before
    with bench.cache.matcher.match_prefix(tokens(*A)) as match:
        assert match.ready and match.complete and match.tier() is Tier.DEVICE
    bench.audit()


def test_a_look_ahead_takes_no_more_pages_than_it_may() -> None:
    bench = Bench(16, host_bytes=10**6, lag=True)
    path = [*A, *B, *C]
    bench.put(path, cuts=(8, 16))
    bench.squeeze()
    bench.settle()
    with bench.cache.looking_ahead(3) as taken:
        match = bench.cache.matcher.match_prefix(tokens(*path))
        assert taken() == 2 and match.length == 8  # a second run would take two more
        match.release()
    with bench.cache.looking_ahead(0):
        assert bench.cache.matcher.match_prefix(tokens(*path)).length == 8
    bench.settle()


def test_loads_of_a_look_ahead_are_given_up_for_their_pages() -> None:
    bench = Bench(5, host_bytes=10**6, lag=True)
    bench.put(A)
    bench.squeeze()
    bench.settle()
    with bench.cache.looking_ahead(4):
        bench.cache.matcher.match_prefix(tokens(*A)).release()
    assert bench.pool.reclaimable_pages == 2
    assert bench.cache.give_up() and bench.pool.reclaimable_pages == 4
    bench.audit()
    assert bench.cache.metrics.pages_used * PAGE == 0


class Asks:
    """A waiting request for a causal prompt, as far as a look ahead sees it."""

    id, request = "ahead", Request()
    may_load, ratio, decode_tokens, forced_tokens = True, None, 1, 0

    def __init__(self, ids: list[int]):
        self.whole_prompt = tokens(*ids)
        self.strategy = self
        self.ahead: int | None = None

    def prefill(self, prompt: Any, allocation: Preview, ratio: None) -> Iterator[None]:
        allocation.prefix(prompt)
        allocation.reserve(1)
        yield


def looking(bench: Bench) -> Prefetch:
    requests = table(bench.cache)
    return Prefetch(requests, bench.cache, Allocations(requests, bench.cache, StepLimits(64, PAGE), (0, 1)))


def test_what_a_nearer_request_needs_stays_while_a_farther_ones_is_brought() -> None:
    """A is on the device, the rest of which is in use; B would take its place."""
    bench = Bench(9, host_bytes=10**6, lag=True)
    bench.put(B)
    bench.squeeze()
    bench.put(A)
    bench.settle()
    running = bench.reserve(6 * PAGE, "running")
    prefetch = looking(bench)
    near, far = Asks(A), Asks(B)
    prefetch.run([near, far])
    assert bench.cache.loading == 0 and bench.node(tokens(*A)).run is not None
    bench.audit(["running"])
    bench.cache.free(running)
    prefetch.run([far])
    assert bench.cache.loading == 0  # it was looked after once
    far.ahead = None
    prefetch.run([near, far])
    assert bench.cache.loading == 1
    bench.settle()
    assert bench.node(tokens(*A)).run is not None and bench.node(tokens(*B)).run is not None
    bench.audit()


# ------------------------------------------------------------------------------------------ the engine


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Path]:
    """A folder that holds the KV of prompts 0 to 3."""
    with tiny.engine(disk=open_store(tmp_path)) as engine:
        for seed in range(4):
            engine.answer_prompt(tiny.prompt(seed), max_tokens=1)
    yield tmp_path


def busy(engine: Engine) -> Any:
    """A request that runs until it is cancelled."""
    return lasting(engine, tiny.prompt(9), strategy="full", max_tokens=700)


def arrived(engine: Engine) -> bool:
    """Whether something was loaded, and nothing is, between two looks of the engine's thread at what to load."""
    loading: list[int] = []
    engine._loop.call(lambda: loading.append(engine._cache.loading))
    return "load" in engine.stats()["transfers_total"] and loading == [0]


@pytest.mark.parametrize("strategy", ["prefix", "naive"])
def test_who_waited_finds_its_kv_on_the_device(strategy: str, tmp_path: Path) -> None:
    with tiny.engine(disk=open_store(tmp_path)) as engine:
        expected = engine.answer_prompt(tiny.prompt(0), strategy=strategy, max_tokens=3)
    with tiny.engine(disk=open_store(tmp_path), max_running=1) as engine:
        running = busy(engine)
        waiting = engine.begin_prompt(tiny.prompt(0), strategy=strategy, max_tokens=3)
        until(lambda: arrived(engine))
        assert not waiting.done() and engine.stats()["lookups_total"] == 0
        running.cancel()
        answer = waiting.result()
        assert answer.tokens == expected.tokens
        assert {report.tier for report in answer.segments if report.reused} == {"device"}


def test_no_more_is_loaded_than_a_share_of_the_pool(filled: Path) -> None:
    """Four prompts of eleven pages wait; a quarter of the pool is 20, and holds parts of two."""
    with tiny.engine(pages=81, disk=open_store(filled), max_running=1) as engine:
        running = busy(engine)
        for seed in range(4):
            engine.begin_prompt(tiny.prompt(seed), max_tokens=1)
        until(lambda: arrived(engine))
        assert 0 < sum(state.ahead or 0 for state in engine._loop.requests.queue) <= PREFETCH * 80
        running.cancel()


def test_a_load_that_fails_while_its_request_waits_costs_it_nothing_but_the_kv(filled: Path) -> None:
    faults = Faults()
    with tiny.engine() as engine:
        expected = engine.answer_prompt(tiny.prompt(1), strategy="full", max_tokens=3)
    faults.failing = 10**9
    with tiny.engine(disk=paced(open_store(filled), faults), max_running=1) as engine:
        running = busy(engine)
        waiting = engine.begin_prompt(tiny.prompt(1), max_tokens=3)
        until(lambda: engine.stats()["transfer_failures_total"].get("load"))
        audit_engine(engine)
        running.cancel()
        assert waiting.result().tokens == expected.tokens


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(4), [0, 1]))
def test_random_arrivals_cancels_and_faults(filled: Path, seed: int) -> None:
    """Answers stay those of full attention, and the books add up, whoever leaves while its KV is loaded."""
    random = np.random.default_rng(seed)
    prompts = [tiny.prompt(i) for i in range(6)]
    with tiny.engine() as engine:
        expected = [engine.answer_prompt(prompt, strategy="full", max_tokens=2).tokens for prompt in prompts]
    faults = Faults()
    order: Any = random.choice(["fcfs", "ratio"])
    limits: Any = {"pages": 60, "host_bytes": 300_000, "max_running": 2, "load_timeout": 0.2, "max_queue": 100}
    with tiny.engine(disk=paced(open_store(filled), faults), order=str(order), **limits) as engine:
        futures: list[tuple[int, Any]] = []
        for _ in range(40):
            number = int(random.integers(6))
            act = random.random()
            if act < 0.6:
                futures.append((number, engine.begin_prompt(prompts[number], max_tokens=2)))
            elif act < 0.75 and futures:
                futures[int(random.integers(len(futures)))][1].cancel()
            elif act < 0.85:
                faults.failing = 0 if faults.failing else 10**9
            else:
                (faults.gate.clear if faults.gate.is_set() else faults.gate.set)()
            time.sleep(float(random.random()) * 0.01)
        faults.failing = 0
        faults.gate.set()
        for number, future in futures:
            if not future.cancelled():
                answer: Answer = future.result(60)
                assert answer.tokens == expected[number] and answer.exact_to == "full"
        until(lambda: not engine._cache.loading)
        audit_engine(engine)
        assert engine.stats()["running"] == 0
