"""Replicas as a server: `python -m ragjax.serve --replicas N`, what its metrics say of each, and the kill of one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.common.envs import RivalError
from benchmarks.common.questions import spread
from benchmarks.load.client import Load, closed_loop
from benchmarks.load.server import Body, OwnServer
from benchmarks.load.workload import Ask, Wish, Workload, passages
from benchmarks.policies.source import PATTERNS
from benchmarks.quality import dataset
from ragjax.commands.flags import DEMO
from ragjax.core import Document, EngineOptions
from ragjax.retrieval.document import load

SETTLE = 30.0  # seconds in which the metrics tell of the last answer; the front asks its replicas once a second
LOOK = 1.0  # seconds between two looks at them: reading them takes a core some time, which the replicas would have
PROCESS = "ServeReplica:ragjax:Replica"  # Ray's name of a replica's process
EXACT = "prefix"  # the strategy of `FleetServer.exact`
T = TypeVar("T")

Figures = Mapping[str, float]  # A figure of each replica, by its rank


def figures(exposition: str, name: str) -> dict[str, float]:
    """A metric by replica, its other labels added up. exposition: what /metrics answers."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == name and "replica" in sample.labels:
                rank = sample.labels["replica"]
                found[rank] = found.get(rank, 0.0) + sample.value
    return found


class FleetServer(OwnServer):
    """So many replicas behind a router."""

    start_seconds = 1200.0  # the first start of all compiles, for minutes
    stop_seconds = 90.0

    def __init__(
        self, replicas: int, router: str, options: EngineOptions, workload: Workload, ray_address: str | None = None
    ):
        super().__init__(f"replicas-{replicas}-{router}", options, workload)
        self._flags = ("--replicas", f"{replicas}:{router}")
        self._cluster = {} if ray_address is None else {"RAY_ADDRESS": ray_address}
        self._strategy: str | None = None

    def command(self, port: int) -> tuple[Sequence[str | Path], Mapping[str, str]]:
        words, settings = super().command(port)
        return [*words, *self._flags], {**settings, **self._cluster}

    def body(self, ask: Ask) -> Body:
        made: dict[str, Any] = {**super().body(ask)}
        if self._strategy is not None:
            made["rag"] = {**made["rag"], "strategy": self._strategy}
        return made

    async def exact(self, asks: Sequence[Ask], clients: int) -> Load:
        self._strategy = EXACT
        try:
            return await closed_loop(self, asks, clients)
        finally:
            self._strategy = None

    def figures(self, *names: str) -> list[dict[str, float]]:
        text = httpx.get(f"{self._url}/metrics", timeout=30).text
        return [figures(text, f"ragjax_{name}") for name in names]

    async def settled(self, names: Sequence[str], served: Callable[[Figures], bool]) -> list[dict[str, float]]:
        """These metrics, once the first of them is as it must be.

        Raises:
            RivalError: it does not become so.
        """
        return await _until(lambda: self.figures(*names), lambda found: served(found[0]), SETTLE, f"of {names[0]}")

    async def replace_one(self, progress: str) -> str:
        """Kill a replica; the rank of the one that takes its place, once it can serve.

        progress: a counter above 0 in every replica, which is 0 in a new one.

        Raises:
            RivalError: none takes its place.
        """
        before = self.figures(progress)[0]
        _replicas(self.pid)[0].kill()

        def fresh(found: Figures) -> list[str]:
            return [rank for rank in before if found.get(rank, before[rank]) < before[rank]]

        now = await _until(
            lambda: self.figures(progress)[0], lambda found: found.keys() == before.keys() and len(fresh(found)) == 1,
            self.start_seconds, "of a new replica",
        )  # fmt: skip
        return fresh(now)[0]

    async def close(self) -> None:
        every = _children(self.pid) if self._process is not None else []
        await super().close()
        for process in every:
            if process.is_running():
                process.kill()


async def _until(look: Callable[[], T], good: Callable[[T], bool], seconds: float, what: str) -> T:
    end = time.monotonic() + seconds
    while not good(found := await asyncio.to_thread(look)):
        if time.monotonic() > end:
            raise RivalError(f"the metrics do not tell {what} within {seconds:.0f} s; the last were {found}")
        await asyncio.sleep(LOOK)
    return found


def _children(pid: int) -> list[psutil.Process]:
    if not psutil.pid_exists(pid):
        return []
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return found


def _replicas(pid: int) -> list[psutil.Process]:
    return [one for one in _children(pid) if one.is_running() and PROCESS in one.name() + "".join(one.cmdline()[:1])]


PASSAGE_WORDS = 110  # words of a passage, at most: one chunk
TOGETHER = 4  # passages of a request: with its question 500 to 700 tokens
OUTPUT = 4  # tokens of an answer: enough to see the first one come
POOL = 100  # passages of --data
WORKLOADS = {"zipf": 1, "temporal": 1, "zipf-topics": 8}
"""Patterns of `benchmarks.policies`, and passages of a topic: with more than one the pattern draws a topic, and the
request gets some of its passages. Each draws its own popular ones, so one workload does not warm up the other."""


def pieces(document: Document, words: int = PASSAGE_WORDS) -> list[Document]:
    text = document.text.split()
    count = math.ceil(len(text) / words)
    cuts = [round(i * len(text) / count) for i in range(count + 1)]
    bounds = pairwise(cuts)
    return [Document(f"{document.id}-{n}", " ".join(text[a:b]), document.title) for n, (a, b) in enumerate(bounds)]


def source(data: Path | None) -> tuple[list[Document], list[str]]:
    """Passages and questions: of the demo, or of a data folder's nq_open.

    Raises:
        ConfigError: the folder lacks it.
    """
    if data is None:
        found = load(DEMO / "documents").documents
        return [piece for document in found for piece in pieces(document)], spread(1_000)
    asked = dataset.load(data, "nq_open").questions
    return passages(Wish(data, 0, pool=POOL)), [question.text for question in asked]


def requests(workload: str, found: Sequence[Document], asked: Sequence[str], count: int) -> list[Ask]:
    seed, topic = list(WORKLOADS).index(workload), WORKLOADS[workload]
    random = np.random.default_rng(seed)
    draws = 1 if topic > 1 else TOGETHER
    drawn = PATTERNS[workload.removesuffix("-topics")].draw(len(found) // topic, draws, count, seed)
    near = [[number * topic + i for number in one for i in range(topic)] for one in drawn]
    return [
        Ask(
            f"{workload}-{n}", asked[n % len(asked)], (), OUTPUT,
            documents=tuple(found[i].id for i in random.permutation(one)[:TOGETHER]),
        )
        for n, one in enumerate(near)
    ]  # fmt: skip


def exact(asks: Sequence[Ask], output: int) -> list[Ask]:
    """The same over half of their passages each, twice: the second time the KV of the first is there."""
    short = [replace(ask, output=output, documents=(ask.documents or ())[: TOGETHER // 2]) for ask in asks]
    return [replace(ask, id=f"{ask.id}/{n}") for n in range(2) for ask in short]
