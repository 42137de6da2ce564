"""Measures what a prefill costs by tokens cached and tokens computed, as `ragjax cost` does, and tells the times.

`python -m benchmarks.policies --profile FILE` reads the file.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator

from benchmarks.common import report
from benchmarks.common.report import Benchmark, Parser, Session
from ragjax.commands.cost import ROUNDS, measure
from ragjax.commands.flags import integer
from ragjax.engine import Engine

COLUMNS = ("cached", "new", "ms", "ms_per_new_token")


def rows(chosen: Namespace, _: Session) -> Iterator[dict[str, float]]:
    longest = chosen.longest
    with Engine.load(chosen.model, dtype=chosen.dtype, device_cache_gb=1.0, max_context=2 * longest + 64) as engine:
        profile = measure(engine, longest, 1 if chosen.quick else ROUNDS)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    profile.save(chosen.out)
    for a, times in zip(profile.cached, profile.seconds, strict=True):
        for b, s in zip(profile.new, times, strict=True):
            yield {"cached": a, "new": b, "ms": s * 1e3, "ms_per_new_token": s * 1e3 / b}


def options(flags: Parser) -> None:
    flags.add("--out", type=report.writable, required=True, metavar="FILE", help="the profile, JSON")
    flags.add("--longest", type=integer(33), default=2048, quick=512, help="most cached, and new tokens")


main = Benchmark("cost", __doc__, COLUMNS, rows, options, model=True).main

if __name__ == "__main__":
    sys.exit(main())
