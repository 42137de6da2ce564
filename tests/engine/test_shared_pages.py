"""Decoding requests over the same pages read them together, and say what each says alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from ragjax.core import Grid
from ragjax.engine import Engine
from ragjax.schedule.batch import Batch
from tests.support import tiny
from tests.support.matrix import few
from tests.support.pace import Hold

GRID = Grid(
    rows=((2, 2), (4, 1, 0, True), (8, 1, 0, True), (12, 8, 4, True), (16, 8), (64, 16)), entries=(96,), wide=320
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tiny.engine(tiny.make_runner(grid=GRID), lookup=0) as engine:
        yield engine


DRAWN: dict[str, float] = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
ANSWERS = list(product(("prefix", "naive", "fusion"), ({}, DRAWN)))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "sampling"), few(ANSWERS, [ANSWERS[0], ANSWERS[3], ANSWERS[4]]))
def test_answers_are_those_of_requests_alone(
    engine: Engine, strategy: str, sampling: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[int] = []
    step = engine._loop._scheduler._pack

    def pack(*args: object) -> Batch:
        batch = step(*args)
        shared.append(int((batch.step.sharer_O >= 0).sum()))
        return batch

    monkeypatch.setattr(engine._loop._scheduler, "_pack", pack)
    prompts = [tiny.prompt(7, 40, (30, 20), 5 + i % 3) for i in range(6)]
    alone = [engine.answer_prompt(prompt, strategy=strategy, max_tokens=24, **sampling).tokens for prompt in prompts]
    assert not any(shared)
    with Hold(engine):
        futures = [engine.begin_prompt(prompt, strategy=strategy, max_tokens=24, **sampling) for prompt in prompts]
    assert [future.result().tokens for future in futures] == alone
    assert max(shared) >= 3
