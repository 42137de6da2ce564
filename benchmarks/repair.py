"""What repairing reused KV costs: time to first token by strategy, the share that selection takes, and preprocessing.

The prompt is that of `benchmarks.ttft`: a system prompt, ten chunks of 200 tokens and a question of 30. Everything is
warm: chunks are computed by themselves, and preprocessed behind the nine others; Cache-Craft's variants come from a
request with the chunks in another order. Strategies take turns within each run, as a tenant of its own each time, so
that nothing is reused but that; figures are medians over runs.

`faster_than_full` is the median over runs of full's time over the strategy's. `selection_share` is the time from a
strategy's first pass to the beginning of the last pass that starts at the first layer, the one that recomputes, over
its time to first token: passes that measure, and choosing among what they found. Preprocessing is timed over the ten
chunks with their neighbours' own KV at hand (`fuse_s_per_chunk`) and without (`fuse_cold_s_per_chunk`); it pays for
itself after `break_even` reuses of a chunk, each of which saves a tenth of what fusion saves on the prompt.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.baseline.strategy import all_strategies
from benchmarks.common import report
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.common.samples import Progress
from benchmarks.latency.prompt import CHUNKS, Workload, jobs, marked, workload
from benchmarks.quality.evaluation import RECORDED, TAUGHT
from benchmarks.quality.probe import Probe
from ragjax.commands.flags import integer, share
from ragjax.core import Answer, Kind, Prompt, Segment
from ragjax.engine import Engine
from ragjax.engine.preprocessing import Job, fuse_all
from ragjax.reuse import DEPENDENCY
from ragjax.reuse.base import Strategy

RATIO = 0.15
COLUMNS = (
    "strategy", "ratio", "context_tokens", "ttft_ms", "faster_than_full", "faster_lo", "faster_hi", "selection_share",
    "recomputed_share", "passes", "runs",
)  # fmt: skip


def reordered(prompt: Prompt) -> Prompt:
    chunks = [segment for segment in prompt.segments if segment.kind is Kind.CHUNK]
    others: list[Segment] = [segment for segment in prompt.segments if segment.kind is not Kind.CHUNK]
    return Prompt((others[0], *reversed(chunks), *others[1:]))


def prepare(engine: Engine, work: Workload, names: Sequence[str]) -> tuple[Prompt, float, float]:
    """Have all KV in place; the marked prompt, and seconds a chunk behind nine others, with their own KV or not."""
    todo = jobs(work.prompt)
    fuse_all(engine, todo[:1])  # what runs first pays for what is lazy
    engine.clear_cache()
    cold, _ = _timed(engine, todo)
    engine.clear_cache()
    engine.answer_prompt(work.before, strategy="naive", max_tokens=1)
    warm, digests = _timed(engine, todo)
    if RECORDED & set(names):
        engine.clear_cache()
        fuse_all(engine, todo, record=True)
        engine.answer_prompt(work.before, strategy="naive", max_tokens=1)
    for teacher in dict.fromkeys(TAUGHT[name] for name in names if name in TAUGHT):
        engine.answer_prompt(reordered(work.before), strategy=teacher, max_tokens=1)
    prompt = marked(work.prompt, {job.chunk.id: digest for job, digest in zip(todo, digests, strict=True)})
    return prompt, warm / len(todo), cold / len(todo)


def _timed(engine: Engine, todo: Sequence[Job]) -> tuple[float, Sequence[bytes]]:
    began = time.perf_counter()
    digests = fuse_all(engine, todo)
    return time.perf_counter() - began, digests


def measure(
    engine: Engine, prompt: Prompt, strategies: Mapping[str, Strategy], ratio: float, runs: int
) -> dict[str, list[dict[str, float]]]:
    """For each strategy a sample a run; the first round, untimed, pays for what is lazy."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in strategies}
    progress = Progress(runs + 1)
    for run in range(runs + 1):
        for name, strategy in strategies.items():
            probe = Probe(strategy)
            portion = ratio if strategy.selective else None
            answer = engine.answer_prompt(
                prompt, strategy=probe, recompute_ratio=portion, max_tokens=1, tenant=f"{run}/{name}"
            )
            if run:
                found[name].append(sample(answer, probe))
        progress.step("untimed round" if run == 0 else f"run {run}")
    return found


