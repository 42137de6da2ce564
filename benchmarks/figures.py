"""Figures of FusionRAG and Cache-Craft, measured on a small model, one command each.

    python -m benchmarks.figures --list
    python -m benchmarks.figures --figure NAME --data DIR [--json FILE] [--plot FILE.png]
    python -m benchmarks.figures --figure NAME --rows REPORT.json --plot FILE.png

`FIGURES` says what each one measures: strategies on sets at recomputed shares, as `benchmarks.quality` measures them.
`--rows` measures nothing and draws the rows of a stored report, also of `benchmarks.quality`. `--list` also names the
figures that other commands draw, and those whose results are kept and no longer measured (docs/figures.md).

`fusionrag_14a` times the prompt of `benchmarks.ttft`, each chunk preprocessed behind the nine others, KV on the device
or driven out to host memory before each request. Settings take turns in each run, the first of which is not counted;
figures are medians, `slowest_ms` is the longest run.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baseline.strategy import all_strategies
from benchmarks.common import plot, report
from benchmarks.common.plot import Panel, label
from benchmarks.common.report import Benchmark, Parser, Row, Session
from benchmarks.common.samples import Progress, Samples
from benchmarks.latency.prompt import jobs, marked, workload
from benchmarks.quality import dataset
from benchmarks.quality.evaluation import Evaluation, Style
from benchmarks.quality.plot import against_cost, by_neighbours, by_ratio, selections
from benchmarks.quality.rows import Question, main_settings, measure, opened, rows, sweep_settings
from benchmarks.quality.similarity import packaged_encoder
from ragjax.commands.flags import integer
from ragjax.core import ConfigError, StorageOptions
from ragjax.engine import Engine
from ragjax.engine.preprocessing import fuse_all

RATIO, NEIGHBOURS = 0.15, 10  # what both papers recompute; neighbours that FusionRAG preprocesses a chunk behind
PAUSE = 0.3  # seconds before a timed request, in which the copies that the last one left behind come to an end
COLUMNS = (
    "set", "part", "strategy", "ratio", "neighbours", "n", "recomputed_share", "kl", "kl_lo", "kl_hi", "rougeL_vs_full",
    "rougeL_vs_full_lo", "rougeL_vs_full_hi", "f1", "em", "normalised_f1", "normalised_f1_lo", "normalised_f1_hi",
)  # fmt: skip
TIMES = (
    "strategy", "ratio", "state", "n", "context_tokens", "ttft_ms", "load_ms", "slowest_ms", "faster_than_full",
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A figure of a paper."""

    paper: str
    shows: str
    differs: str  # what is not as in the paper
    panels: Callable[[Sequence[Row]], Sequence[Panel]]
    sets: tuple[str, ...] = ()  # none: it is timed, and reads no data
    strategies: tuple[str, ...] = ()  # besides full and naive
    ratio: float = RATIO  # of the rows of part "main"
    ratios: tuple[float, ...] = ()  # others, which make the part "sweep"
    neighbours: tuple[int, ...] = ()  # besides ten, which make the part "neighbours"
    max_tokens: int = 16
    limit: int = 25  # questions a set, or runs

    @property
    def columns(self) -> Sequence[str]:
        return COLUMNS if self.sets else TIMES


def lost_f1(found: Sequence[Row]) -> list[Panel]:
    """F1, exact match and divergence by share; normalised F1 (eq. 11) of sets in which full reuse loses some."""
    reuse = [r for r in found if r["part"] == "sweep" and r["strategy"] == "naive"]
    loses = {r["set"] for r in reuse if r["f1_minus_full_hi"] is not None and r["f1_minus_full_hi"] < 0}
    return [
        *by_ratio("normalised_f1")([r for r in found if r["set"] in loses]),
        *by_ratio("f1", "em", "kl")([r for r in found if r["set"] != "pooled"]),
    ]


def times(found: Sequence[Row]) -> list[Panel]:
    """Bars by share, loading at the bottom; full attention last."""

    def panel(axes: Any, state: str) -> None:
        mine = [r for r in found if (r["strategy"], r["state"]) == ("fusion", state) or r["strategy"] == "full"]
        mine.sort(key=lambda r: r["strategy"] == "full")
        names = ["full" if r["ratio"] is None else f"{r['ratio']:.0%}" for r in mine]
        load = [r["load_ms"] for r in mine]
        axes.bar(names, load, label="KV loaded")
        drawn = axes.bar(names, [r["ttft_ms"] - r["load_ms"] for r in mine], bottom=load, label="the rest")
        axes.bar_label(drawn, [f"{r['faster_than_full']:.1f} x" for r in mine], fontsize=7)
        label(axes, f"KV in {state} memory", "share recomputed", "time to first token, ms")

    return [partial(panel, state=state) for state in ("device", "host")]


