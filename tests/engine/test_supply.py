"""Programs that are made while requests run: steps take what is there, and who needs more waits by itself."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from ragjax.core import Answer, Measure, Sampling
from ragjax.engine import Engine
from ragjax.engine.provision import least, planned
from ragjax.runner import supply
from ragjax.runner.programs import Name, Programs
from ragjax.runner.runner import Runner
from tests.support import frozen, tiny
from tests.support.devices import ROOT
from tests.support.pace import until

PREFIX = tiny.all_strategies()["prefix"]
SAMPLING = Sampling(max_tokens=12)


class Gate:
    """Programs are made by the shared runner, each once it is let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open = threading.Event()
        self.let: set[str] = set()
        self.made: list[Name] = []
        self.reached = threading.Event()  # the thread waits for a program that is not let through
        shared = tiny.runner()._programs
        make = Programs._make

        def gated(programs: Programs, name: Name) -> Any:
            if programs is shared:
                return make(programs, name)
            if threading.current_thread().name == "ragjax-programs" and name[0] not in self.let:
                self.reached.set()
                assert self.open.wait(120)
            self.made.append(name)
            return shared.get(*name)

        monkeypatch.setattr(Programs, "_make", gated)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def runner() -> Runner:
    return Runner(tiny.decoder(), pages=200, page_size=tiny.PAGE, grid=tiny.GRID, scanned=True)


def started(names: list[Name] | None = None) -> Any:
    """An engine with the least programs of prefix, whose thread makes its others."""
    made = runner()
    made.compile(least(made, [PREFIX], None))
    supply = made.supply(planned(made, [PREFIX], {}, None) if names is None else names)
    return tiny.engine(made, supply=supply)


def finish(engine: Any) -> None:
    """Wait until all programs are made."""
    for thread in tuple(engine._parts.supply._threads):
        thread.join(300)


def test_the_least_programs_answer_as_all_do(gate: Gate) -> None:
    prompt = tiny.prompt(1)
    with tiny.engine() as plain:
        expected = plain.answer_prompt(prompt, strategy="prefix", sampling=SAMPLING)
    with started() as engine:
        assert gate.reached.wait(120)
        before = set(engine._runner._programs.compiled)
        found = engine.answer_prompt(prompt, strategy="prefix", sampling=SAMPLING)
        assert found.tokens == expected.tokens and found.notices == expected.notices
        assert set(engine._runner._programs.compiled) == before
        assert engine.programs_left > 0 == found.timings.compile
        gate.open.set()
        finish(engine)
        assert engine.programs_left == 0
        rows = {name[1] for name in engine._runner._programs.compiled if name[0] == "stage"}
        assert rows == {shape.rows for shape in tiny.GRID.rows}
        again = engine.answer_prompt(tiny.prompt(2), strategy="prefix", sampling=SAMPLING)
        assert again.timings.compile == 0 and again.notices == ()


def test_a_request_waits_for_its_programs_while_another_goes_on(gate: Gate) -> None:
    prompt = tiny.prompt(3)
    with tiny.engine() as plain:
        expected = plain.answer_prompt(prompt, strategy="anchor", sampling=SAMPLING)
    with started([]) as engine:
        waits: Future[Answer] = engine.begin_prompt(prompt, strategy="anchor", sampling=SAMPLING)
        assert gate.reached.wait(120)
        other = engine.answer_prompt(prompt, strategy="prefix", sampling=SAMPLING)
        assert other.notices == () and not waits.done()
        assert engine.stats()["queue_depth"] == 1 and engine.stats()["programs_left"] > 0
        gate.open.set()
        found = waits.result(120)
        assert found.tokens == expected.tokens
        (notice,) = set(found.notices) - set(expected.notices)
        assert notice.startswith("programs were compiled for this request, which waited ")
        assert 0 < found.timings.compile < found.timings.ttft
        assert found.timings.prefill + found.timings.compile <= found.timings.ttft
        assert engine.answer_prompt(tiny.prompt(4), strategy="anchor", sampling=SAMPLING).timings.compile == 0


def test_what_a_request_asks_for_is_made_first(gate: Gate) -> None:
    with started([("move", 16), ("move", 128)]) as engine:
        assert gate.reached.wait(120)  # for the first of these
        waits = engine.begin_prompt(tiny.prompt(5), strategy="prefix", max_tokens=2, logit_bias={5: 1})
        until(lambda: engine._loop.requests.unready)
        gate.open.set()
        waits.result(120)
        finish(engine)
    asked = [name for name in gate.made if name[0] == "sample" and name[2]]
    planned = gate.made.index(("move", 128))
    assert len(asked) > 1 and planned > gate.made.index(asked[-2])  # the last one is made beside it


def test_a_request_does_not_wait_for_a_program_that_is_only_planned(gate: Gate) -> None:
    with started([("move", 16)]) as engine:
        assert gate.reached.wait(120)  # for the planned one, which is not let through
        gate.let = {"stage", "begin", "end", "sample", "logprobs", "extract", "insert"}
        asked = engine.begin_prompt(tiny.prompt(8), strategy="anchor", sampling=SAMPLING)
        assert asked.result(120).tokens
        assert engine.programs_left == 1 and ("move", 16) not in gate.made
        gate.open.set()
        finish(engine)
        assert gate.made.count(("move", 16)) == 1 and engine.programs_left == 0


