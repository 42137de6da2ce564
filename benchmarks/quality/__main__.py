"""How close each strategy's answers come to full attention's, and to the references, at equal shares recomputed.

Each question is asked over its own passages, as chat requests are. Distributions are compared over the positions that
predict the first 12 tokens of the first reference answer (`kl` in nats, `top1`); then up to 24 tokens are generated,
greedily. Selective strategies recompute 15% of the chunks' tokens on every question; the other ratios of --ratios
follow on the first --sweep questions (rows of part "sweep", which repeat 15% on those questions).

Neighbours come from the whole corpus of a set by the packaged encoder. Cache-Craft's chunks come from past requests: a
passage of the evaluated questions and four of its ten nearest, in random order, until every passage has stood in one.
Those never hold an evaluated prompt. KV is warm before anything is timed; KV that does not fit on the device waits on
disk, in the engine's dtype, until the set is done.

Intervals are 95% paired bootstrap intervals over questions (2,000 resamples, sets kept in proportion in "pooled" rows);
`kl_over_fusion` and `kl_minus_fusion` compare with fusion at the same ratio. `normalised_f1` is FusionRAG's equation 11
as a ratio of sums over questions, undefined (`normalised_f1_note` says so) unless the interval of full attention's F1
minus full reuse's lies above zero. `answered` is the share of answers that hold a reference, `grounded` the share of an
answer's words that occur in its passages. Other programs on the machine disturb `ttft_ms` and nothing else.

With --options N every question is also a multiple choice: `accuracy` is the share of questions whose right answer has
the highest log-probability a token of N options, `accuracy_sum` that of the sum, `right_p` the right answer's mean
probability among them (`benchmarks/quality/choice.py` says where options come from). The table "non-inferiority" gives
the smallest ratio at which a strategy is at most two points below full attention. Questions without passages (mmlu)
get the five most similar documents of --corpus. With --judge an endpoint judges each answer: `faithful` is the share of
its statements that its passages support, over the `judged` answers that have one.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.baseline.strategy import all_strategies
from benchmarks.common import report
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.common.samples import Progress, Samples, weights_of
from benchmarks.quality import dataset, judge
from benchmarks.quality.choice import choices
from benchmarks.quality.dataset import QuestionSet
from benchmarks.quality.evaluation import Evaluation, Style
from benchmarks.quality.judge import Judge
from benchmarks.quality.rows import Question, main_settings, measure, opened, rows, smallest, sweep_settings, verdicts
from benchmarks.quality.similarity import packaged_encoder, search_in
from ragjax.commands.flags import integer, share
from ragjax.retrieval.knowledge import TextEncoder
from ragjax.reuse import DEPENDENCY

RATIO = 0.15  # share that every selective strategy recomputes on every question; both papers' setting
RATIOS = "0,0.05,0.1,0.15,0.3,1"

COLUMNS = (
    "set", "part", "strategy", "ratio", "neighbours", "n", "kl", "kl_lo", "kl_hi", "kl_over_fusion", "top1", "em", "f1",
    "answered", "grounded", "faithful", "judged", "accuracy", "accuracy_lo", "accuracy_hi", "options", "rougeL",
    "rougeL_vs_full", "jaccard_vs_full", "normalised_f1", "normalised_f1_lo", "normalised_f1_hi", "normalised_f1_note",
    "recomputed_share", "ttft_ms",
)  # fmt: skip


def options(flags: Parser) -> None:
    known = all_strategies()
    everything = [name for name in known if name not in DEPENDENCY]
    add = flags.add
    add("--data", type=report.existing_folder, metavar="DIR", help="a folder with text/SET/questions.jsonl")
    add("--sets", type=report.listed, default=dataset.SETS, quick=["hotpotqa"], help="sets of the folder")
    add("--triviaqa", type=Path, metavar="FILE", help="also a file in TriviaQA's format, with the text of its evidence")
    add("--strategies", type=report.among(known, "strategy"), default=everything, metavar="A,B",
        help="strategies besides full and naive")  # fmt: skip
    add("--ratios", type=report.numbers(share), default=RATIOS, metavar="R,R", help="recomputed shares; 0.15: --quick")
    add("--neighbours", type=integer(1, 100), default=10, metavar="N", help="neighbours of fused chunks")
    add("--limit", type=integer(1), default=100, quick=2, metavar="N", help="questions a set")
    add("--sweep", type=integer(0), default=25, metavar="N", help="questions for the other ratios")
    add("--max-tokens", type=integer(1), default=24, metavar="N", help="tokens generated")
    add("--instruction", metavar="TEXT", help="system message (ragjax's own)")
    add("--device-cache-gb", type=float, default=2.0, metavar="GB", help="KV on the device")
    add("--disk-cache-gb", type=float, default=24.0, metavar="GB", help="KV on disk, for a while")
    add("--lazy", action="store_true", help="compile programs when first used: times mean nothing then, scores do")
    add("--options", type=integer(2, 8), metavar="N", help="also choose among N options (no choice)")
    add("--corpus", metavar="A,B", help="sets among whose passages questions without any find theirs")
    add("--judge", metavar="URL", help="OpenAI-compatible endpoint that judges answers, with its /v1")
    add("--judge-model", metavar="NAME", help="model that the judge shall use")
    add("--judge-key", metavar="VARIABLE", help="environment variable with its key (OPENAI_API_KEY, if set)")


def check(flags: Parser, chosen: Namespace) -> None:
    if chosen.data is None and chosen.triviaqa is None:
        flags.error("give --data, --triviaqa or both")
    if (chosen.judge is None) != (chosen.judge_model is None) or (chosen.judge_key and chosen.judge is None):
        flags.error("--judge and --judge-model belong together, and --judge-key to both")
    if chosen.corpus is not None and chosen.data is None:
        flags.error("--corpus names sets of --data")
    if chosen.quick:
        chosen.ratios, chosen.sweep = [RATIO], 0


def sets_of(chosen: Namespace, encoder: TextEncoder) -> list[QuestionSet]:
    """The sets asked for, with passages for questions that bring none if a corpus is named."""
    search = None
    if chosen.corpus is not None:
        corpora = [dataset.load(chosen.data, name).corpus for name in chosen.corpus.split(",")]
        search = search_in(list({d.id: d for corpus in corpora for d in corpus.values()}.values()), encoder)
    sets = [dataset.load(chosen.data, name, search) for name in (chosen.sets if chosen.data else ())]
    return sets if chosen.triviaqa is None else [*sets, dataset.triviaqa(chosen.triviaqa)]


def run(
    chosen: Namespace, samples: Samples, encoder: TextEncoder, judged_by: Judge | None = None
) -> list[dict[str, Any]]:
    known = all_strategies()
    selective = frozenset(name for name, s in known.items() if s.selective)
    ratio = RATIO if RATIO in chosen.ratios else chosen.ratios[0]
    main = main_settings(chosen.strategies, selective, ratio, chosen.neighbours)
    sweep = sweep_settings(main, chosen.ratios) if chosen.sweep else []
    sets = sets_of(chosen, encoder)
    style = Style(chosen.instruction, chosen.max_tokens)
    measured: dict[str, list[Question]] = {}
    progress = Progress(sum(min(chosen.limit, len(questions.questions)) for questions in sets))
    for questions in sets:
        limits = {"device_gb": chosen.device_cache_gb, "disk_gb": chosen.disk_cache_gb}
        with opened(chosen.model, chosen.dtype, known, ahead=not chosen.lazy, **limits) as engine:
            work = Evaluation(
                engine, questions, chosen.limit, encoder, style, whole_corpus=not chosen.quick,
                choices=choices(questions, chosen.options) if chosen.options else None,
            )  # fmt: skip
            if work.left_out:
                print(f"{work.name}: {work.left_out} questions are too long for the model", file=sys.stderr)
            progress.total -= min(chosen.limit, len(questions.questions)) - len(work.questions)
            measured[questions.name] = measure(
                work, main, sweep, samples, progress, swept=chosen.sweep, judged_by=judged_by
            )
    return rows(measured, main, sweep, chosen.model)


def settings_of(chosen: Namespace) -> dict[str, Any]:
    """What a question's samples depend on: strategies, ratios and sets may be added to a stopped run."""
    kept = ("dtype", "limit", "max_tokens", "instruction", "quick", "data", "triviaqa", "lazy",
            "options", "corpus", "judge", "judge_model")  # fmt: skip
    return {**{name: str(getattr(chosen, name)) for name in kept}, "model": weights_of(chosen.model)}


def measured(chosen: Namespace, session: Session) -> list[dict[str, Any]]:
    judged_by = None if chosen.judge is None else judge.opened(chosen.judge, chosen.judge_model, chosen.judge_key)
    if judged_by is not None:
        judged_by.check()
    made = run(chosen, session.samples(settings_of(chosen)), packaged_encoder(), judged_by)
    session.tables["non-inferiority"] = smallest(made)
    return made


def show(made: Sequence[report.Row], _: Namespace) -> None:
    claims = verdicts(made)
    if claims:
        print("\nwhat the methods promise (with their 95% intervals):")
        print(report.table(claims, tuple(claims[0])))


BENCHMARK = Benchmark("quality", __doc__, COLUMNS, measured, options, model=True, check=check, show=show)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