FIGURES: Mapping[str, Figure] = {
    "fusionrag_13": Figure(
        "FusionRAG, Figure 13",
        "F1, normalised where full reuse loses any, exact match, and divergence, by recomputed share",
        "SmolLM2-135M instead of models of 7B to 32B; hotpotqa and nq_open; few questions",
        lost_f1, ("hotpotqa", "nq_open"), ("blend", "craft", "fusion", "anchor"), ratios=(0.0, 0.05, 0.1),
    ),
    "fusionrag_14a": Figure(
        "FusionRAG, Figure 14a", "time to first token by recomputed share",
        "SmolLM2-135M on two cores; 2K tokens instead of 27K; host memory is the device's memory", times, limit=7,
    ),
    "fusionrag_16": Figure(
        "FusionRAG, Figure 16", "selections of 15% without and with preprocessing",
        "SmolLM2-135M; nq_open for TriviaQA, hotpotqa; divergence and ROUGE-L against full attention instead of F1",
        lambda found: list(selections("kl", "rougeL_vs_full")(found)), ("nq_open", "hotpotqa"),
        ("blend", "fusion+blend", "craft", "fusion+craft", "fusion"),
    ),
    "fusionrag_17": Figure(
        "FusionRAG, Figure 17", "divergence by the number of neighbours that chunks are preprocessed behind",
        "SmolLM2-135M; nq_open for TriviaQA, hotpotqa; divergence from full attention instead of F1",
        lambda found: list(by_neighbours("kl", "rougeL_vs_full")(found)), ("nq_open", "hotpotqa"), ("fusion",),
        ratios=(0.0,), neighbours=(0, 1, 5, 15),
    ),
    "cachecraft_20": Figure(
        "Cache-Craft, Figure 20", "ROUGE-L against full recomputation's answers by recomputed share",
        "SmolLM2-135M; hotpotqa and squad_xquad_en; answers of 24 tokens",
        lambda found: list(against_cost("rougeL_vs_full", "kl")([r for r in found if r["set"] != "pooled"])),
        ("hotpotqa", "squad_xquad_en"), ("prefix", "set-cache", "random", "h2o", "craft"), ratio=0.3,
        ratios=(0.15, 0.6), max_tokens=24, limit=20,
    ),
}  # fmt: skip

ELSEWHERE: Mapping[str, str] = {
    "FusionRAG 8": "quality --deviation N --plot DIR", "FusionRAG 15": "load --figure fusionrag_15",
    "FusionRAG 18": "quality --neighbours 10,0 --plot DIR", "Cache-Craft 6": "characterise --plot FILE.png",
    "Cache-Craft 15, Table 3": "quality --plot DIR", "Cache-Craft 22": "load --figure cachecraft_22",
    "Cache-Craft 24": "load --figure cachecraft_24", "Cache-Craft 29": "preload --plot DIR",
    "Cache-Craft Table 1": "quality --rivals map-reduce,llmlingua-2", "RAGCache 2 to 4": "cost --out FILE",
    "RAGCache 5, 6": "characterise --encoder --plot FILE.png",
    "RAGCache 13 to 16, 18": "load --figure ragcache_13 (ragcache_14, ...)", "RAGCache 19, Table 3": "speculate",
    "DepCache 4": "characterise --plot FILE.png", "DepCache 11": "load --figure depcache_11",
    "DepCache 13": "policies --orders --plot FILE.png",
}  # fmt: skip
KEPT = ("FusionRAG 3, 7a", "Cache-Craft 7, 8, 12, 14, 16, 17, 21, 25, 26, 27")
"""Figures whose results and pictures are kept, while the code that measured them is not."""


def answers(figure: Figure, chosen: Namespace, samples: Samples) -> list[Row]:
    known = all_strategies()
    selective = frozenset(name for name, s in known.items() if s.selective)
    main = main_settings(figure.strategies, selective, figure.ratio, NEIGHBOURS)
    neighbours = figure.neighbours[: 2 if chosen.quick else None]
    sweep = sweep_settings(main, figure.ratios, neighbours) if figure.ratios or neighbours else []
    measured: dict[str, list[Question]] = {}
    sets = figure.sets[: 1 if chosen.quick else None]
    progress = Progress(chosen.limit * len(sets))
    with opened(chosen.model, chosen.dtype, known, ahead=False) as engine:
        for name in sets:
            work = Evaluation(
                engine, dataset.load(chosen.data, name), chosen.limit, packaged_encoder(),
                Style(max_tokens=figure.max_tokens), known, fuse_all,
                whole_corpus=not chosen.quick,
            )  # fmt: skip
            swept = len(work.questions) if sweep else 0
            measured[name] = measure(work, main, sweep, samples, progress, swept=swept)
    return list(rows(measured, main, sweep, chosen.model))


@dataclass(frozen=True)
class Case:
    """A timed setting, and where its KV lies."""

    strategy: str
    ratio: float | None = None
    state: str = "device"


CASES = (
    Case("full"),
    *(Case("fusion", ratio, state) for state in ("device", "host") for ratio in (0.0, 0.05, 0.1, 0.15, 0.3, 0.5)),
)