def sample(answer: Answer, probe: Probe) -> dict[str, float]:
    chunks = [r for r in answer.segments if r.id.startswith("chunk")]
    return {
        "ttft_ms": answer.timings.ttft, "selection_ms": probe.selection_seconds * 1e3, "passes": len(probe.laps),
        "recomputed_share": sum(r.recomputed for r in chunks) / sum(r.tokens for r in chunks),
        "context_tokens": answer.prompt_tokens,
    }  # fmt: skip


def rows(
    found: Mapping[str, Sequence[Mapping[str, float]]],
    ratio: float,
    selective: frozenset[str],
    warm_s: float,
    cold_s: float,
) -> list[dict[str, Any]]:
    full = np.asarray([s["ttft_ms"] for s in found["full"]])
    made = []
    for name, samples in found.items():
        mine = np.asarray([s["ttft_ms"] for s in samples])
        faster = full / mine
        middle = {key: float(np.median([s[key] for s in samples])) for key in samples[0]}
        made.append({
            "strategy": name, "ratio": ratio if name in selective else None, **middle,
            "faster_than_full": float(np.median(faster)), "faster_lo": float(faster.min()),
            "faster_hi": float(faster.max()), "runs": len(samples),
            "selection_share": float(np.median([s["selection_ms"] / s["ttft_ms"] for s in samples])),
        })  # fmt: skip
        if name == "fusion":
            saved_s = (float(np.median(full)) - middle["ttft_ms"]) / 1e3 / CHUNKS
            made[-1] |= {
                "fuse_s_per_chunk": warm_s, "fuse_cold_s_per_chunk": cold_s, "chunks_per_s": 1 / cold_s,
                "break_even": cold_s / saved_s if saved_s > 0 else None,
            }  # fmt: skip
    return made


def show(made: Sequence[Mapping[str, Any]], _: Namespace) -> None:
    for r in made:
        if "fuse_s_per_chunk" not in r:
            continue
        even = "never" if r["break_even"] is None else f"after {r['break_even']:.1f} reuses of a chunk"
        print(
            f"\npreprocessing: {r['fuse_cold_s_per_chunk']:.2f} s a chunk ({r['chunks_per_s']:.1f} chunks/s), "
            f"{r['fuse_s_per_chunk']:.2f} s if its neighbours are known; pays for itself {even}"
        )


def options(flags: Parser) -> None:
    known = all_strategies()
    everything = [name for name in known if name not in DEPENDENCY]
    flags.add("--strategies", type=report.among(known, "strategy"), default=everything, metavar="A,B",
              help="besides full and naive")  # fmt: skip
    flags.add("--ratio", type=share, default=RATIO, metavar="R", help="share to recompute")
    flags.add("--runs", type=integer(1), default=7, quick=3, metavar="N", help="runs")


def run(engine: Engine, chosen: Namespace) -> list[dict[str, Any]]:
    known = all_strategies()
    strategies = {name: known[name] for name in dict.fromkeys(["full", "naive", *chosen.strategies])}
    prompt, warm_s, cold_s = prepare(engine, workload(engine.tokenizer), list(strategies))
    found = measure(engine, prompt, strategies, chosen.ratio, chosen.runs)
    selective = frozenset(name for name, s in strategies.items() if s.selective)
    return rows(found, chosen.ratio, selective, warm_s, cold_s)


def measured(chosen: Namespace, _: Session) -> list[dict[str, Any]]:
    with Engine.load(chosen.model, strategy="full", dtype=chosen.dtype, device_cache_gb=1.0) as engine:
        return run(engine, chosen)


BENCHMARK = Benchmark("repair", __doc__, COLUMNS, measured, options, model=True, show=show)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