def test_what_is_planned_waits_for_requests_that_run_and_what_is_asked_for_does_not(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supply, "PATIENCE", 100.0)
    running = threading.Event()
    running.set()
    names: list[Name] = [("move", 16), ("move", 128), ("move", 64), ("move", 32)]
    with started(names[:2]) as engine:
        assert gate.reached.wait(120)
        made = engine._parts.supply
        assert made.busy == engine._loop.busy
        monkeypatch.setattr(made, "busy", running.is_set)
        gate.open.set()
        until(lambda: names[0] in gate.made)
        for one in names[2:]:
            assert made.lacks([one])
            until(lambda one=one: one in gate.made)
        until(lambda: made.left == 1)
        assert names[1] not in gate.made
        running.clear()
        finish(engine)
        assert names[1] in gate.made


def test_what_is_planned_does_not_wait_for_ever(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply, "PATIENCE", 0.02)
    with started([("move", 16), ("move", 128)]) as engine:
        assert gate.reached.wait(120)
        monkeypatch.setattr(engine._parts.supply, "busy", lambda: True)
        gate.open.set()
        finish(engine)
        assert engine.programs_left == 0


def test_a_program_is_made_once_whoever_asks_for_it(gate: Gate) -> None:
    with started([("move", 16)]) as engine:
        assert gate.reached.wait(120)
        supply, names = engine._parts.supply, [("move", 16), ("move", 128)]
        assert supply.lacks(names) and supply.lacks(names) and supply.left == 2
        gate.open.set()
        finish(engine)
        moves = [name for name in gate.made if name[0] == "move"]
        assert sorted(moves) == names and not supply.lacks(names)


def test_what_measures_and_ends_early_has_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner()
    strategies = tiny.all_strategies()
    plain = set(least(made, [PREFIX], None))
    (name,) = set(least(made, [strategies["blend"]], None)) - plain
    kind, *_, layers, measure, segments = name
    assert (kind, layers, measure, segments) == ("stage", 2, Measure.DEVIATION, 0)
    both = least(made, [strategies["blend"], strategies["anchor"]], None)
    assert set(both) - plain == {name} | (set(least(made, [strategies["anchor"]], None)) - plain)


def test_a_client_that_leaves_waits_no_more(gate: Gate) -> None:
    with started([]) as engine:
        waits = engine.begin_prompt(tiny.prompt(6), strategy="anchor", sampling=SAMPLING)
        assert gate.reached.wait(120)
        (state,) = engine._loop.requests.unready
        engine._loop.cancel(state)
        engine._loop.call(lambda: None)
        engine._loop.call(lambda: None)
        assert not engine._loop.requests.unready and not waits.done()


def test_a_program_that_cannot_be_made_fails_its_request_alone(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with started([]) as engine:
        make = Programs._make

        def failing(programs: Programs, name: Name) -> Any:
            if len(name) > 4:  # it measures
                raise MemoryError("no room")
            return make(programs, name)

        monkeypatch.setattr(Programs, "_make", failing)
        with pytest.raises(MemoryError):
            engine.answer_prompt(tiny.prompt(7), strategy="anchor", sampling=SAMPLING)
        assert engine.answer_prompt(tiny.prompt(7), strategy="prefix", sampling=SAMPLING).tokens
        assert "could not be compiled" in caplog.text


def test_memory_that_compiling_leaves_is_given_back(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(supply, "give_back", lambda: given.append(len(gate.made)))
    gate.open.set()
    with started() as engine:
        finish(engine)
    assert given == [len(gate.made)]


def test_closing_does_not_wait_for_a_program(gate: Gate) -> None:
    engine = started()
    assert gate.reached.wait(120)
    (thread,) = engine._parts.supply._threads
    engine.close()
    assert thread.is_alive()
    gate.open.set()
    thread.join(120)
    assert not thread.is_alive() and len([name for name in gate.made if name[0] == "stage"]) <= 3


@pytest.mark.parametrize("early", [True, False])
def test_an_engine_is_early_only_if_asked(early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Name] = []
    monkeypatch.setattr(Runner, "compile", lambda runner, names: compiled.extend(names))
    monkeypatch.setattr(Runner, "warm_up", lambda *_: None)
    monkeypatch.setattr(Runner, "seconds", lambda *_: 0.01)
    monkeypatch.setattr(Programs, "try_make", lambda programs, name: programs.faults.update({name: MemoryError()}))
    folder = frozen.model(tmp_path / "tiny")
    with Engine.load(folder, strategy="prefix", device_cache_gb=0.05, early=early, progress=False) as engine:
        grid = engine._runner.grid
        rows = {shape.rows for shape in (grid.least if early else grid.rows)}
        assert {name[1] for name in compiled if name[0] == "stage"} == rows
        assert (engine._parts.supply is not None) is early


def test_a_process_that_ends_while_programs_are_made_ends_well() -> None:
    program = (
        "import threading\n"
        "from ragjax.runner.runner import Runner\n"
        "from tests.support import tiny\n"
        "made = Runner(tiny.decoder(), pages=20, page_size=16, grid=tiny.GRID)\n"
        "supply = made.supply(made.programs())\n"
        "threading.Event().wait(0.5)\n"
        "assert supply.left\n"
        "print('ends')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr[-2000:]
