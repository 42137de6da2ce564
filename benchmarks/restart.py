"""Time to first token of demo questions: cold, from the device, from host memory, and from disk after a restart.

    python -m benchmarks.restart [--quick] [--limit N] [--json FILE]

Every server is a process of its own with a fresh engine. The first fills a disk cache and ends; the second finds it
there. Between "device" and "host" everything is driven off the device.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common import report
from benchmarks.common.envs import rerun
from benchmarks.common.question import questions
from ragjax.commands.flags import DEMO, integer
from ragjax.core import StorageOptions
from ragjax.engine import Engine

COLUMNS = ("state", "strategy", "questions", "context_tokens", "ttft_ms", "load_ms", "reused", "faster_than_cold")
PAUSE = 0.3
"""Seconds before each question, in which the copies that the last one left behind come to an end."""

STRATEGIES = ("prefix", "naive")


def serve(folder: str, states: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """One server's life: ask every question in each of the states, in order."""
    storage = StorageOptions(host_gb=1.0, disk=folder)
    found = []
    with Engine.load(report.MODEL, knowledge=DEMO / "documents", storage=storage, progress=False) as engine:
        engine.answer("Is anybody there?", max_tokens=1, strategy="full")  # what runs first pays for what is lazy
        for state in states:
            if state == "host":
                engine.vacate_device()
            found += [
                ask(engine, question, strategy, state) for question in questions(limit) for strategy in STRATEGIES
            ]
    return found


def ask(engine: Engine, question: str, strategy: str, state: str) -> dict[str, Any]:
    time.sleep(PAUSE)
    answer = engine.answer(question, strategy=strategy, max_tokens=1)
    return {
        "state": state,
        "strategy": strategy,
        "question": question,
        "context_tokens": answer.prompt_tokens,
        "ttft_ms": answer.timings.ttft,
        "load_ms": answer.timings.load,
        "reused": answer.cached_tokens,
        "tiers": sorted({r.tier for r in answer.segments if r.tier}),
        "notices": answer.notices,
    }


def in_process(folder: str, states: Sequence[str], limit: int) -> list[dict[str, Any]]:
    """`serve` in a process of its own."""
    answers: list[dict[str, Any]] = rerun("benchmarks.restart", "--server", folder, ",".join(states), str(limit))
    return answers


def rows(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians by state and strategy."""
    made = []
    for strategy in STRATEGIES:
        ours = [a for a in answers if a["strategy"] == strategy]
        cold = median(a["ttft_ms"] for a in ours if a["state"] == "cold")
        for state in dict.fromkeys(a["state"] for a in ours):
            group = [a for a in ours if a["state"] == state]
            middle = {k: median(a[k] for a in group) for k in ("context_tokens", "ttft_ms", "load_ms", "reused")}
            ratio = cold / middle["ttft_ms"]
            made.append(
                {"state": state, "strategy": strategy, "questions": len(group), **middle, "faster_than_cold": ratio}
            )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--server"]:
        print(json.dumps(serve(given[1], given[2].split(","), int(given[3]))))
        return 0
    flags = report.parser("restart", __doc__)
    flags.add_argument(
        "--limit", type=integer(1), default=12, metavar="N", help="questions (%(default)s; 4 with --quick)"
    )
    chosen = flags.parse_args(given)
    limit = min(chosen.limit, 4) if chosen.quick else chosen.limit
    answers: list[dict[str, Any]] = []

    def measure(_: report.Session) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            answers.extend(in_process(folder, ("cold", "device", "host"), limit))
            answers.extend(in_process(folder, ("disk",), limit))
        return rows(answers)

    code = report.run("restart", COLUMNS, chosen.json, measure)
    strayed = [a for a in answers if a["notices"] or (a["state"] in ("host", "disk") and a["state"] not in a["tiers"])]
    for answer in strayed:
        print(f"not as meant: {answer}", file=sys.stderr)
    return 1 if strayed else code


if __name__ == "__main__":
    sys.exit(main())
