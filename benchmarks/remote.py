"""Share of tokens found and time to first token of a server's first requests: alone, and beside a full shared cache.

Every server is a process of its own with a fresh engine and no disk. The first one has no shared cache, the second one
finds it empty and fills it, the third one finds what the second one left. Without `--url` a redis-server of its own is
started for each strategy; the server of an address must hold nothing of the model, and the second strategy finds there
what the first one left of the system prompt.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.common.envs import redis
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.latency.life import STRATEGIES, in_process
from ragjax.commands.flags import integer

COLUMNS = ("shared_cache", "strategy", "questions", "prompt_tokens", "found", "from_shared", "ttft_ms", "late")
STATES = ("none", "empty", "full")


def measure(chosen: Namespace, _: Session) -> Iterator[dict[str, Any]]:
    for strategy in STRATEGIES:
        with redis(chosen.url) as url:
            for state in STATES:
                storage = {"remote": None if state == "none" else url}
                yield row(state, strategy, in_process(storage, (state,), (strategy,), chosen.limit))


def row(state: str, strategy: str, served: dict[str, Any]) -> dict[str, Any]:
    """Shares of all prompts' tokens, and the median time to first token."""
    answers = served["answers"]
    tokens = sum(a["context_tokens"] for a in answers)
    return {
        "shared_cache": state, "strategy": strategy, "questions": len(answers), "prompt_tokens": tokens,
        "found": sum(a["reused"] for a in answers) / tokens, "from_shared": sum(a["shared"] for a in answers) / tokens,
        "ttft_ms": median(a["ttft_ms"] for a in answers), "late": served["late"],
    }  # fmt: skip


def options(flags: Parser) -> None:
    flags.add("--limit", type=integer(1), default=50, quick=4, metavar="N", help="questions")
    flags.add("--url", help="a Redis server that holds nothing of the model (default: one of its own)")


main = Benchmark("remote", __doc__, COLUMNS, measure, options).main

if __name__ == "__main__":
    sys.exit(main())
