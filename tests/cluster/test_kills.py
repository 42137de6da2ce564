"""Replicas and Redis die under load again and again: `RAGJAX_KILLS` times, ten unless it says otherwise."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ragjax.cluster.fleet import PERIOD
from tests.support.remotes import free_port, real_server
from tests.support.replicas import AUDITED, START, Running, started
from tests.support.serving import wait_for

KILLS = int(os.environ.get("RAGJAX_KILLS", "10"))
CLIENTS = 4
EVERY = 5
"""Of so many kills one is of Redis, the others are of replicas."""

pytestmark = pytest.mark.long


class Clients:
    """Threads that ask without pause, until they are stopped; what they saw, and whether any of it was wrong."""

    def __init__(self, running: Running, store: str, whole: dict[int, str]):
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._running = running
        self._store = store
        self._whole = whole
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(random.Random(i),)) for i in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(START)
            assert not thread.is_alive(), "a request did not end"

    def _ask(self, draw: random.Random) -> None:
        while not self._stop.is_set():
            who = draw.choice(sorted(self._whole))
            try:
                status, text, code = self._running.stream(who, **about(self._store))
            except httpx.HTTPError as error:
                self.seen[f"connection: {type(error).__name__}"] += 1
                continue
            self.seen[code or "whole" if status == 200 else f"{status} {code}"] += 1
            if status == 200 and text != self._whole[who] and not (code and self._whole[who].startswith(text)):
                self.wrong.append(f"{who}: {text!r}, not {self._whole[who]!r}")


def about(store: str) -> dict[str, object]:
    """Fields of a request over the documents of a store."""
    return {"rag": {"knowledge": store, "top_k": 2, "strategy": "prefix"}}


def test_kills_under_load_cost_no_answer_no_document_and_no_page(python: str, model: Path, tmp_path: Path) -> None:
    draw, port = random.Random(0), free_port()
    flags = ["--replicas", "2", "--model", str(model), "--knowledge", "none", "--port", "PORT", "--dtype", "float32"]
    flags += ["--disk-cache", str(tmp_path / "kv"), "--device-cache-gb", "0.05", "--host-cache-gb", "0.01"]
    flags += ["--index-dir", str(tmp_path / "index"), "--remote-cache", f"redis://127.0.0.1:{port}/0"]
    audits = tmp_path / "audits"
    program = ["-c", AUDITED, str(audits), *flags]
    with ExitStack() as redis, started(python, program, tmp_path / "log", "ready at") as running:
        redis.enter_context(real_server(port=port))
        store = running.store({f"{i}.txt": f"Number {i} is the keeper of lighthouse {i}." for i in range(10)})
        whole = {who: running.stream(who, **about(store))[1] for who in range(10)}
        assert all(whole.values())

        with Clients(running, store, whole) as clients:
            for kill in range(KILLS):
                time.sleep(draw.random() * 2)
                if kill % EVERY == EVERY - 1:
                    redis.close()
                    redis.enter_context(real_server(port=port))
                    continue
                while not (alive := running.replicas()):
                    time.sleep(0.1)
                draw.choice(alive).kill()
                time.sleep(2 * PERIOD)  # the next look has missed it
                if draw.random() < 0.8:  # else the next one dies while this one starts
                    wait_for(lambda: len(running.replicas()) == 2, START)
                    wait_for(lambda: running.up() == 2, START)
            wait_for(lambda: running.up() == 2, START)
        print(f"{KILLS} kills, seen by clients: {dict(clients.seen)}")

        assert not clients.wrong
        assert clients.seen.keys() <= {"whole", "replica_lost"}
        assert clients.seen["whole"] and clients.seen["replica_lost"] <= KILLS * CLIENTS
        assert running.documents(store) == 10
        assert {who: running.stream(who, **about(store))[1] for who in whole} == whole
        assert running.hits("disk") + running.hits("remote") > 0, "a new replica reads what others wrote"
        time.sleep(2 * PERIOD)  # an audit after the last answer
        told = audits.read_text().splitlines()
        assert len(told) > KILLS and {*told} == {"clean"}
    assert running.process.returncode == 0, (tmp_path / "log").read_text()
