"""Throughput under a bound on latency: the largest rate whose mean TTFT is at most five times the unloaded one.

RAGCache, section 7 ("we report the throughput as the request rate whose average TTFT is below 5 times the TTFT at the
lowest request rate").
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

BOUND = 5.0
"""Mean TTFT allowed, in those at the lowest rate."""

LOWEST = 0.2
"""The lowest rate, as a share of capacity."""

GROWTH = 1.5
"""A rate over the one before, until the bound is passed."""

RAISES = 12
"""Rates tried before the search gives up raising."""

HALVINGS = 3
"""Of the gap between the last good rate and the first bad one."""

MOST_POINTS = 1 + RAISES + HALVINGS
"""Rates that a search measures at most."""


@dataclass(frozen=True)
class Throughput:
    """rate: requests a second. ttft_ms: mean time to first token at that rate. lowest_ms: at the lowest rate."""

    rate: float
    ttft_ms: float
    lowest_ms: float


async def throughput(
    mean_ttft: Callable[[float], Awaitable[float]], lowest: float, *, halvings: int = HALVINGS
) -> Throughput:
    """Raise the rate from `lowest` until the mean TTFT passes the bound, then halve the gap.

    mean_ttft: milliseconds at a rate; it is asked once a rate.
    """
    base = await mean_ttft(lowest)
    good, good_ms, bad = lowest, base, None
    for _ in range(RAISES):
        rate = good * GROWTH
        found = await mean_ttft(rate)
        if found > BOUND * base:
            bad = rate
            break
        good, good_ms = rate, found
    for _ in range(halvings if bad is not None else 0):
        assert bad is not None
        middle = (good + bad) / 2
        found = await mean_ttft(middle)
        if found > BOUND * base:
            bad = middle
        else:
            good, good_ms = middle, found
    return Throughput(good, good_ms, base)


def geometric(capacity: float, count: int) -> list[float]:
    """`count` rates in equal ratios, from `LOWEST` of the capacity to all of it."""
    if count == 1:
        return [capacity]
    step = (1 / LOWEST) ** (1 / (count - 1))
    return [capacity * LOWEST * step**i for i in range(count)]
