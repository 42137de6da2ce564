"""`ragjax cost`: measures what a prefill costs by tokens cached and tokens computed (RAGCache, section 5.1).

It is done once for a model on a device. A server with `--policy pgdsf` finds what was measured; without, it measures a
few steps at its start.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from ragjax.cache.profile import Profile
from ragjax.commands.flags import Parser, add_engine_flags, engine_options, exit_code, integer
from ragjax.core import Kind, Prompt, Segment
from ragjax.engine import Engine
from ragjax.engine.measurement import cost_path

ROUNDS = 3


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("ragjax cost", lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser("ragjax cost", "Measure prefill times of a model on this device, for --policy pgdsf.")
    add_engine_flags(parser, ("model", "dtype", "device_cache_gb", "tensor_parallel"))
    parser.add_argument("--longest", type=integer(33), default=2048, help="most cached, and new tokens (%(default)s)")
    options = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with Engine.load(engine_options(options), max_context=2 * options.longest + 64) as engine:
        profile = measure(engine, options.longest, ROUNDS)
        path = cost_path(engine.identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    profile.save(path)
    print(f"{len(profile.cached) * len(profile.new)} prefill times of {profile.measured_on} are in {path}")
    return 0


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
