"""Random bursts, cancels, tenants, strategies, compressions, in a pool far too small, while disk and device fail.

Nothing leaks, every request gets exactly one last event, and every answer that claims `exact_to == "full"` has the
tokens that full attention gives, computed cold in an engine of its own.

    SOAK_SECONDS=300 SOAK_SEED=7 python -m pytest -s -m long tests/engine/test_soak.py

The seed chooses policy, order and limits; without one it is the time.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.baseline  # noqa: F401 (registers its names)
from ragjax.core import Answer, Compression, Kind, OverloadError, Prompt, Segment, Step
from ragjax.core.depprompt import DepPrompt, LinearNode, TreeNode
from ragjax.core.tiers import Record
from ragjax.engine import Engine
from ragjax.engine.stats import Stats
from ragjax.runner.runner import Runner
from ragjax.schedule.state import RequestState
from ragjax.store.disk import DiskStore
from tests.support import tiny
from tests.support.audit import audit_engine
from tests.support.disks import open_store
from tests.support.pace import until

PAGES = 40
MOST = 100
"""Tokens of the longest answer."""
STRATEGIES = ("full", "prefix", "naive", "blend", "craft", "fusion", "set-cache")
TENANTS = ("", "", "a", "b")
ORDERS = ("fcfs", "ratio", "lpm")
POLICIES = ("lacr", "lru", "pgdsf")
INJECTED = "injected"


def segment(name: str, kind: Kind, n: int, seed: int) -> Segment:
    return Segment(name, kind, np.random.default_rng(seed).integers(0, 256, n).astype(np.int32), title=name)


SYSTEM = segment("system", Kind.SYSTEM, 20, 1)
CHUNKS = tuple(segment(f"chunk{i}", Kind.CHUNK, 14 + 5 * i, 10 + i) for i in range(6))
QUESTIONS = tuple(segment("question", Kind.QUERY, 9 + 2 * i, 100 + i) for i in range(3))


def chunk_prompt(random: np.random.Generator) -> Prompt:
    """System, up to four of six chunks in any order, one of three questions."""
    chosen = random.permutation(len(CHUNKS))[: random.integers(0, 5)]
    return Prompt((SYSTEM, *(CHUNKS[i] for i in chosen), QUESTIONS[random.integers(len(QUESTIONS))]))


def tree_prompt(random: np.random.Generator) -> Prompt:
    """Paths of two trees, which share their beginnings."""
    paths = tuple(CHUNKS[i].tokens[: 10 + i] for i in random.permutation(4)[: random.integers(1, 4)])
    task = QUESTIONS[random.integers(len(QUESTIONS))].tokens
    return DepPrompt((LinearNode("system", SYSTEM.tokens), TreeNode("a", paths), LinearNode("task", task))).prompt()


# ------------------------------------------------------------------------------------------- faults


class Unreliable:
    """Stands before a disk: some reads fail, some take long, some find an entry gone."""

    def __init__(self, store: DiskStore, random: np.random.Generator):
        self._store, self._random = store, random
        self.failed = 0
        self.working = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read_shares(self, key: bytes, count: int, expected: Record | None = None) -> Iterator[object]:
        draw = self._random.random()
        if self.working and draw < 0.1:
            time.sleep(0.02)
        if self.working and draw < 0.5:
            self.failed += 1
            raise OSError(f"{INJECTED}: the disk is on fire")
        yield from self._store.read_shares(key, count, expected)


class Failing:
    """Steps that fail now and then, the pool intact; and a device that is lost now and then."""

    def __init__(self, runner: Runner, random: np.random.Generator):
        self._step, self._runner, self._random = runner.step, runner, random
        self.failed = self.lost = 0
        self.working = False

    def __call__(self, step: Step) -> Any:
        draw = self._random.random() if self.working else 1.0
        if draw < 0.0005:
            self.lost += 1
            for pool in self._runner._pools:
                pool.k_LPKCD.delete()
                pool.v_LPKCD.delete()
            raise RuntimeError(f"{INJECTED}: the device fell off the bus")
        if draw < 0.01:
            self.failed += 1
            raise RuntimeError(f"{INJECTED}: the step failed")
        return self._step(step)


# ---------------------------------------------------------------------------------------- what comes back


@dataclass
class Books:
    """Last events of every request that entered, and how the requests ended."""

    finals: dict[str, int] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    exact: int = 0

    def watch(self, engine: Engine) -> None:
        """Count what goes to the owners of requests."""
        enqueue = engine._loop.enqueue

        def counted(state: RequestState, place: object = None) -> None:
            sink = state.sink

            def counting(event: Any) -> None:
                if isinstance(event, Answer | BaseException):
                    self.finals[state.id] = self.finals.get(state.id, 0) + 1
                sink(event)

            state.sink = counting
            enqueue(state, place)
            self.finals.setdefault(state.id, 0)

        engine._loop.enqueue = counted


@dataclass
class Asked:
    """A request, and what it asked for."""

    prompt: Prompt
    options: dict[str, Any]
    future: Future[Answer]


class Cold:
    """What full attention answers, cold; each prompt is computed once, in an engine of its own."""

    def __init__(self) -> None:
        self._engine = tiny.engine(tiny.make_runner())
        self._known: dict[tuple[bytes, int | None], Future[Answer]] = {}

    def answer(self, prompt: Prompt, seed: int | None) -> Answer:
        """The longest answer."""
        key = prompt.tokens.tobytes(), seed
        if key not in self._known:
            sampled = {} if seed is None else {"temperature": 1.0, "seed": seed}
            self._known[key] = self._engine.begin_prompt(prompt, strategy="full", max_tokens=MOST, **sampled)
        return self._known[key].result()

    def close(self) -> None:
        self._engine.close()


def check(asked: Asked, cold: Cold, books: Books) -> None:
    """One request that is over: nothing but what may have happened to it happened."""
    try:
        answer = asked.future.result(timeout=60)
    except CancelledError:
        books.outcomes["cancelled"] += 1
        return
    except RuntimeError as error:
        assert INJECTED in str(error), error
        books.outcomes["failed"] += 1
        return
    books.outcomes["answered"] += 1
    assert len(answer.tokens) == asked.options["max_tokens"] or answer.finish_reason == "stop"
    if answer.exact_to != "full":
        return
    books.exact += 1
    expected = cold.answer(asked.prompt, asked.options.get("seed"))
    assert answer.tokens == expected.tokens[: len(answer.tokens)], (asked.options, answer.notices, answer.figures)


# ---------------------------------------------------------------------------------------------- the soak


def soak(seconds: float, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it, longer on a slow machine until all that must happen has, and say what happened."""

    def happened(stats: Stats) -> list[object]:
        return [device.failed, disk.failed, stats["pauses_total"], books.outcomes["cancelled"], books.exact]

    random = np.random.default_rng(seed)
    store = open_store(folder, 2_000_000)
    for name in ("ragjax.engine.execution", "ragjax.engine.loop", "ragjax.schedule.requests"):
        # pytest keeps every record, and with it the frames of its error and all that they hold
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    disk = Unreliable(store, np.random.default_rng(seed + 1))
    runner = tiny.runner()
    device, books, cold = Failing(runner, np.random.default_rng(seed + 2)), Books(), Cold()
    memory: list[int] = []
    with tiny.engine(
        runner,
        pages=PAGES,
        host_bytes=400_000,
        disk=disk,
        load_timeout=0.05,
        max_queue=24,
        policy=POLICIES[seed % 3],
        order=ORDERS[seed // 4 % 3],
        max_running=(0, 0, 5)[seed % 3],
    ) as engine:
        books.watch(engine)
        monkeypatch.setattr(runner, "step", device)
        for name in STRATEGIES:  # programs are compiled before the time runs
            check(ask(engine, chunk_prompt(random), strategy=name, max_tokens=3), cold, books)
        check(ask(engine, tree_prompt(random), strategy="dependency", max_tokens=3), cold, books)
        device.working = disk.working = True
        begun = sampled = time.monotonic()
        end, pending, rounds = begun + seconds, [], 0
        while time.monotonic() < end or (not all(happened(engine.stats())) and time.monotonic() < end + 60):
            if len(pending) < 8 or random.random() < 0.2:
                pending += burst(engine, random, books)
            for asked in pending:
                if random.random() < 0.01:
                    asked.future.cancel()
            time.sleep(float(random.exponential(0.02)))
            over = [asked for asked in pending if asked.future.done()]
            pending = [asked for asked in pending if not asked.future.done()]
            for asked in over:
                check(asked, cold, books)
            rounds += 1
            if rounds % 20 == 0:
                audit_engine(engine)
            if time.monotonic() > sampled:
                memory.append(resident())
                sampled += 10
        for asked in pending:
            check(asked, cold, books)
        stats = engine.stats()
        device.working = disk.working = False
        until(lambda: not engine._loop.requests.live)
        assert len(engine.answer_prompt(chunk_prompt(random), max_tokens=2).tokens) <= 2, "it still serves"
        until(lambda: not engine._loop.requests.live)
        audit_engine(engine)
        engine.clear_cache()
        assert engine.stats()["pages_used"] == 0 and engine.stats()["paused"] == 0
    cold.close()
    assert set(books.finals.values()) <= {0, 1}
    assert sum(books.finals.values()) >= books.outcomes["answered"] + books.outcomes["failed"]
    lost = sum(count == 0 for count in books.finals.values())
    assert lost <= books.outcomes["cancelled"], "all others were told how they ended"
    print(
        f"seed {seed}:",
        f"{dict(books.outcomes)}, {books.exact} exact, steps {stats['steps_total']}, pauses {stats['pauses_total']}, "
        f"failed steps {device.failed}, lost devices {device.lost}, failed reads {disk.failed}, memory {memory}",
    )
    assert all(happened(stats)), (books.outcomes, happened(stats))
    assert books.outcomes["answered"] and books.exact
    if len(memory) >= 60:  # ten minutes
        third = len(memory) // 3
        assert np.median(memory[-third:]) - np.median(memory[third : 2 * third]) < 32 * 2**20, memory


def burst(engine: Engine, random: np.random.Generator, books: Books) -> list[Asked]:
    """Some requests at once."""
    begun = []
    for _ in range(int(random.geometric(0.4)) if random.random() < 0.9 else 12):
        trees = random.random() < 0.15
        prompt = tree_prompt(random) if trees else chunk_prompt(random)
        options: dict[str, Any] = {"max_tokens": int(random.integers(1, MOST + 1))}
        options["strategy"] = "dependency" if trees else STRATEGIES[random.integers(len(STRATEGIES))]
        options["tenant"] = TENANTS[random.integers(len(TENANTS))]
        if random.random() < 0.3:
            options |= {"temperature": 1.0, "seed": int(random.integers(2))}
        if random.random() < 0.2:
            method = ("snapkv", "knorm")[random.integers(2)]
            options["compression"] = Compression(
                method, int(random.choice((12, 40, 72))), window=8
            )  # each is a program
        if random.random() < 0.05:
            options["background"] = True
        try:
            begun.append(ask(engine, prompt, **options))
        except OverloadError as error:
            assert error.retry_after is not None and error.retry_after > 0
            books.outcomes["refused"] += 1
    return begun


def ask(engine: Engine, prompt: Prompt, **options: Any) -> Asked:
    """Begin one request."""
    return Asked(prompt, options, engine.begin_prompt(prompt, **options))


def resident() -> int:
    """Bytes of memory of this process, garbage collected."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five seconds of it."""
    soak(float(os.environ.get("SOAK_SECONDS", "5")), tmp_path, 0, monkeypatch)
    assert threading.active_count() < 100


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_long_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty minutes of it, or SOAK_SECONDS."""
    soak(
        float(os.environ.get("SOAK_SECONDS", "1800")),
        tmp_path,
        int(os.environ.get("SOAK_SEED", time.time())),
        monkeypatch,
    )
