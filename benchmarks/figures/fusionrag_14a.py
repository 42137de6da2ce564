"""FusionRAG, Figure 14a: time to first token by recomputed share, and the part of it in which KV is loaded.

The paper: contexts of 27K tokens, KV in host memory, three models on L20 GPUs; at 0% the first token comes 5.2 to 9.4
times sooner than with full attention, at 15% 2.7 to 3.9 times. Here the prompt of `benchmarks.ttft` (ten chunks of
200 tokens), each chunk preprocessed behind the nine others, KV on the device or driven out to host memory before each
request. Settings take turns in each run, the first of which is not counted; figures are medians, `slowest` is the
longest run. On a CPU host and device memory are the same, and loading is a copy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common.plot import Panel, label
from benchmarks.common.report import Row
from benchmarks.common.samples import Progress
from benchmarks.figures.base import Figure, Setup
from benchmarks.latency.prompt import jobs, marked, workload
from ragjax.core import StorageOptions
from ragjax.engine import Engine
from ragjax.engine.preprocessing import fuse_all

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.3, 0.5)
STATES = ("device", "host")
PAUSE = 0.3
"""Seconds before each request, in which the copies that the last one left behind come to an end."""


@dataclass(frozen=True)
class Case:
    """One point: a strategy, its ratio, and where its KV lies."""

    strategy: str
    ratio: float | None
    state: str


CASES = (Case("full", None, "device"), *(Case("fusion", ratio, state) for state in STATES for ratio in RATIOS))


def rows_of(found: Mapping[Case, Sequence[Mapping[str, float]]]) -> list[Row]:
    """A row for each case. found: a sample for each run, `full` among them."""
    full = np.array([s["ttft_ms"] for s in found[CASES[0]]])
    rows: list[Row] = []
    for case, samples in found.items():
        mine = np.array([s["ttft_ms"] for s in samples])
        rows.append({
            "strategy": case.strategy, "ratio": case.ratio, "state": case.state, "n": len(samples),
            **{key: float(np.median([s[key] for s in samples])) for key in samples[0]},
            "slowest_ms": float(mine.max()), "faster_than_full": float(np.median(full / mine)),
        })  # fmt: skip
    return rows


def run(engine: Engine, runs: int) -> list[Row]:
    """The rows, `runs` samples each."""
    work = workload(engine.tokenizer)
    todo = jobs(work.prompt)
    engine.answer_prompt(work.before, strategy="naive", max_tokens=1)
    digests = fuse_all(engine, todo, progress=False)
    prompt = marked(work.prompt, {job.chunk.id: digest for job, digest in zip(todo, digests, strict=True)})
    found: dict[Case, list[dict[str, float]]] = {case: [] for case in CASES}
    progress = Progress((runs + 1) * len(CASES))
    for i in range(runs + 1):
        for case in CASES:
            if case.state == "host":
                engine.vacate_device()
            time.sleep(PAUSE)
            answer = engine.answer_prompt(
                prompt, strategy=case.strategy, recompute_ratio=case.ratio, max_tokens=1, tenant=f"{i}/{case}"
            )
            progress.step(f"{case.strategy} {case.ratio}, {case.state}")
            if i:
                sample = {"ttft_ms": answer.timings.ttft, "load_ms": answer.timings.load}
                found[case].append(sample | {"context_tokens": answer.prompt_tokens})
    return rows_of(found)


def measure(setup: Setup) -> list[Row]:
    """A row for each case."""
    storage = StorageOptions(host_gb=2.0)
    with Engine.load(
        setup.model, strategy="fusion", dtype=setup.dtype, device_cache_gb=2.0, storage=storage, compile=False
    ) as engine:
        return run(engine, setup.limit)


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Bars by share, loading at the bottom; full attention last."""

    def of(state: str) -> Panel:
        def panel(axes: Any) -> None:
            mine = [r for r in rows if r["strategy"] == "fusion" and r["state"] == state]
            mine += [r for r in rows if r["strategy"] == "full"]
            names = ["full" if r["ratio"] is None else f"{r['ratio']:.0%}" for r in mine]
            load = [r["load_ms"] for r in mine]
            axes.bar(names, load, label="KV loaded")
            drawn = axes.bar(names, [r["ttft_ms"] - r["load_ms"] for r in mine], bottom=load, label="the rest")
            axes.bar_label(drawn, [f"{r['faster_than_full']:.1f} x" for r in mine], fontsize=7)
            label(axes, f"KV in {state} memory", "share recomputed", "time to first token, ms")

        return panel

    return [of(state) for state in STATES]


FIGURE = Figure(
    paper="FusionRAG, Figure 14a",
    shows="time to first token by recomputed share",
    differs="SmolLM2-135M on two cores; 2K tokens instead of 27K; host memory is the device's memory",
    measure=measure,
    panels=panels,
    columns=("strategy", "ratio", "state", "n", "context_tokens", "ttft_ms", "load_ms", "slowest_ms",
             "faster_than_full"),
    limit=7,
    timed=True,
    reads_data=False,
)  # fmt: skip
