"""Two small measurements: what a batch decodes, and what decoders wait while a long prompt is prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.load.client import Load, Record, Target, closed_loop, open_loop
from benchmarks.load.measure import percentile
from benchmarks.load.workload import Ask

TOGETHER = 16  # requests that decode at once
BATCH_TOKENS = 64  # tokens that each of them decodes
STALL_TOKENS = 96
STALL_CLIENTS = 4
LONG = 4096  # tokens of the prompt that is prefilled while others decode
FILLER = "The lighthouse keeper wrote down the wind, the tide and every ship that passed the northern cape. "


def prompt(number: int, tokens: int) -> Ask:
    text = f"Report {number}. " + FILLER * max(1, round(tokens / 19.5))
    return Ask(f"{number}", text, BATCH_TOKENS, top_k=0)


async def batch(target: Target, context: int) -> list[tuple[str, Load]]:
    """One request alone, then sixteen at once: each over a context of its own, then all over one; its KV is known."""
    own = [prompt(number, context) for number in range(TOGETHER)]
    one = [replace(ask, question=f"{own[0].question}Question {ask.id}.") for ask in own]
    for asks in (own, one):
        await closed_loop(target, [replace(ask, output=4) for ask in asks], TOGETHER)
        await closed_loop(target, asks, TOGETHER)  # whatever has to be compiled is
    alone = await closed_loop(target, own[:1], 1)
    return [
        ("batch:alone", alone),
        ("batch:own", await closed_loop(target, own, TOGETHER)),
        ("batch:one", await closed_loop(target, one, TOGETHER)),
    ]


def decode_rate(load: Load) -> float:
    """Tokens a second while all requests decode.

    A token without text comes with the next delivery, so a delivery counts as the mean number of tokens that a delivery
    of its answer has.
    """
    begin = max(record.times[0] for record in load.records)
    end = min(record.times[-1] for record in load.records)
    tokens = sum(
        sum(begin < time <= end for time in record.times) * record.output_tokens / len(record.times)
        for record in load.records
    )
    return tokens / (end - begin)


async def stall(target: Target) -> list[tuple[str, Load]]:
    """Four requests decode; then four decode while the prompt of a fifth, of 4K tokens, is prefilled."""
    short = [replace(prompt(number, 256), output=STALL_TOKENS) for number in range(STALL_CLIENTS)]
    long = [replace(prompt(100 + number, LONG - 128), output=1) for number in range(2)]
    await closed_loop(target, [*short, long[0]], STALL_CLIENTS)
    idle = await closed_loop(target, short, STALL_CLIENTS)
    both = await open_loop(target, [*short, long[1]], [*([0.0] * STALL_CLIENTS), 0.5], rate=0.0)
    began, ended = both.records[-1].due, both.records[-1].times[0]
    kept = [_within(record, began, ended) for record in both.records[:-1]]
    return [("stall:idle", idle), ("stall:prefill", Load(kept, concurrency=STALL_CLIENTS))]


def _within(record: Record, began: float, ended: float) -> Record:
    """The record with those deliveries alone whose gap overlaps with the prefill, and the one before."""
    times = record.times
    kept = [i for i in range(1, len(times)) if times[i] > began and times[i - 1] < ended]
    return replace(record, times=times[kept[0] - 1 : kept[-1] + 1] if kept else times[:1])


def gap_p99(load: Load) -> float | None:
    """99th percentile of the gaps between deliveries, in milliseconds."""
    return percentile([gap for record in load.records for gap in record.gaps_ms], 99)


def verdict(part: str, loads: Sequence[tuple[str, Load]]) -> dict[str, Any]:
    first, second = loads[0][1], loads[1][1]
    if part == "batch":
        alone, own, one = (decode_rate(load) for _, load in loads)
        rates = {"tokens_per_s_alone": alone, "tokens_per_s_own": own, "tokens_per_s_one": one}
        return {**rates, "ratio_own": own / alone, "ratio_one": one / alone}
    idle, busy = gap_p99(first) or 0.0, gap_p99(second) or 0.0
    return {"itl_p99_idle_ms": idle, "itl_p99_prefill_ms": busy, "ratio": busy / idle}