def timed(engine: Engine, runs: int) -> list[Row]:
    work = workload(engine.tokenizer)
    todo = jobs(work.prompt)
    engine.answer_prompt(work.before, strategy="naive", max_tokens=1)
    digests = fuse_all(engine, todo)
    prompt = marked(work.prompt, {job.chunk.id: digest for job, digest in zip(todo, digests, strict=True)})
    found: dict[Case, list[dict[str, float]]] = {case: [] for case in CASES}
    progress = Progress((runs + 1) * len(CASES))
    for run in range(runs + 1):
        for case in CASES:
            if case.state == "host":
                engine.vacate_device()
            time.sleep(PAUSE)
            answer = engine.answer_prompt(
                prompt, strategy=case.strategy, recompute_ratio=case.ratio, max_tokens=1, tenant=f"{run}/{case}"
            )
            progress.step(f"{case.strategy} {case.ratio}, {case.state}")
            if run:
                timings = {"ttft_ms": answer.timings.ttft, "load_ms": answer.timings.load}
                found[case].append(timings | {"context_tokens": answer.prompt_tokens})
    return timed_rows(found)


def timed_rows(found: Mapping[Case, Sequence[Mapping[str, float]]]) -> list[Row]:
    """found: a sample for each run of a case, `full` first."""
    full = np.array([s["ttft_ms"] for s in found[CASES[0]]])
    made: list[Row] = []
    for case, samples in found.items():
        mine = np.array([s["ttft_ms"] for s in samples])
        made.append({
            **vars(case), "n": len(samples), **{key: float(np.median([s[key] for s in samples])) for key in samples[0]},
            "slowest_ms": float(mine.max()), "faster_than_full": float(np.median(full / mine)),
        })  # fmt: skip
    return made


def options(flags: Parser) -> None:
    what = flags.add_mutually_exclusive_group(required=True)
    what.add_argument("--figure", choices=tuple(FIGURES), metavar="NAME", help="which figure (--list names them)")
    what.add_argument("--list", action="store_true", help="say which figures there are, and measure nothing")
    flags.add("--data", type=report.existing_folder, metavar="DIR", help="a folder with text/SET/questions.jsonl")
    flags.add("--limit", type=integer(1), metavar="N", help="questions a set (the figure's own)")
    flags.add("--rows", type=report.existing_file, metavar="FILE", help="draw the rows of a stored report")
    flags.add("--plot", type=report.writable, metavar="FILE.png", help="also draw the figure")


def check(flags: Parser, chosen: Namespace) -> None:
    if chosen.list:
        return
    figure = FIGURES[chosen.figure]
    if chosen.rows is not None:
        if chosen.plot is None or any((chosen.data, chosen.limit, chosen.json, chosen.quick)):
            flags.error("--rows goes with --figure and --plot alone: it measures nothing")
    elif figure.sets and chosen.data is None:
        flags.error(f"{chosen.figure} reads questions: give --data DIR, or --rows FILE with a stored report")
    elif not figure.sets and chosen.data is not None:
        flags.error(f"{chosen.figure} reads no data: leave out --data")
    chosen.limit = chosen.limit or (2 if chosen.quick else figure.limit)


def measured(chosen: Namespace, session: Session) -> Sequence[Row]:
    figure = FIGURES[chosen.figure]
    if figure.sets:
        return answers(figure, chosen, session.samples())
    with Engine.load(
        chosen.model, strategy="fusion", dtype=chosen.dtype, device_cache_gb=2.0, compile=False,
        storage=StorageOptions(host_gb=2.0),
    ) as engine:  # fmt: skip
        return timed(engine, chosen.limit)


def show(found: Sequence[Row], chosen: Namespace) -> None:
    figure = FIGURES[chosen.figure]
    print(f"\n{figure.paper}: {figure.shows}\nnot as in the paper: {figure.differs}")
    if chosen.plot is not None:
        draw(figure, found, chosen.plot)


def draw(figure: Figure, found: Sequence[Row], file: Path) -> None:
    panels = figure.panels(found)
    if not panels:
        raise ConfigError(f"the rows have nothing for {figure.paper}")
    plot.save(panels, file, f"{figure.paper}: {figure.shows}" if len(panels) > 1 else figure.paper)


def redraw(chosen: Namespace) -> int:
    try:
        draw(FIGURES[chosen.figure], json.loads(chosen.rows.read_text(encoding="utf-8"))["rows"], chosen.plot)
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        print(f"error: {chosen.rows} is no report of {chosen.figure}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def listing() -> str:
    lines = ["python -m benchmarks.figures --figure NAME:"]
    lines += [f"  {name:<14} {figure.paper}: {figure.shows}" for name, figure in FIGURES.items()]
    lines += ["", "other commands:"]
    lines += [f"  {name:<23} python -m benchmarks.{command}" for name, command in ELSEWHERE.items()]
    return "\n".join([*lines, "", f"results are kept in docs/figures.md: {'; '.join(KEPT)}"])


BENCHMARK = Benchmark(
    "figures", __doc__, lambda chosen: FIGURES[chosen.figure].columns, measured, options, model=True, check=check,
    show=show,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = BENCHMARK.parse(arguments)
    if chosen.list:
        print(listing())
        return 0
    return BENCHMARK.main(arguments) if chosen.rows is None else redraw(chosen)


if __name__ == "__main__":
    sys.exit(main())
