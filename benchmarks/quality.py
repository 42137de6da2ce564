"""How close each strategy's answers come to full attention's, and to the references, at equal shares recomputed.

    python -m benchmarks.quality --data DIR [--sets a,b] [--strategies a,b] [--ratios 0.15,0,0.05] [--limit N]
        [--sweep N] [--deviation N] [--triviaqa FILE] [--model NAME_OR_PATH] [--plot DIR] [--quick] [--json FILE]

Each question is asked over its own passages, as chat requests are. Distributions are compared over the positions that
predict the first 12 tokens of the first reference answer (`kl` in nats, `top1`); then up to 24 tokens are generated,
greedily. Selective strategies recompute 15% of the chunks' tokens on every question; the other ratios of --ratios
follow on the first --sweep questions (rows of part "sweep", which repeat 15% on those questions), and other numbers of
neighbours of --neighbours too (part "neighbours", strategy fusion; 0 is its selection without its preprocessing).

Neighbours come from the whole corpus of a set by the packaged encoder. Cache-Craft's chunks come from past requests: a
passage of the evaluated questions and four of its ten nearest, in random order, until every passage has stood in one
(`--craft-history`). Those never hold an evaluated prompt. KV is warm before anything is timed; KV that does not fit on
the device waits on disk, in the engine's dtype, until the set is done.

Intervals are 95% paired bootstrap intervals over questions (2,000 resamples, sets kept in proportion in "pooled" rows);
`kl_over_fusion` and `kl_minus_fusion` compare with fusion at the same ratio. `normalised_f1` is FusionRAG's equation 11
as a ratio of sums over questions, undefined where full attention is no better than full reuse. `answered` is the share
of answers that hold a reference. Other programs on the machine disturb `ttft_ms` and nothing else.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
from tqdm import tqdm

from benchmarks import dataset, plot_quality, report, rival
from benchmarks.dataset import QuestionSet
from benchmarks.evaluation import FULL, FUSED, NAIVE, Evaluation, Setting, Style
from benchmarks.score import Bootstrap, normalised_f1
from benchmarks.similarity import History, TextEncoder
from benchmarks.ttft import code_digest
from ragjax.commands.preprocess import fuse_all
from ragjax.core import ConfigError, StorageOptions
from ragjax.engine import Engine
from ragjax.reuse import DEPENDENCY
from ragjax.reuse import strategies as all_strategies
from ragjax.reuse.base import Strategy

MODEL = "smollm2-135m-instruct"
RATIO = 0.15
"""Share that every selective strategy recomputes on every question; both papers' setting."""

RATIOS = "0,0.05,0.1,0.15,0.3,1"
LIMIT, SWEEP = 100, 25
VARIANTS = 100_000
"""No limit: every chunk of the evaluated questions is to have one."""
QUICK_SET, QUICK_LIMIT = "hotpotqa", 2

METRICS = ("kl", "top1", "em", "f1", "answered", "rougeL", "rougeL_vs_full", "jaccard_vs_full", "recomputed_share")
METRICS += ("ttft_ms", "load_ms", "prompt_tokens")
LISTS = ("deviation_k", "deviation_v", "place_in_chunk", "place_of_chunk")
COLUMNS = (
    "set", "part", "strategy", "ratio", "neighbours", "n", "kl", "kl_lo", "kl_hi", "kl_over_fusion", "top1", "em", "f1",
    "answered", "rougeL", "rougeL_vs_full", "jaccard_vs_full", "normalised_f1", "normalised_f1_lo", "normalised_f1_hi",
    "recomputed_share", "ttft_ms",
)  # fmt: skip

Question = Mapping[str, Mapping[str, Any]]
"""One question's samples by setting."""


# ---------------------------------------------------------------------------------------- settings


def main_settings(strategies: Sequence[str], selective: frozenset[str], ratio: float, neighbours: int) -> list[Setting]:
    """What is measured on every question; the references first."""
    named = (
        Setting(name, ratio if name in selective else None, neighbours if name in FUSED else 0) for name in strategies
    )
    return list(dict.fromkeys([FULL, NAIVE, *named]))


