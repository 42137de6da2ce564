"""Decoding over compressed prompts in an engine, in turns with decoding over whole ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from ragjax.core import Answer, Compression, ConfigError, EngineOptions, Kind, Prompt, Segment, Step
from ragjax.engine import Engine

WHOLE = "none"  # the setting without compression
TOKENS = 64  # tokens that each request decodes
RUNS = 3
GIGABYTES = 1.5  # size of the device cache
ROOM = 2  # prompts, kept and computed ones, take so many times their size


def rows(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The table's lines: no compression first, then every method at every budget, without a graph and with one.

    Raises:
        ConfigError: if so many tokens do not fit.
    """
    options = EngineOptions(
        chosen.model, dtype=chosen.dtype, lookup=0, max_context=chosen.context + 2 * TOKENS, device_cache_gb=GIGABYTES,
        progress=False,
    )  # fmt: skip
    tokens = chosen.clients * (chosen.context + TOKENS)
    with Engine.load(options) as engine:
        per_token = engine._runner.config.kv_bytes_per_token(2 if engine.dtype == "bfloat16" else 4)
        if tokens * per_token * ROOM > GIGABYTES * 2**30:
            raise ConfigError(f"{tokens} tokens do not fit {GIGABYTES} GB: lower --clients or --context")
        engine._preparation = replace(engine._preparation, eos_ids=frozenset())  # all answers have all tokens
        rates = measured(engine, chosen, [WHOLE, *_settings(chosen)])
    for setting, rate in rates.items():
        compression = None if setting == WHOLE else Compression.parse(setting)
        kept = chosen.context if compression is None else compression.budget
        yield {
            "method": "none" if compression is None else compression.method,
            "graph": "none" if compression is None or compression.graph is None else "ordered",
            "budget": kept, "set": "decode", "n": chosen.clients, "context_tokens": chosen.context,
            "kept_tokens": kept, "bytes": kept * per_token, "decode_tokens_per_s": rate, "faster": rate / rates[WHOLE],
        }  # fmt: skip


def measured(engine: Engine, chosen: argparse.Namespace, settings: Sequence[str]) -> Mapping[str, float]:
    asked = [prompt(engine, number, chosen.context) for number in range(chosen.clients)]
    rates: dict[str, list[float]] = {setting: [] for setting in settings}
    for run in range(RUNS + 1):
        for setting in settings:
            rate = decode_rate(together(engine, asked, setting))
            if run:  # the first compiles, and computes the prompts
                rates[setting].append(rate)
    return {setting: median(found) for setting, found in rates.items()}


def _settings(chosen: argparse.Namespace) -> list[str]:
    graphs = ("", "+graph")
    return [f"{method}{graph}:{budget}" for budget in chosen.budgets for method in chosen.methods for graph in graphs]


def prompt(engine: Engine, number: int, tokens: int) -> Prompt:
    drawn = np.random.default_rng(number).integers(0, engine.tokenizer.vocab_size, tokens)
    return Prompt((Segment(f"prompt {number}", Kind.QUERY, drawn.astype(np.int32)),))


def together(engine: Engine, prompts: Sequence[Prompt], compression: str) -> list[Answer]:
    """Answers of requests that arrive together; all have `TOKENS` tokens."""
    asked = [engine.begin_prompt(one, compression=compression, max_tokens=TOKENS) for one in prompts]
    return [future.result() for future in asked]


def decode_rate(answers: Sequence[Answer]) -> float:
    """Tokens a second: the sum over the requests, each while it decodes."""
    return sum((len(a.tokens) - 1) / (a.timings.total - a.timings.ttft) * 1e3 for a in answers)


COUNTED_TOKENS = 8  # tokens that a request decodes; they fit one page, which is counted
MEMORY_COLUMNS = ("method", "budget", "arrays", "set", "n", "context_tokens", "pages", "bytes", "share")


def memory_rows(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The table's lines: each method at every budget, in a pool of one pair of arrays and in one with a pair a stage.

    `bytes` are those of `pages`, `share` is of the pages without compression.
    """
    by_layer = f"pyramidkv:{min(chosen.budgets)}"  # as a server's setting it has the pool be one pair of arrays
    settings = [WHOLE, *(f"{method}:{budget}" for budget in chosen.budgets for method in chosen.methods)]
    for server in (by_layer, None):
        # pages are counted, nothing is timed: only the programs that run are compiled
        options = EngineOptions(
            chosen.model, dtype=chosen.dtype, lookup=0, max_context=chosen.context + 2 * COUNTED_TOKENS,
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
        engine.answer_prompt(asked, strategy="full", compression=compression, max_tokens=COUNTED_TOKENS)
    finally:
        del engine._runner.step  # type: ignore[method-assign]
    return min(seen)
