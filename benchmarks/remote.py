"""Share of tokens found and time to first token of a server's first requests: alone, and beside a full shared cache.

    python -m benchmarks.remote [--quick] [--limit N] [--url redis://…] [--json FILE]

Every server is a process of its own with a fresh engine and no disk. The first one has no shared cache, the second one
finds it empty and fills it, the third one finds what the second one left. Without `--url` a redis-server of its own is
started for each strategy; the server of an address must hold nothing of the model, and the second strategy finds there
what the first one left of the system prompt.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common import report
from benchmarks.common.envs import rerun
from benchmarks.common.question import questions
from benchmarks.common.redis import redis
from ragjax.commands.flags import DEMO, integer
from ragjax.core import StorageOptions
from ragjax.engine import Engine

COLUMNS = ("shared_cache", "strategy", "questions", "prompt_tokens", "found", "from_shared", "ttft_ms", "late")
STRATEGIES = ("prefix", "naive")
STATES = ("none", "empty", "full")
PAUSE = 0.3
"""Seconds before each question, in which the copies that the last one left behind come to an end."""


def serve(url: str, strategy: str, limit: int) -> dict[str, Any]:
    """One server's life: its first questions. url: "none" for no shared cache."""
    storage = StorageOptions(remote=None if url == "none" else url)
    found = []
    with Engine.load(report.MODEL, knowledge=DEMO / "documents", storage=storage, progress=False) as engine:
        engine.answer("Is anybody there?", max_tokens=1, strategy="full")  # what runs first pays for what is lazy
        for question in questions(limit):
            time.sleep(PAUSE)
            answer = engine.answer(question, strategy=strategy, max_tokens=1)
            shared = sum(part.reused for part in answer.segments if part.tier == "remote")
            found.append(
                {
                    "prompt_tokens": answer.prompt_tokens,
                    "reused": answer.cached_tokens,
                    "shared": shared,
                    "ttft_ms": answer.timings.ttft,
                }
            )
        late = engine.stats().get("remote_late_total", 0)
    return {"answers": found, "late": late}


def in_process(url: str, strategy: str, limit: int) -> dict[str, Any]:
    """`serve` in a process of its own."""
    served: dict[str, Any] = rerun("benchmarks.remote", "--server", url, strategy, str(limit))
    return served


def row(state: str, strategy: str, served: dict[str, Any]) -> dict[str, Any]:
    """Shares of all prompts' tokens, and the median time to first token."""
    answers = served["answers"]
    tokens = sum(a["prompt_tokens"] for a in answers)
    return {
        "shared_cache": state,
        "strategy": strategy,
        "questions": len(answers),
        "prompt_tokens": tokens,
        "found": sum(a["reused"] for a in answers) / tokens,
        "from_shared": sum(a["shared"] for a in answers) / tokens,
        "ttft_ms": median(a["ttft_ms"] for a in answers),
        "late": served["late"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--server"]:
        print(json.dumps(serve(given[1], given[2], int(given[3]))))
        return 0
    flags = report.parser("remote", __doc__)
    flags.add_argument(
        "--limit", type=integer(1), default=50, metavar="N", help="questions (%(default)s; 4 with --quick)"
    )
    flags.add_argument("--url", help="a Redis server that holds nothing of the model (default: one of its own)")
    chosen = flags.parse_args(given)
    limit = min(chosen.limit, 4) if chosen.quick else chosen.limit

    def measure(_: report.Session) -> list[dict[str, Any]]:
        made = []
        for strategy in STRATEGIES:
            with redis(chosen.url) as url:
                made += [
                    row(state, strategy, in_process("none" if state == "none" else url, strategy, limit))
                    for state in STATES
                ]
        return made

    return report.run("remote", COLUMNS, chosen.json, measure)


if __name__ == "__main__":
    sys.exit(main())
