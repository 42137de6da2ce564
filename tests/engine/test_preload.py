"""Passes that begin before all KV has arrived: same answers, nothing read too early, and failures in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ragjax.runner.weights
from ragjax.core import Answer, Step
from ragjax.core.tiers import Load
from ragjax.engine import Engine
from ragjax.runner.runner import Runner, StepResult
from ragjax.schedule import scheduler
from ragjax.schedule.scheduler import reach
from ragjax.store.transfer import KVTransfer
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.disks import open_store, paced
from tests.support.pace import failing, until

STAGES = tiny.CONFIG.num_layers
"""Of the runner below: a layer each."""

STRATEGIES = ("prefix", "naive", "blend", "fusion", "craft-focus")


@pytest.fixture(scope="module")
def runner() -> Runner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragjax.runner.weights, "STAGE_LAYERS", 1)
        return tiny.make_runner(scanned=False)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    """Pages of a load hold what is not a number until its bytes come."""
    true_load = KVTransfer.load

    def load(self: KVTransfer, jobs: list[Load]) -> None:
        for job in jobs:
            shape = (STAGES, len(job.run.pages), tiny.CONFIG.num_kv_heads, tiny.PAGE, tiny.CONFIG.head_dim)
            nothing = np.full(shape, np.nan, np.float32)
            runner.insert(np.asarray(job.run.pages, np.int32), runner.upload(nothing, nothing))
        true_load(self, jobs)

    monkeypatch.setattr(KVTransfer, "load", load)


def ask(engine: Engine, strategy: str = "prefix") -> Answer:
    return engine.answer_prompt(tiny.prompt(0), strategy=strategy, max_tokens=4, want_logits=True)


def opened(
    runner: Runner, folder: Path, before: Callable[[int], object] = lambda number: None, **options: Any
) -> Engine:
    return tiny.engine(runner, disk=paced(open_store(folder), before), **options)


def lead(monkeypatch: pytest.MonkeyPatch, choose: Callable[[], int]) -> None:
    def chosen(first: int, last: int, arrived: int, lead: int, stages: int) -> int:
        return reach(first, last, arrived, choose(), stages)

    monkeypatch.setattr(scheduler, "reach", chosen)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> list[tuple[tuple[int, int] | None, bool]]:
    """Layers of each step, and whether its residuals came from the device."""
    seen: list[tuple[tuple[int, int] | None, bool]] = []
    true_step = runner.step

    def step(step: Step) -> StepResult:
        on_device = step.residual_TE is not None and not isinstance(step.residual_TE, np.ndarray)
        seen.append((step.layers, on_device))
        return true_step(step)

    monkeypatch.setattr(runner, "step", step)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_answers_are_those_of_whole_loads(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """The loads are as slow, and the passes as hasty, as chance has it."""
    with opened(runner, tmp_path) as engine:
        ask(engine, strategy)
    lead(monkeypatch, lambda: STAGES)
    with opened(runner, tmp_path) as engine:
        expected = ask(engine, strategy)
        assert any(report.tier == "disk" for report in expected.segments)
    random = np.random.default_rng(0)
    lead(monkeypatch, lambda: int(random.integers(1, STAGES + 1)))
    for _ in range(3):
        with opened(runner, tmp_path, lambda number: time.sleep(random.choice([0, 0.002, 0.01]))) as engine:
            answer = ask(engine, strategy)
            audit_engine(engine)
        assert answer.tokens == expected.tokens and answer.notices == expected.notices
        assert [report.reused for report in answer.segments] == [report.reused for report in expected.segments]
        assert np.abs(answer.logits - expected.logits).max() < 1e-5


class Gates:
    """Lets stages through one at a time, of all entries on disk."""

    def __init__(self, folder: Path) -> None:
        self.through = threading.Semaphore(0)
        self.failing = False
        self.entries = len(list(folder.rglob("*.safetensors")))

    def let(self, stages: int = 1) -> None:
        self.through.release(stages * self.entries)

    def __call__(self, number: int) -> None:
        assert self.through.acquire(timeout=30)
        if self.failing:
            raise OSError("the disk is on fire")


@pytest.fixture
def kept(runner: Runner, tmp_path: Path) -> Answer:
    """Prompt 0 is on disk."""
    with opened(runner, tmp_path) as engine:
        return ask(engine)


@pytest.fixture
def gated(
    runner: Runner, tmp_path: Path, kept: Answer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Gates]]:
    """An engine over that disk, stage by stage; a pass begins with its first stage."""
    lead(monkeypatch, lambda: 1)
    gates = Gates(tmp_path)
    with opened(runner, tmp_path, gates) as engine:
        yield engine, gates
        gates.let(100)
        until(lambda: not engine._cache.loading)
        audit_engine(engine)


def begin(engine: Engine) -> Future[Answer]:
    return engine.begin_prompt(tiny.prompt(0), strategy="prefix", max_tokens=4)


def test_each_stage_runs_when_it_has_arrived(gated: tuple[Engine, Gates], kept: Answer, ran: list[Any]) -> None:
    engine, gates = gated
    asked = begin(engine)
    for stage in range(STAGES):
        assert [layers for layers, _ in ran] == [(i, i + 1) for i in range(stage)]
        gates.let()
        until(lambda: len(ran) > stage)  # noqa: B023
    assert asked.result(60).tokens == kept.tokens and asked.result().timings.load > 0
    assert [on_device for _, on_device in ran[:STAGES]] == [False] + [True] * (STAGES - 1)
    ran.clear()
    begin(engine).result(60)
    assert ran[0] == ((0, STAGES), False), "nothing is cut when all is there"


def test_a_pace_that_is_not_known_waits_for_all(runner: Runner, tmp_path: Path, kept: Answer, ran: list[Any]) -> None:
    with opened(runner, tmp_path, lambda number: time.sleep(0.005)) as engine:
        ask(engine)
    assert ran[0] == ((0, STAGES), False)


@pytest.mark.parametrize("after", [1, 2])
def test_a_later_stage_that_fails_begins_the_request_anew(
    gated: tuple[Engine, Gates], kept: Answer, ran: list[Any], after: int
) -> None:
    engine, gates = gated
    asked = begin(engine)
    for stage in range(after):  # one by one, or a single step would run them all
        gates.let()
        until(lambda: len(ran) > stage)  # noqa: B023
    gates.failing = True
    gates.let(100)
    answer = asked.result(60)
    assert engine.stats()["load_fallbacks_total"] == {"failed": 1}
    assert answer.tokens == kept.tokens and "on fire" in answer.notices[0] and answer.cached_tokens == 0


def test_damage_found_at_the_end_leaves_nothing_in_any_page(
    runner: Runner, tmp_path: Path, kept: Answer, monkeypatch: pytest.MonkeyPatch, ran: list[Any]
) -> None:
    """The first stage holds what is not a number; the pass has begun on it when the checksum is seen to be wrong."""
    for path in tmp_path.rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        data[begin : begin + 4000] = np.full(1000, np.nan, np.float32).tobytes()
        path.write_bytes(data)
    lead(monkeypatch, lambda: 1)
    with opened(runner, tmp_path, lambda number: number and until(lambda: ran)) as engine:
        answer = ask(engine)
        assert ran[0][0] == (0, 1)  # it had begun
        assert answer.tokens == kept.tokens and "checksum" in answer.notices[0]
        audit_engine(engine)
        slots = np.arange(200 * tiny.PAGE, dtype=np.int32)
        assert all(np.isfinite(x).all() for x in runner.read(slots))


def test_a_client_leaves_between_two_stages(gated: tuple[Engine, Gates], kept: Answer, ran: list[Any]) -> None:
    engine, gates = gated
    begin(engine)
    gates.let()
    until(lambda: ran)
    [state] = engine._loop.requests.live
    engine._loop.cancel(state)
    until(lambda: state.ended)
    gates.let(100)
    until(lambda: not engine._cache.loading)
    ran.clear()
    assert begin(engine).result(60).tokens == kept.tokens and ran[0] == ((0, STAGES), False)


def test_the_device_is_lost_between_two_stages(
    gated: tuple[Engine, Gates], kept: Answer, monkeypatch: pytest.MonkeyPatch, runner: Runner, ran: list[Any]
) -> None:
    engine, gates = gated
    asked = begin(engine)
    gates.let()
    until(lambda: ran)
    failing(monkeypatch, runner, "step", 1, lose=True)
    gates.let(100)
    assert asked.result(60).tokens == kept.tokens and engine.stats()["device_losses_total"] == 1
