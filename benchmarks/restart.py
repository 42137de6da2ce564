"""Time to first token of demo questions: cold, from the device, from host memory, and from disk after a restart.

Every server is a process of its own with a fresh engine. The first fills a disk cache and ends; the second finds it
there. Between "device" and "host" everything is driven off the device.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common.report import Benchmark, Parser, Row, Session
from benchmarks.latency.life import STRATEGIES, in_process
from ragjax.commands.flags import integer

COLUMNS = ("state", "strategy", "questions", "context_tokens", "ttft_ms", "load_ms", "reused", "faster_than_cold")


def measure(chosen: Namespace, _: Session) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        storage = {"host_gb": 1.0, "disk": folder}
        answers = in_process(storage, ("cold", "device", "host"), STRATEGIES, chosen.limit)["answers"]
        answers += in_process(storage, ("disk",), STRATEGIES, chosen.limit)["answers"]
    return rows(answers)


def rows(answers: Sequence[Row]) -> list[dict[str, Any]]:
    made = []
    for strategy in STRATEGIES:
        ours = [a for a in answers if a["strategy"] == strategy]
        cold = median(a["ttft_ms"] for a in ours if a["state"] == "cold")
        for state in dict.fromkeys(a["state"] for a in ours):
            group = [a for a in ours if a["state"] == state]
            middle = {k: median(a[k] for a in group) for k in ("context_tokens", "ttft_ms", "load_ms", "reused")}
            strayed = [a for a in group if a["notices"] or (state in ("host", "disk") and state not in a["tiers"])]
            for answer in strayed:
                print(f"not as meant: {answer}", file=sys.stderr)
            made.append({
                "state": state, "strategy": strategy, "questions": len(group), **middle,
                "faster_than_cold": cold / middle["ttft_ms"], "strayed": len(strayed),
            })  # fmt: skip
    return made


def options(flags: Parser) -> None:
    flags.add("--limit", type=integer(1), default=12, quick=4, metavar="N", help="questions")


main = Benchmark(
    "restart", __doc__, COLUMNS, measure, options, show=lambda made, _: any(row["strayed"] for row in made)
).main

if __name__ == "__main__":
    sys.exit(main())
