"""The settings that `quality` measures, and the rows that it makes of their samples."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.common.samples import Progress, Samples
from benchmarks.quality.evaluation import FULL, FUSED, NAIVE, Evaluation, Setting
from benchmarks.quality.judge import Judge
from benchmarks.quality.score import Bootstrap, normalised_f1
from ragjax.core import StorageOptions
from ragjax.engine import Engine
from ragjax.reuse.base import Strategy

METRICS = (
    *(
        "kl", "top1", "em", "f1", "answered", "grounded", "rougeL", "rougeL_vs_full", "jaccard_vs_full",
        "recomputed_share",
    ),
    *("ttft_ms", "load_ms", "prompt_tokens"),
)  # fmt: skip
CHOICE = ("accuracy", "accuracy_sum", "right_p")  # metrics of questions with a choice

Question = Mapping[str, Mapping[str, Any]]  # one question's samples by setting


def main_settings(strategies: Sequence[str], selective: frozenset[str], ratio: float, neighbours: int) -> list[Setting]:
    """What is measured on every question; the references first."""
    named = (
        Setting(name, ratio if name in selective else None, neighbours if name in FUSED else 0) for name in strategies
    )
    return list(dict.fromkeys([FULL, NAIVE, *named]))


def sweep_settings(main: Sequence[Setting], ratios: Sequence[float]) -> list[Setting]:
    """What is measured on the first questions besides: other ratios."""
    selective = [s for s in main if s.ratio is not None]
    others = [replace(s, ratio=ratio) for ratio in ratios for s in selective]
    return [s for s in dict.fromkeys(others) if s not in main]


def rows(
    measured: Mapping[str, Sequence[Question]], main: Sequence[Setting], sweep: Sequence[Setting], model: str
) -> list[dict[str, Any]]:
    groups = {name: [(question, name) for question in found] for name, found in measured.items()}
    if len(groups) > 1:
        groups["pooled"] = [pair for pairs in groups.values() for pair in pairs]
    made = []
    for name, pairs in groups.items():
        first = [pair for pair in pairs if sweep and all(s.key in pair[0] for s in sweep)]
        made += [row(name, "main", setting, pairs, main, model) for setting in main if pairs]
        made += [row(name, "sweep", setting, first, main, model) for setting in (*main, *sweep) if first]
    return made


def row(
    name: str, part: str, setting: Setting, pairs: Sequence[tuple[Question, str]], main: Sequence[Setting], model: str
) -> dict[str, Any]:
    """One setting's means over questions, with intervals; `pairs` are questions and the sets they come from."""
    questions = [q for q, _ in pairs]
    bootstrap = Bootstrap([g for _, g in pairs])

    def values(of: Setting, metric: str) -> list[float]:
        return [float(q[of.key][metric]) for q in questions]

    made: dict[str, Any] = {
        "set": name, "part": part, "model": model, "strategy": setting.strategy, "ratio": setting.ratio,
        "neighbours": setting.neighbours if setting.strategy in FUSED else None, "n": len(questions),
    }  # fmt: skip
    for metric in METRICS:
        made |= bootstrap.mean(values(setting, metric)).columns(metric)
    f1s, full = values(setting, "f1"), values(FULL, "f1")
    recovered, why_not = normalised_f1(bootstrap, f1s, full, values(NAIVE, "f1"))
    made |= recovered.columns("normalised_f1") | {"normalised_f1_note": why_not}
    made |= bootstrap.difference(f1s, full).columns("f1_minus_full")
    fusion = next((s for s in main if s.strategy == "fusion"), None)
    if fusion is not None:
        beside = replace(fusion, ratio=fusion.ratio if setting.ratio is None else setting.ratio)
        if all(beside.key in q for q in questions):
            mine, theirs = values(setting, "kl"), values(beside, "kl")
            made |= bootstrap.difference(mine, theirs).columns("kl_minus_fusion")
            made |= bootstrap.ratio(mine, theirs).columns("kl_over_fusion")
    return made | optional(setting, pairs)


def optional(setting: Setting, pairs: Sequence[tuple[Question, str]]) -> dict[str, Any]:
    """Columns of what only some questions have: a choice, an answer that the judge could judge."""
    made: dict[str, Any] = {}
    for metric, count in (*((name, "chosen") for name in CHOICE), ("faithful", "judged")):
        both = [(q, g) for q, g in pairs if all(q[s.key].get(metric) is not None for s in (setting, FULL))]
        if not both:
            continue
        bootstrap = Bootstrap([g for _, g in both])
        mine, full = ([float(q[s.key][metric]) for q, _ in both] for s in (setting, FULL))
        made |= {count: len(both), **bootstrap.mean(mine).columns(metric)}
        made |= bootstrap.difference(mine, full).columns(f"{metric}_minus_full")
        if metric == "accuracy":
            made["options"] = float(np.mean([q[setting.key]["options"] for q, _ in both]))
    return made


