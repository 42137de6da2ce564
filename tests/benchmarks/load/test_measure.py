"""A system under load, with a fake one: rows, errors, fairness, runs that were stopped, and the two parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import pytest

from benchmarks.common.envs import RivalError
from benchmarks.common.samples import Samples
from benchmarks.load import part
from benchmarks.load.client import Delivery, Load, Record, closed_loop, open_loop
from benchmarks.load.measure import (
    BOUND,
    COLUMNS,
    LOWEST,
    Bench,
    Plan,
    Results,
    details,
    geometric,
    percentile,
    row_of,
    throughput,
)
from benchmarks.load.workload import Ask, Workload, poisson
from ragjax.core import ConfigError


class Fake:
    """Answers one request after the other, `seconds` to the first token and as long to each of the next."""

    def __init__(self, seconds: float = 0.0, refuse: frozenset[str] = frozenset()):
        self.name, self.versions = "fake", {"fake": "1"}
        self.served: Mapping[str, Any] = {"strategy": "prefix", "policy": "lru"}
        self.seconds, self.refuse = seconds, refuse
        self.opened, self.answered, self.at_once, self.most = 0, 0, 0, 0
        self.asked: list[Ask] = []

    async def open(self) -> None:
        self.opened += 1

    async def close(self) -> None:
        self.opened -= 1

    async def answer(self, ask: Ask) -> AsyncIterator[Delivery]:
        self.asked.append(ask)
        if ask.id in self.refuse:
            raise RivalError("refused")
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        for _ in range(ask.output):
            await asyncio.sleep(self.seconds)
            yield Delivery()
        self.answered += 1
        self.at_once -= 1
        yield Delivery(True, ask.output, 10, 4)


def asks(count: int, output: int = 2) -> list[Ask]:
    return [Ask(f"{n}", "?", output) for n in range(count)]


def workload(count: int = 200) -> Workload:
    return Workload("fake", tuple(asks(count)))


def test_a_closed_loop_keeps_so_many_requests_running() -> None:
    fake = Fake(0.001)
    load = asyncio.run(closed_loop(fake, asks(12), 3))
    assert fake.most == 3 and len(load.answered) == 12 and load.concurrency == 3


def test_an_open_loop_sends_when_requests_arrive_whoever_waits() -> None:
    fake = Fake(0.05)
    load = asyncio.run(open_loop(fake, asks(4), [0.0, 0.01, 0.02, 0.03], rate=100.0))
    assert fake.most == 4
    assert [record.due for record in load.records] == [0.0, 0.01, 0.02, 0.03]
    assert all(record.sent >= record.due and record.ttft_ms >= 50 for record in load.records)


def test_latency_counts_from_the_arrival_and_not_from_the_sending() -> None:
    assert Record("a", due=1.0, sent=3.0, times=[4.0, 4.5]).ttft_ms == 3000
    assert Record("a", due=1.0, times=[4.0, 4.5]).gaps_ms == [500]


def test_a_row_has_exactly_the_fields_that_it_must() -> None:
    records = [Record(f"{n}", n, n, [n + 0.1, n + 0.3], n + 0.3, 2, 10, 4) for n in range(3)]
    records.append(Record("3", 3.0, error="refused", done=3.0))
    row = row_of("fake", "w", {"strategy": "full"}, Load(records, rate=1.0))
    assert tuple(row) == COLUMNS
    assert (row["requests"], row["errors"], row["found_share"]) == (4, 1, pytest.approx(0.4))
    assert row["ttft_mean_ms"] == pytest.approx(100) and row["itl_p50_ms"] == pytest.approx(200)
    assert row["requests_per_s"] == pytest.approx(3 / 3.0) and row["tokens_per_s"] == pytest.approx(2.0)
    assert row["rate"] == 1.0 and row["concurrency"] is None and row["policy"] is None


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5 and percentile([], 99) is None
    assert percentile(list(range(101)), 99) == 99


def test_fairness_is_one_where_all_are_served_alike_and_falls_where_one_waits() -> None:
    alike = [Record(f"{n}", 0.0, 0.0, [1.0], 1.0, 1) for n in range(4)]
    assert details(Load(alike))["jain"] == pytest.approx(1)
    unlike = [*alike[:3], Record("3", 0.0, 0.0, [100.0], 100.0, 1)]
    found = details(Load(unlike))
    assert found["jain"] < 0.3 and found["longest_wait_ms"] == 100_000


def test_warm_requests_are_not_counted_and_points_have_requests_of_their_own() -> None:
    fake, results = Fake(), Results()
    plan = Plan(requests=5, warm=3, clients=(1, 2))
    bench = Bench(fake, workload(), plan, Samples("load", {}))
    asyncio.run(bench.measure(results))
    assert fake.answered == 13 and fake.opened == 0
    assert [row["requests"] for row in results.rows] == [5, 5]
    assert [row["concurrency"] for row in results.rows] == [1, 2]


def test_a_stopped_run_goes_on_with_the_points_that_it_has() -> None:
    plan = Plan(requests=4, warm=2, clients=(1,), rates=(500.0,))
    results = Results()
    asyncio.run(Bench(Fake(), workload(), plan, Samples("load", {"a": 1})).measure(results))
    again, fake = Results(), Fake()
    asyncio.run(Bench(fake, workload(), plan, Samples("load", {"a": 1})).measure(again))
    assert fake.answered == 0 and fake.opened == 0 and again.rows == results.rows
    more = Plan(requests=4, warm=2, clients=(1,), rates=(500.0, 600.0))
    asyncio.run(Bench(fake, workload(), more, Samples("load", {"a": 1})).measure(Results()))
    assert fake.answered == 2 + 4


def test_no_point_asks_what_another_one_asked() -> None:
    """Its KV would be known, and the system looks faster than it is."""
    fake, plan = Fake(0.001), Plan(requests=3, warm=1, clients=(1, 2), search=True)
    asyncio.run(Bench(fake, workload(plan.count), plan, Samples("load", {})).measure(Results()))
    assert len(fake.asked) == len({ask.id for ask in fake.asked}) == fake.answered


def test_a_workload_with_too_few_requests_is_refused_before_anything_is_measured() -> None:
    plan = Plan(requests=4, warm=2, clients=(1, 2))
    with pytest.raises(ConfigError, match="fake has 9 requests, and 10 are asked"):
        Bench(Fake(), workload(9), plan, Samples("load", {}))


def test_rates_up_to_the_capacity_and_the_throughput() -> None:
    results = Results()
    plan = Plan(requests=6, warm=0, geometric=2, search=True)
    asyncio.run(Bench(Fake(0.002), workload(), plan, Samples("load", {})).measure(results))
    (found,) = results.throughput
    capacity = results.rows[0]["requests_per_s"]
    assert results.rows[0]["concurrency"] == 8
    assert [row["rate"] for row in results.rows[1:3]] == [pytest.approx(0.2 * capacity), pytest.approx(capacity)]
    assert found["throughput_per_s"] >= 0.2 * capacity


def test_failed_requests_are_counted_and_a_system_that_answers_nothing_is_an_error() -> None:
    results, plan = Results(), Plan(requests=4, warm=0, clients=(2,))
    asyncio.run(Bench(Fake(refuse=frozenset("1")), workload(), plan, Samples("load", {})).measure(results))
    assert results.rows[0]["errors"] == 1
    nobody = Bench(Fake(refuse=frozenset("0123")), workload(), plan, Samples("load", {"b": 1}))
    with pytest.raises(RivalError, match="answered nothing: RivalError: refused"):
        asyncio.run(nobody.measure(Results()))


SERVICE = 0.1  # seconds, so that the capacity is 10 requests a second


def waited(rate: float) -> float:
    """Mean milliseconds to the answer of an M/D/1 queue (Pollaczek and Khinchine)."""
    load = rate * SERVICE
    return 1e3 * (SERVICE + load * SERVICE / (2 * (1 - load))) if load < 1 else float("inf")


def simulated(rate: float) -> float:
    """The same, simulated."""
    free, waits = 0.0, []
    for arrival in poisson(rate, 60_000, seed=5):
        free = max(free, arrival) + SERVICE
        waits.append(free - arrival)
    return 1e3 * float(np.mean(waits))


async def found(mean: object) -> tuple[float, list[float]]:
    asked: list[float] = []

    async def measure(rate: float) -> float:
        asked.append(rate)
        return mean(rate)  # type: ignore[operator]

    result = await throughput(measure, LOWEST / SERVICE, halvings=8)
    return result.rate, asked


def true_throughput() -> float:
    """Where the mean is five times that at a fifth of the capacity: wait/service = rho / (2 - 2 rho)."""
    most = BOUND * (1 + LOWEST / (2 - 2 * LOWEST)) - 1
    return 2 * most / (1 + 2 * most) / SERVICE


def test_the_search_finds_the_rate_at_which_the_bound_is_met() -> None:
    rate, asked = asyncio.run(found(waited))
    assert rate == pytest.approx(true_throughput(), rel=0.01) and rate <= true_throughput()
    assert len(asked) == len(set(asked))


def test_a_simulated_queue_has_the_same_throughput() -> None:
    rate, _ = asyncio.run(found(simulated))
    assert rate == pytest.approx(true_throughput(), rel=0.05)


def test_a_server_that_never_slows_down_is_raised_to_the_end() -> None:
    rate, asked = asyncio.run(found(lambda rate: 5.0))
    assert rate == max(asked)


def test_rates_are_in_equal_ratios_up_to_the_capacity() -> None:
    rates = geometric(10.0, 3)
    assert rates[0] == pytest.approx(2) and rates[-1] == pytest.approx(10)
    assert rates[1] / rates[0] == pytest.approx(rates[2] / rates[1])


# ------------------------------------------------------------------------------------------------ parts


def test_a_batch_is_one_request_and_then_all_of_them_over_known_prompts() -> None:
    fake = Fake()
    loads = asyncio.run(part.batch(fake, 64))
    assert [(what, len(load.records)) for what, load in loads] == [
        ("batch:alone", 1), ("batch:own", part.TOGETHER), ("batch:one", part.TOGETHER),
    ]  # fmt: skip
    measured = fake.asked[-2 * part.TOGETHER :]
    assert {ask.question for ask in measured} == {ask.question for ask in fake.asked}
    own, one = ([ask.question for ask in half] for half in (measured[: part.TOGETHER], measured[part.TOGETHER :]))
    assert len({*own, *one}) == 2 * part.TOGETHER
    assert all(question.startswith(own[0]) for question in one)


def test_the_prompt_that_stalls_is_new_to_the_cache() -> None:
    fake = Fake()
    asyncio.run(part.stall(fake))
    long = [ask.question for ask in fake.asked if len(ask.question) > 10_000]
    assert len(long) == len(set(long)) == 2


def test_the_rate_counts_the_time_alone_in_which_all_decode() -> None:
    early = Record("a", 0, times=[1.0, 2.0, 3.0, 4.0], output_tokens=4)
    late = Record("b", 0, times=[2.0, 3.0, 4.0, 5.0], output_tokens=4)
    assert part.decode_rate(Load([early, late])) == pytest.approx(4 / 2.0)


def test_a_token_without_text_counts() -> None:
    record = Record("a", 0, times=[1.0, 2.0, 3.0, 4.0], output_tokens=8)
    assert part.decode_rate(Load([record])) == pytest.approx(6 / 3.0)


def test_a_batchs_ratio_is_of_rates() -> None:
    alone = Load([Record("a", 0, times=[1.0, 2.0, 3.0], output_tokens=3)])
    together = Load([Record(name, 0, times=[1.0, 1.5, 2.0], output_tokens=3) for name in "abcd"])
    two = Load([Record(name, 0, times=[1.0, 1.5, 2.0], output_tokens=3) for name in "ab"])
    found = part.verdict("batch", [("batch:alone", alone), ("batch:own", two), ("batch:one", together)])
    rates = (found["tokens_per_s_alone"], found["tokens_per_s_own"], found["tokens_per_s_one"])
    assert rates == (1.0, 4.0, 8.0) and (found["ratio_own"], found["ratio_one"]) == (4.0, 8.0)


def test_a_stall_counts_the_gaps_alone_that_overlap_with_the_prefill() -> None:
    times = [1.0, 2.0, 5.0, 6.0, 9.0]
    assert part._within(Record("a", 0, times=times), began=2.5, ended=5.5).times == [2.0, 5.0, 6.0]
    assert part._within(Record("a", 0, times=times), began=20.0, ended=21.0).gaps_ms == []


def test_a_stalls_ratio_is_of_the_longest_gaps() -> None:
    idle = Load([Record("a", 0, times=[0.0, 0.1, 0.2])])
    busy = Load([Record("a", 0, times=[0.0, 0.1, 0.4, 0.5])])
    found = part.verdict("stall", [("stall:idle", idle), ("stall:prefill", busy)])
    assert found["itl_p99_idle_ms"] == pytest.approx(100) and found["itl_p99_prefill_ms"] == pytest.approx(296)
