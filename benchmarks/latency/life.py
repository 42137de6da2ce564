"""Servers of the demo in processes of their own, whose first questions are timed with KV in different places."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import report
from benchmarks.common.envs import rerun
from benchmarks.common.questions import spread
from ragjax.commands.flags import DEMO
from ragjax.core import StorageOptions
from ragjax.engine import Engine

STRATEGIES = ("prefix", "naive")
PAUSE = 0.3  # seconds before each question, in which the copies that the last one left behind come to an end


def serve(storage: Mapping[str, Any], states: Sequence[str], strategies: Sequence[str], limit: int) -> dict[str, Any]:
    """One server's life: every question in each of the states, in order. Before "host" the device is emptied."""
    found = []
    options = StorageOptions(**storage)
    with Engine.load(report.MODEL, knowledge=DEMO / "documents", storage=options, progress=False) as engine:
        engine.answer("Is anybody there?", max_tokens=1, strategy="full")  # what runs first pays for what is lazy
        for state in states:
            if state == "host":
                engine.vacate_device()
            for question in spread(limit):
                found += [ask(engine, question, strategy, state) for strategy in strategies]
        late = engine.stats().get("remote_late_total", 0)
    return {"answers": found, "late": late}


def ask(engine: Engine, question: str, strategy: str, state: str) -> dict[str, Any]:
    time.sleep(PAUSE)
    answer = engine.answer(question, strategy=strategy, max_tokens=1)
    return {
        "state": state, "strategy": strategy, "question": question, "context_tokens": answer.prompt_tokens,
        "ttft_ms": answer.timings.ttft, "load_ms": answer.timings.load, "reused": answer.cached_tokens,
        "shared": sum(part.reused for part in answer.segments if part.tier == "remote"),
        "tiers": sorted({part.tier for part in answer.segments if part.tier}), "notices": answer.notices,
    }  # fmt: skip


def in_process(
    storage: Mapping[str, Any], states: Sequence[str], strategies: Sequence[str], limit: int
) -> dict[str, Any]:
    found: dict[str, Any] = rerun("benchmarks.latency.life", json.dumps([storage, states, strategies, limit]))
    return found


if __name__ == "__main__":
    print(json.dumps(serve(*json.loads(sys.argv[1]))))