def verdicts(made: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the methods promise, cell by cell: fusion's KL at most half of blend's and craft's, `anchor` below fusion,
    and 80% of the F1 that full reuse loses recovered over all sets.
    """
    found = []
    pooled = "pooled" if any(r["set"] == "pooled" for r in made) else None
    for r in made:
        if r["part"] != "main":
            continue
        over = r.get("kl_over_fusion")
        if r["strategy"] in ("blend", "craft") and over is not None:
            found.append(_verdict(r, "fusion's KL is at most half", over, over >= 2, "kl_over_fusion"))
        if r["strategy"] == "anchor" and over is not None:
            found.append(_verdict(r, "KL is below fusion's", over, over < 1, "kl_over_fusion"))
        normalised = r["normalised_f1"]
        if r["strategy"] in ("fusion", "anchor") and r["set"] == (pooled or r["set"]) and normalised is not None:
            found.append(_verdict(r, "recovers 80% of F1", normalised, normalised >= 0.8, "normalised_f1"))
    return found


def _verdict(r: Mapping[str, Any], claim: str, value: float, holds: bool, key: str) -> dict[str, Any]:
    interval = {"lo": r.get(f"{key}_lo"), "hi": r.get(f"{key}_hi")}
    return {"set": r["set"], "strategy": r["strategy"], "claim": claim, "value": value, **interval, "holds": str(holds)}


VARIANTS = 100_000  # no limit: every chunk of the evaluated questions is to have one


def measure(
    work: Evaluation,
    main: Sequence[Setting],
    sweep: Sequence[Setting],
    samples: Samples,
    progress: Progress,
    *,
    swept: int = 0,
    judged_by: Judge | None = None,
) -> list[Question]:
    """Samples of every question of a set: `main` on all, `sweep` on the first `swept`."""
    plans = [[*main, *(sweep if i < swept else ())] for i in range(len(work.questions))]
    keys = {(q.id, s): f"{work.name}/{q.id}/{s.key}" for q, p in zip(work.questions, plans, strict=True) for s in p}
    waiting = [
        [s for s in plan if samples.get(keys[q.id, s]) is None] for q, plan in zip(work.questions, plans, strict=True)
    ]
    if any(waiting):
        everything = [*main, *(sweep if swept else ())]
        with tqdm(desc=f"{work.name}: past requests", unit="request") as bar:
            for bar.n, bar.total in work.teach([s.strategy for s in everything]):
                bar.refresh()
        work.warm_up(everything)
    for question, settings in zip(work.questions, waiting, strict=True):
        if not settings:
            progress.skip()
            continue
        for setting, sample in work.measure(question, settings):
            if setting in settings:
                if judged_by is not None:
                    sample["faithful"] = judged_by.faithful(question, sample["text"])
                samples.put(keys[question.id, setting], sample)
        progress.step(f"{work.name}: {question.id}")
    return [
        {s.key: found for s in plan if (found := samples.get(keys[q.id, s])) is not None}
        for q, plan in zip(work.questions, plans, strict=True)
    ]


@contextmanager
def opened(
    model: str,
    dtype: str,
    strategies: Mapping[str, Strategy] | None = None,
    *,
    device_gb: float = 2.0,
    disk_gb: float = 24.0,
    ahead: bool = True,
) -> Iterator[Engine]:
    """An engine whose disk tier is gone afterwards.

    strategies: None: those of the model. device_gb, disk_gb: KV on the device and on disk, 2^30
    bytes. ahead: compile all programs now; False: when they are first used, for short runs in
    which nothing is timed.
    """
    # fusion's programs are most of what others need
    first = "fusion" if strategies is None or "fusion" in strategies else next(iter(strategies))
    with tempfile.TemporaryDirectory(prefix="ragjax-quality-") as folder:
        storage = StorageOptions(disk=folder, disk_gb=disk_gb, variants=VARIANTS)
        with Engine.load(
            model,
            strategy=first,
            dtype=dtype,
            device_cache_gb=device_gb,
            storage=storage,
            compile=ahead,
            strategies=None if strategies is None else dict(strategies),
        ) as engine:
            yield engine


MARGIN = 0.02
LEAST, FEWEST = math.ceil(3 / MARGIN), 30  # questions for a setting to be not inferior, and for any verdict
NOT_INFERIOR, INFERIOR, UNKNOWN = "not inferior", "inferior", "cannot tell"

Row = Mapping[str, Any]


def verdict(row: Row) -> str:
    lo, hi = row["accuracy_minus_full_lo"], row["accuracy_minus_full_hi"]
    if lo > -MARGIN and row["chosen"] >= LEAST:
        return NOT_INFERIOR
    return INFERIOR if hi < -MARGIN and row["chosen"] >= FEWEST else UNKNOWN


def needed(row: Row) -> int | None:
    """About how many questions would show that it is not inferior, if its difference is what it seems to be.

    None if the difference itself is two points or more.
    """
    value, lo = float(row["accuracy_minus_full"]), float(row["accuracy_minus_full_lo"])
    if value <= -MARGIN:
        return None
    return max(LEAST, math.ceil(int(row["chosen"]) * ((value - lo) / (value + MARGIN)) ** 2))


def smallest(made: Sequence[Row]) -> list[dict[str, Any]]:
    """A row for each set and strategy: the smallest ratio that is not inferior, or what the largest one shows.

    Ratios are those of the sweep where there is one. `ratio` is None for a strategy that takes none.
    """
    swept = {r["set"] for r in made if r["part"] == "sweep"}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in made:
        if row["part"] == ("sweep" if row["set"] in swept else "main") and "accuracy_minus_full" in row:
            groups.setdefault((row["set"], row["strategy"]), []).append(row)
    found = []
    for (name, strategy), rows in groups.items():
        if strategy == "full":
            continue
        by_ratio = sorted(rows, key=lambda r: -1.0 if r["ratio"] is None else r["ratio"])
        shown = next((r for r in by_ratio if verdict(r) == NOT_INFERIOR), by_ratio[-1])
        difference = {key: shown[key] for key in shown if key.startswith("accuracy_minus_full")}
        found.append({
            "set": name, "strategy": strategy, "ratio": shown["ratio"], "verdict": verdict(shown),
            "chosen": shown["chosen"], **difference, "needed": needed(shown),
        })  # fmt: skip
    return found
