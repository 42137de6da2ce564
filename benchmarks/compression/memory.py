"""Pages that a request holds while it decodes behind a compressed prompt, counted in an engine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.compression.decode import GIGABYTES, WHOLE, prompt
from ragjax.core import Compression, EngineOptions, Prompt, Step
from ragjax.engine import Engine

TOKENS = 8
"""Tokens that a request decodes; they fit one page, which is counted."""
COLUMNS = ("method", "budget", "arrays", "set", "n", "context_tokens", "pages", "bytes", "share")


def rows(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The table's lines: each method at every budget, in a pool of one pair of arrays and in one with a pair a stage.

    `bytes` are those of `pages`, `share` is of the pages without compression.
    """
    by_layer = f"pyramidkv:{min(chosen.budgets)}"  # as a server's setting it has the pool be one pair of arrays
    settings = [WHOLE, *(f"{method}:{budget}" for budget in chosen.budgets for method in chosen.methods)]
    for server in (by_layer, None):
        # pages are counted, nothing is timed: only the programs that run are compiled
        options = EngineOptions(
            chosen.model, dtype=chosen.dtype, lookup=0, max_context=chosen.context + 2 * TOKENS,
            device_cache_gb=GIGABYTES, progress=False, compression=server, compile=False,
        )  # fmt: skip
        with Engine.load(options) as engine:
            engine._preparation = replace(engine._preparation, eos_ids=frozenset())  # all answers have all tokens
            asked = prompt(engine, 0, chosen.context)
            page = engine._cache.pool.page_size * engine._runner.config.kv_bytes_per_token(
                2 if engine.dtype == "bfloat16" else 4
            )
            counts = {setting: pages(engine, asked, setting) for setting in settings}
        for setting, count in counts.items():
            compression = None if setting == WHOLE else Compression.parse(setting)
            yield {
                "method": "none" if compression is None else compression.method,
                "budget": chosen.context if compression is None else compression.budget,
                "arrays": "one" if server else "stage", "set": "memory", "n": 1, "context_tokens": chosen.context,
                "pages": count, "bytes": count * page, "share": count / counts[WHOLE],
            }  # fmt: skip


def pages(engine: Engine, asked: Prompt, compression: str) -> int:
    """Pages in use while the first tokens behind a prompt are computed; nothing else may be asked meanwhile."""
    pool, step, seen = engine._cache.pool, engine._runner.step, []
    before = pool.capacity - pool.free_pages

    def watched(given: Step) -> Any:
        if (given.index_T >= len(asked)).any():
            seen.append(pool.capacity - pool.free_pages - before)
        return step(given)

    engine._runner.step = watched  # type: ignore[method-assign,assignment]
    try:
        engine.answer_prompt(asked, strategy="full", compression=compression, max_tokens=TOKENS)
    finally:
        engine._runner.step = step  # type: ignore[method-assign]
    return min(seen)
