"""When requests arrive: Poisson's process, or the times that a trace recorded."""

from __future__ import annotations

import csv
import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common.questions import read_lines
from ragjax.core import ConfigError

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
"""Columns of Azure's traces."""

BLOCK_TOKENS = 512
"""Tokens that one hash of a Mooncake trace stands for."""


@dataclass(frozen=True)
class Arrival:
    """One request of a trace: seconds since the first one, tokens of prompt and answer, hashes of the prompt's blocks
    (none where the trace has none).
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` a second on average; gaps are exponential and independent."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [float(seconds) for seconds in np.cumsum(gaps)]


def read_trace(file: Path, limit: int | None = None) -> list[Arrival]:
    """The first requests of a trace: Azure's .csv, or Mooncake's .jsonl.

    Raises:
        ConfigError: if the file is neither.
    """
    found = _azure(file, limit) if file.suffix == ".csv" else _mooncake(file, limit)
    if not found:
        raise ConfigError(f"{file} has no request")
    return found


def _azure(file: Path, limit: int | None) -> list[Arrival]:
    with file.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines)
        if not set(AZURE) <= set(rows.fieldnames or ()):
            raise ConfigError(f"{file} is not a trace of Azure's: its columns are not {', '.join(AZURE)}")
        found: list[tuple[float, int, int]] = []
        for row in rows:
            if limit is not None and len(found) == limit:
                break
            # Azure writes seven digits of a second, Python reads six
            moment = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26] + "+00:00").timestamp()
            found.append((moment, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
    return [Arrival(moment - found[0][0], prompt, output) for moment, prompt, output in found]


def _mooncake(file: Path, limit: int | None) -> list[Arrival]:
    found: list[Arrival] = []
    for entry in read_lines(file, "timestamp", "input_length", "output_length", "hash_ids"):
        if limit is not None and len(found) == limit:
            break
        blocks = tuple(int(block) for block in entry["hash_ids"])
        found.append(Arrival(entry["timestamp"] / 1e3, entry["input_length"], entry["output_length"], blocks))
    return found


def rescaled(trace: Sequence[Arrival], rate: float, count: int) -> list[float]:
    """The times of `count` requests of a trace, stretched evenly to `rate` a second: bursts stay bursts.

    Raises:
        ConfigError: if the trace is too short.
    """
    if len(trace) < count or trace[count - 1].seconds <= 0:
        raise ConfigError(f"the trace has {len(trace)} requests over time, {count} are needed: lower --requests")
    times = np.array([arrival.seconds for arrival in trace[:count]])
    return [float(seconds) for seconds in times * (count - 1) / rate / times[-1]]
