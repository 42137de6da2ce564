"""The throughput that the search finds, beside the one that a queue of one server and fixed service must have."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from benchmarks.load.measure import BOUND, LOWEST, geometric, throughput
from benchmarks.load.workload import poisson

SERVICE = 0.1  # seconds, so that the capacity is 10 requests a second


def waited(rate: float) -> float:
    """Mean milliseconds to the answer of an M/D/1 queue (Pollaczek and Khinchine)."""
    load = rate * SERVICE
    return 1e3 * (SERVICE + load * SERVICE / (2 * (1 - load))) if load < 1 else float("inf")


def simulated(rate: float) -> float:
    """The same, simulated."""
    free, waits = 0.0, []
    for arrival in poisson(rate, 60_000, seed=5):
        free = max(free, arrival) + SERVICE
        waits.append(free - arrival)
    return 1e3 * float(np.mean(waits))


async def found(mean: object) -> tuple[float, list[float]]:
    asked: list[float] = []

    async def measure(rate: float) -> float:
        asked.append(rate)
        return mean(rate)  # type: ignore[operator]

    result = await throughput(measure, LOWEST / SERVICE, halvings=8)
    return result.rate, asked


def true_throughput() -> float:
    """Where the mean is five times that at a fifth of the capacity: wait/service = rho / (2 - 2 rho)."""
    most = BOUND * (1 + LOWEST / (2 - 2 * LOWEST)) - 1
    return 2 * most / (1 + 2 * most) / SERVICE


def test_the_search_finds_the_rate_at_which_the_bound_is_met() -> None:
    rate, asked = asyncio.run(found(waited))
    assert rate == pytest.approx(true_throughput(), rel=0.01) and rate <= true_throughput()
    assert len(asked) == len(set(asked))


def test_a_simulated_queue_has_the_same_throughput() -> None:
    rate, _ = asyncio.run(found(simulated))
    assert rate == pytest.approx(true_throughput(), rel=0.05)


def test_a_server_that_never_slows_down_is_raised_to_the_end() -> None:
    rate, asked = asyncio.run(found(lambda rate: 5.0))
    assert rate == max(asked)


def test_rates_are_in_equal_ratios_up_to_the_capacity() -> None:
    rates = geometric(10.0, 3)
    assert rates[0] == pytest.approx(2) and rates[-1] == pytest.approx(10)
    assert rates[1] / rates[0] == pytest.approx(rates[2] / rates[1])