def sweep_settings(main: Sequence[Setting], ratios: Sequence[float], neighbours: Sequence[int]) -> list[Setting]:
    """What is measured on the first questions besides: other ratios, and fusion behind other numbers of neighbours."""
    selective = [s for s in main if s.ratio is not None]
    others = [replace(s, ratio=ratio) for ratio in ratios for s in selective]
    fusion = [s for s in selective if s.strategy == "fusion"]
    others += [replace(s, neighbours=n, ratio=ratio) for n in neighbours for s in fusion for ratio in (0.0, s.ratio)]
    return [s for s in dict.fromkeys(others) if s not in main]


# ------------------------------------------------------------------------------------- measurement


def measure(
    work: Evaluation,
    main: Sequence[Setting],
    sweep: Sequence[Setting],
    samples: report.Samples,
    progress: report.Progress,
    *,
    swept: int = 0,
    deviations: int = 0,
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
    for i, (question, settings) in enumerate(zip(work.questions, waiting, strict=True)):
        if not settings:
            progress.skip()
            continue
        for setting, sample in work.measure(question, settings, deviations=i < deviations):
            if setting in settings:
                samples.put(keys[question.id, setting], sample)
        progress.step(f"{work.name}: {question.id}")
    return [
        {s.key: found for s in plan if (found := samples.get(keys[q.id, s])) is not None}
        for q, plan in zip(work.questions, plans, strict=True)
    ]


# -------------------------------------------------------------------------------------------- rows


def rows(
    measured: Mapping[str, Sequence[Question]], main: Sequence[Setting], sweep: Sequence[Setting], model: str
) -> list[dict[str, Any]]:
    """A row for each set, part and setting, and over all sets together."""
    groups = {name: [(question, name) for question in found] for name, found in measured.items()}
    if len(groups) > 1:
        groups["pooled"] = [pair for pairs in groups.values() for pair in pairs]
    made = []
    for name, pairs in groups.items():
        first = [pair for pair in pairs if sweep and all(s.key in pair[0] for s in sweep)]
        for part, settings in parts(main, sweep).items():
            chosen = pairs if part == "main" else first
            made += [row(name, part, setting, chosen, main, model) for setting in settings if chosen]
    return made


def parts(main: Sequence[Setting], sweep: Sequence[Setting]) -> dict[str, list[Setting]]:
    """The settings of each part of the report; those of the sweep stand beside the main ones they belong to."""
    kinds = {(s.strategy, s.neighbours) for s in main}
    swept = [s for s in sweep if (s.strategy, s.neighbours) in kinds]
    others = [s for s in sweep if (s.strategy, s.neighbours) not in kinds]
    found = {"main": list(main)}
    if swept:
        found["sweep"] = [*main, *swept]
    if others:
        found["neighbours"] = [FULL, NAIVE, *(s for s in (*main, *swept) if s.strategy == "fusion"), *others]
    return found


def row(
    name: str, part: str, setting: Setting, pairs: Sequence[tuple[Question, str]], main: Sequence[Setting], model: str
) -> dict[str, Any]:
    """One setting's means over questions, with intervals; `pairs` are questions and the sets they come from."""
    questions = [q for q, _ in pairs]
    bootstrap = Bootstrap([g for _, g in pairs])

    def values(of: Setting, metric: str) -> list[float]:
        return [float(q[of.key][metric]) for q in questions]

    made: dict[str, Any] = {
        "set": name,
        "part": part,
        "model": model,
        "strategy": setting.strategy,
        "ratio": setting.ratio,
        "neighbours": setting.neighbours if setting.strategy in FUSED else None,
        "n": len(questions),
    }
    for metric in METRICS:
        made |= bootstrap.mean(values(setting, metric)).columns(metric)
    f1s, full = values(setting, "f1"), values(FULL, "f1")
    made |= normalised_f1(bootstrap, f1s, full, values(NAIVE, "f1")).columns("normalised_f1")
    made |= bootstrap.difference(f1s, full).columns("f1_minus_full")
    fusion = next((s for s in main if s.strategy == "fusion"), None)
    if fusion is not None:
        beside = replace(fusion, ratio=fusion.ratio if setting.ratio is None else setting.ratio)
        if all(beside.key in q for q in questions):
            mine, theirs = values(setting, "kl"), values(beside, "kl")
            made |= bootstrap.difference(mine, theirs).columns("kl_minus_fusion")
            made |= bootstrap.ratio(mine, theirs).columns("kl_over_fusion")
    for key in LISTS:
        found = [q[setting.key][key] for q in questions if key in q[setting.key]]
        if found:
            made[key] = [float(x) for x in np.mean(found, axis=0)]
    return made


def verdicts(made: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the methods promise, cell by cell: fusion's KL at most half of blend's and craft's, `ragjax` below fusion,
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
        if r["strategy"] == "ragjax" and over is not None:
            found.append(_verdict(r, "KL is below fusion's", over, over < 1, "kl_over_fusion"))
        normalised = r["normalised_f1"]
        if r["strategy"] in ("fusion", "ragjax") and r["set"] == (pooled or r["set"]) and normalised is not None:
            found.append(_verdict(r, "recovers 80% of F1", normalised, normalised >= 0.8, "normalised_f1"))
    return found


def _verdict(r: Mapping[str, Any], claim: str, value: float, holds: bool, key: str) -> dict[str, Any]:
    interval = {"lo": r.get(f"{key}_lo"), "hi": r.get(f"{key}_hi")}
    return {"set": r["set"], "strategy": r["strategy"], "claim": claim, "value": value, **interval, "holds": str(holds)}


# ------------------------------------------------------------------------------------ command line


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    flags = report.parser("quality", (__doc__ or "").partition("\n")[0])
    add = flags.add_argument
    add("--data", type=Path, metavar="DIR", help="a folder with text/SET/questions.jsonl")
    add("--sets", metavar="A,B", help=f"sets of the folder ({','.join(dataset.SETS)}; {QUICK_SET} with --quick)")
    add("--triviaqa", type=Path, metavar="FILE", help="also a file in TriviaQA's format, with the text of its evidence")
    add("--model", default=MODEL, metavar="NAME_OR_PATH", help="model (%(default)s)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of weights and KV (%(default)s)")
    add("--strategies", metavar="A,B", help="strategies besides full and naive (all)")
    add("--rivals", metavar="A,B", default="", help=f"rivals that shorten passages: {', '.join(rival.RIVALS)} (none)")
    add("--ratios", default=RATIOS, metavar="R,R", help="recomputed shares (%(default)s; 0.15 alone with --quick)")
    add("--neighbours", default="10", metavar="N,N", help="neighbours of fused chunks, the default first (%(default)s)")
    add("--limit", type=int, metavar="N", help=f"questions a set ({LIMIT}; {QUICK_LIMIT} with --quick)")
    add("--sweep", type=int, default=SWEEP, metavar="N", help="questions a set for the other ratios (%(default)s)")
    add("--deviation", type=int, default=0, metavar="N", help="questions a set whose KV is compared too (%(default)s)")
    add("--max-tokens", type=int, default=24, metavar="N", help="tokens generated (%(default)s)")
    add("--instruction", metavar="TEXT", help="system message (ragjax's own)")
    add("--craft-history", default="similar", choices=get_args(History), help="past requests (%(default)s)")
    add("--device-cache-gb", type=float, default=2.0, metavar="GB", help="KV on the device (%(default)s)")
    add("--disk-cache-gb", type=float, default=24.0, metavar="GB", help="KV on disk, for a while (%(default)s)")
    add("--plot", type=Path, metavar="DIR", help="also draw the papers' figures")
    chosen = flags.parse_args(arguments)
    if chosen.data is None and chosen.triviaqa is None:
        flags.error("give --data, --triviaqa or both")
    if chosen.data is not None and not chosen.data.is_dir():
        flags.error(f"no such folder: {chosen.data}")
    if chosen.limit is None:
        chosen.limit = QUICK_LIMIT if chosen.quick else LIMIT
    _at_least(flags, "--limit", 1, chosen.limit)
    _at_least(flags, "--sweep", 0, chosen.sweep)
    _at_least(flags, "--deviation", 0, chosen.deviation)
    chosen.ratios = _numbers(flags, "--ratios", chosen.ratios, float, 1.0)
    chosen.neighbours = _numbers(flags, "--neighbours", chosen.neighbours, int, 100)
    if chosen.quick:
        chosen.ratios, chosen.sweep = [RATIO], 0
    names = chosen.sets or (QUICK_SET if chosen.quick else ",".join(dataset.SETS))
    chosen.sets = names.split(",") if chosen.data is not None else []
    return chosen


def _at_least(flags: argparse.ArgumentParser, name: str, least: int, value: int) -> None:
    if value < least:
        flags.error(f"{name} must be at least {least}, not {value}")


def _numbers(flags: argparse.ArgumentParser, name: str, text: str, kind: Any, most: float) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = [-1]
    if not all(0 <= number <= most for number in found):
        flags.error(f"{name} takes numbers from 0 to {most:g}, separated by commas, not {text!r}")
    return list(dict.fromkeys(found))


@contextmanager
def opened(chosen: argparse.Namespace, strategies: dict[str, Strategy]) -> Iterator[Engine]:
    """An engine whose disk tier is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ragjax-quality-") as folder:
        storage = StorageOptions(disk=folder, disk_gb=chosen.disk_cache_gb, variants=VARIANTS)
        with Engine.load(
            chosen.model,
            strategy="fusion",  # whose programs are most of what others need
            dtype=chosen.dtype,
            device_cache_gb=chosen.device_cache_gb,
            storage=storage,
            strategies=strategies,
        ) as engine:
            yield engine


def packaged_encoder() -> TextEncoder:
    """The sentence encoder that requests use."""
    from ragjax.engine.build import ENCODER
    from ragjax.models.encoder import Encoder
    from ragjax.models.hub import resolve

    return Encoder.load(resolve(ENCODER).path)


def run(chosen: argparse.Namespace, samples: report.Samples, encoder: TextEncoder) -> list[dict[str, Any]]:
    """Measure all sets; the rows."""
    known = all_strategies()
    wanted = chosen.strategies.split(",") if chosen.strategies else [n for n in known if n not in DEPENDENCY]
    rivals = list(filter(None, chosen.rivals.split(",")))
    _check("strategy", wanted, known)
    _check("rival", rivals, rival.RIVALS)
    selective = frozenset(name for name, s in known.items() if s.selective) | frozenset(rivals)
    ratio = RATIO if RATIO in chosen.ratios else chosen.ratios[0]
    main = main_settings([*wanted, *rivals], selective, ratio, chosen.neighbours[0])
    sweep = sweep_settings(main, chosen.ratios, chosen.neighbours[1:]) if chosen.sweep else []
    sets: list[QuestionSet] = [dataset.load(chosen.data, name) for name in chosen.sets]
    if chosen.triviaqa is not None:
        sets.append(dataset.triviaqa(chosen.triviaqa))
    style = Style(chosen.instruction, chosen.max_tokens, chosen.craft_history)
    measured: dict[str, list[Question]] = {}
    progress = report.Progress(sum(min(chosen.limit, len(questions.questions)) for questions in sets))
    for questions in sets:
        with opened(chosen, known) as engine:
            work = Evaluation(
                engine,
                questions,
                chosen.limit,
                encoder,
                style,
                known,
                partial(fuse_all, progress=False),
                [rival.RIVALS[name](engine) for name in rivals],
                whole_corpus=not chosen.quick,
            )
            if work.left_out:
                print(f"{work.name}: {work.left_out} questions are too long for the model", file=sys.stderr)
            progress.total -= min(chosen.limit, len(questions.questions)) - len(work.questions)
            measured[questions.name] = measure(
                work, main, sweep, samples, progress, swept=chosen.sweep, deviations=chosen.deviation
            )
    return rows(measured, main, sweep, chosen.model)


def _check(what: str, names: Sequence[str], known: Mapping[str, Any]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"unknown {what} {unknown[0]!r}; choose among {', '.join(known)}")


def settings_of(chosen: argparse.Namespace, head: report.Header) -> dict[str, Any]:
    """What a question's samples depend on: strategies, ratios and sets may be added to a stopped run."""
    kept = ("dtype", "limit", "max_tokens", "instruction", "craft_history", "quick", "data", "triviaqa")
    return {
        **{name: str(getattr(chosen, name)) for name in kept},
        "model": report.weights_of(chosen.model),
        "deviation": chosen.deviation,
        "machine": head.machine["cpu"],
        "versions": head.versions,
        "code": code_digest(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    chosen = options(arguments)
    made = report.sampled(
        "quality",
        COLUMNS,
        chosen.json,
        partial(settings_of, chosen),
        lambda samples: run(chosen, samples, packaged_encoder()),
    )
    if made is None:
        return 1
    claims = verdicts(made)
    if claims:
        print("\nwhat the methods promise (with their 95% intervals):")
        print(report.table(claims, tuple(claims[0])))
    if chosen.plot is not None:
        for file in plot_quality.draw(made, chosen.plot):
            print(f"wrote {file}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
