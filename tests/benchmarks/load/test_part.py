"""What the two parts make of deliveries whose times are known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from benchmarks.load import part
from benchmarks.load.client import Delivery, Load, Record
from benchmarks.load.workload import Ask


class Fake:
    """Answers at once."""

    def __init__(self) -> None:
        self.name, self.versions = "fake", dict[str, str]()
        self.served: Mapping[str, Any] = {}
        self.asked: list[Ask] = []

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def answer(self, ask: Ask) -> AsyncIterator[Delivery]:
        self.asked.append(ask)
        for _ in range(ask.output):
            yield Delivery()
        yield Delivery(True, ask.output)


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
