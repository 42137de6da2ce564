"""ragjax in process: documents by id, answers to their last token, what was found; and the tokens that rivals get."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.load import system
from benchmarks.load.client import closed_loop
from benchmarks.load.system import Own, base_settings, options_of
from benchmarks.load.workload import Ask, Workload
from ragjax.core import Document
from ragjax.engine import Engine
from tests.support import tiny

DOCUMENTS = tuple(Document(f"d{n}", f"Passage {n} says {n} times {n}.", f"T{n}") for n in range(4))


def asks(output: int) -> tuple[Ask, ...]:
    names = [("d0", "d1"), ("d2", "d0"), ("d1", "d3")]
    return tuple(Ask(f"{n}", "What?", output, documents=ids) for n, ids in enumerate(names))


def test_every_answer_has_all_its_tokens_and_a_second_round_finds_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "load", lambda options, progress: tiny.engine())
    monkeypatch.setattr(system, "preprocess", None)
    workload = Workload("w", asks(6), DOCUMENTS)
    options = options_of("prefix-lru", {}, base_settings(dtype="float32", gigabytes=0.5, context=256))

    async def talk() -> None:
        own = Own("prefix-lru", options, workload)
        await own.open()
        first = await closed_loop(own, workload.asks, 1)
        again = await closed_loop(own, workload.asks, 2)
        assert own.served == {"strategy": "prefix", "policy": "lru", "order": "fcfs", "speculate": 0}
        await own.close()
        assert [r.error for r in (*first.records, *again.records)] == [None] * 6
        assert {r.output_tokens for r in again.records} == {6}
        assert first.records[0].found_tokens == 0
        assert all((r.found_tokens or 0) > 0.8 * (r.prompt_tokens or 0) for r in again.records)

    asyncio.run(talk())
