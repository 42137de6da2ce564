"""Arrivals: Poisson's mean and variance, traces as they are written, stretched evenly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.load.workload import poisson, read_trace, rescaled
from ragjax.core import ConfigError


def test_gaps_have_the_mean_and_the_variance_of_an_exponential() -> None:
    times = poisson(4.0, 40_000, seed=1)
    gaps = np.diff([0.0, *times])
    assert np.all(gaps > 0)
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.02)
    assert gaps.var() == pytest.approx(1 / 16, rel=0.05)


def test_arrivals_in_a_window_are_a_poisson_number() -> None:
    counts = np.histogram(poisson(5.0, 50_000, seed=2), bins=np.arange(0, 9000))[0]
    assert counts.mean() == pytest.approx(5, rel=0.02) and counts.var() == pytest.approx(5, rel=0.05)


def test_a_seed_is_a_sequence() -> None:
    assert poisson(1.0, 9, seed=3) == poisson(1.0, 9, seed=3) != poisson(1.0, 9, seed=4)


def test_azures_trace(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(file)
    assert (first.seconds, first.prompt_tokens, first.output_tokens) == (0.0, 374, 44)
    assert second.seconds == pytest.approx(4.314579, abs=1e-5)


def test_mooncakes_trace(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    entries = [
        {"timestamp": 500 * n, "input_length": 900, "output_length": 5, "hash_ids": [0, n + 1]} for n in range(3)
    ]
    file.write_text("\n".join(map(json.dumps, entries)))
    found = read_trace(file, 2)
    assert [a.blocks for a in found] == [(0, 1), (0, 2)] and found[1].seconds == 0.5


def test_what_is_no_trace_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="columns"):
        read_trace(file)


def test_a_stretched_trace_has_the_rate_and_keeps_its_bursts(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.jsonl"
    moments = [0, 0, 0, 900, 1000]
    entries = [{"timestamp": t, "input_length": 1, "output_length": 1, "hash_ids": []} for t in moments]
    file.write_text("\n".join(map(json.dumps, entries)))
    trace = read_trace(file)
    times = rescaled(trace, rate=2.0, count=5)
    assert times == pytest.approx([0, 0, 0, 1.8, 2.0])
    with pytest.raises(ConfigError, match="lower --requests"):
        rescaled(trace, rate=2.0, count=6)
