"""Measures what a prefill costs by tokens cached and tokens computed (RAGCache, section 5.1), and tells the times.

`python -m benchmarks.policies --profile FILE` reads the file.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

from benchmarks.common import profiles, report
from benchmarks.common.report import Benchmark, Parser, Session
from ragjax.cache.profile import Profile
from ragjax.commands.flags import integer
from ragjax.core import Kind, Prompt, Segment
from ragjax.engine import Engine

COLUMNS = ("cached", "new", "ms", "ms_per_new_token")

ROUNDS = 3


def grid(longest: int) -> tuple[int, ...]:
    counts = [32]
    while counts[-1] * 4 < longest:
        counts.append(counts[-1] * 4)
    return (*counts, longest)


def seconds(engine: Engine, cached: int, new: int, rounds: int) -> float:
    """Prefill of `new` tokens behind `cached` ones that are in the cache; median over rounds of other tokens."""
    random, times = np.random.default_rng(cached * 100_003 + new), []
    for _ in range(rounds):
        ids = random.integers(5, min(1000, engine.tokenizer.vocab_size), cached + new).astype(np.int32)
        head = (Segment("cached", Kind.QUERY, ids[:cached]),) if cached else ()
        if head:
            engine.answer_prompt(Prompt(head), strategy="prefix", max_tokens=1)
        began = time.perf_counter()
        prompt = Prompt((*head, Segment("new", Kind.QUERY, ids[cached:])))
        answer = engine.answer_prompt(prompt, strategy="prefix", max_tokens=1)
        times.append(time.perf_counter() - began)
        # the last token of the cached part is computed for its logits, so it is cached as well
        assert answer.cached_tokens == cached, (answer.cached_tokens, cached)
        engine.clear_cache()
    return statistics.median(times)


def measure(engine: Engine, longest: int, rounds: int) -> Profile:
    cached, new = (0, *grid(longest)), (1, *grid(longest))
    pairs = tqdm([(a, b) for a in cached for b in new], desc="prefill", unit="pair")
    times = [seconds(engine, a, b, rounds) for a, b in pairs]
    rows = tuple(tuple(times[i : i + len(new)]) for i in range(0, len(times), len(new)))
    return Profile(cached, new, rows, f"{engine.model_name} {engine.dtype}")


def rows(chosen: Namespace, _: Session) -> Iterator[dict[str, float]]:
    longest = chosen.longest
    with Engine.load(chosen.model, dtype=chosen.dtype, device_cache_gb=1.0, max_context=2 * longest + 64) as engine:
        profile = measure(engine, longest, 1 if chosen.quick else ROUNDS)
    profiles.save(profile, chosen.out)
    for a, times in zip(profile.cached, profile.seconds, strict=True):
        for b, s in zip(profile.new, times, strict=True):
            yield {"cached": a, "new": b, "ms": s * 1e3, "ms_per_new_token": s * 1e3 / b}


def options(flags: Parser) -> None:
    flags.add("--out", type=report.writable, required=True, metavar="FILE", help="the profile, JSON")
    flags.add("--longest", type=integer(33), default=2048, quick=512, help="most cached, and new tokens")


main = Benchmark("cost", __doc__, COLUMNS, rows, options, model=True).main

if __name__ == "__main__":
    sys.exit(main())
