"""What training for passages that stand alone is worth: answers and divergence, beside the untouched model.

Every question is asked over its own passages (`demo`: the bundled questions, over the three chunks that retrieval
finds), of the untouched model by `full`, `naive` and `anchor`, and of each trained model: one with an adapter of
`python -m train.depft --target teacher` by `naive`, one with packets of `python -m train.packet` by `packet`, and both
by `full`, which says what training did to self-attention. --adapter and --packet name files, or packaged models.

`kl` is the divergence from the untouched model's full attention, in nats a token over the reference answer's first 12
tokens; `answered` the share of answers of 32 tokens that hold a reference. `answered_minus_full`: the paired difference
from the untouched `full`; `kl_minus_anchor`: from its `anchor` at 15%, behind ten neighbours. `ttft_over_naive`:
the median over questions of the first token's time, all KV warm, over that of `naive` on the same model. Intervals are
95% paired bootstrap intervals over questions.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.common.questions import demo_questions
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.quality import dataset
from benchmarks.quality.dataset import QuestionSet
from benchmarks.quality.evaluation import FULL, NAIVE, Evaluation, Setting, Style, sample
from benchmarks.quality.rows import opened
from benchmarks.quality.score import column, compared
from benchmarks.quality.similarity import packaged_encoder
from ragjax.commands.flags import DEMO, integer
from ragjax.core import Answer, Chunk, Document
from ragjax.engine import Engine

SETS = ("demo", "musique", "2wikimultihopqa")  # the demo, and sets that the packaged models were not trained on
NEIGHBOURS, TOP_K, TOKENS = 10, 3, 32
ANCHOR = Setting("anchor", 0.15, NEIGHBOURS)
PACKET = Setting("packet")

COLUMNS = (
    "set", "model", "strategy", "n", "kl", "kl_lo", "kl_hi", "top1", "answered", "answered_minus_full",
    "answered_minus_full_lo", "answered_minus_full_hi", "kl_minus_anchor", "kl_minus_anchor_lo", "kl_minus_anchor_hi",
    "rougeL_vs_full", "ttft_ms", "ttft_over_naive",
)  # fmt: skip

Found = dict[tuple[str, Setting], list[dict[str, Any]]]  # samples by model and setting, one a question


@dataclass(frozen=True)
class Arm:
    """A model, and how it is asked. name: of its rows; path: what leads to it."""

    name: str
    path: str
    settings: tuple[Setting, ...]


def arms(chosen: Namespace) -> list[Arm]:
    trained = [Arm(name, name, (FULL, NAIVE)) for name in chosen.adapter]
    packed = [Arm(name, name, (FULL, NAIVE, PACKET)) for name in chosen.packet]
    return [Arm(chosen.model, chosen.model, (FULL, NAIVE, ANCHOR)), *trained, *packed]


def measure(arm: Arm, questions: QuestionSet, chosen: Namespace, exact: dict[str, Answer]) -> Found:
    """Samples of one model on a set. exact: answers of the untouched model's full attention, filled by the first."""
    found: Found = {(arm.name, setting): [] for setting in arm.settings}
    with opened(arm.path, chosen.dtype, device_gb=0.5, ahead=not chosen.quick) as engine:
        work = Evaluation(
            engine, questions, chosen.limit, packaged_encoder(), Style(max_tokens=TOKENS),
            whole_corpus=not chosen.quick,
        )  # fmt: skip
        _warm(work, work.questions[0], arm)
        for question in work.questions:
            answers = _warm(work, question, arm)
            for setting, answer in zip(arm.settings, answers, strict=True):
                if setting == FULL:
                    exact.setdefault(question.id, answer)
                found[arm.name, setting].append(sample(question, answer, exact[question.id]))
    return found


def _warm(work: Evaluation, question: dataset.Question, arm: Arm) -> list[Answer]:
    work.prepare(question, arm.settings)
    if PACKET in arm.settings:
        work.engine.answer_prompt(work.prompt(question), strategy="packet", max_tokens=1)
    return [work.ask(question, setting) for setting in arm.settings]


def demo(model: str, limit: int) -> QuestionSet:
    asked = demo_questions(limit=limit)
    with Engine.load(model, knowledge=DEMO / "documents") as engine:
        found = [[hit.chunk for hit in engine.search(one["question"], top_k=TOP_K)] for one in asked]
        base = engine.knowledge_base()
        corpus = [_passage(chunk) for chunk in base.chunks(base.numbers).values()]
    made = [
        dataset.Question(one["id"], one["question"], tuple(one["answers"]), tuple(map(_passage, chunks)))
        for one, chunks in zip(asked, found, strict=True)
    ]
    return QuestionSet("demo", tuple(made), {passage.id: passage for passage in corpus})


def _passage(chunk: Chunk) -> Document:
    return Document(chunk.id, chunk.text.removeprefix(f"{chunk.title}\n").strip(), chunk.title)


def rows(name: str, found: Found) -> Iterator[dict[str, Any]]:
    """The table's rows of a set; the first model of `found` is the untouched one."""
    base = next(model for model, _ in found)
    for (model, setting), samples in found.items():
        ttft, naive = column(samples, "ttft_ms"), column(found[model, NAIVE], "ttft_ms")
        yield {
            "set": name, "model": model, "strategy": setting.strategy, "n": len(samples),
            **compared(samples, ("kl",), {"minus_anchor": found[base, ANCHOR]}),
            **compared(samples, ("answered",), {"minus_full": found[base, FULL]}),
            **{key: float(np.mean(column(samples, key))) for key in ("top1", "rougeL_vs_full")},
            "ttft_ms": float(np.median(ttft)), "ttft_over_naive": float(np.median(np.divide(ttft, naive))),
        }  # fmt: skip


def options(flags: Parser) -> None:
    flags.add("--data", type=report.existing_folder, metavar="DIR", help="a folder with text/SET/questions.jsonl")
    flags.add("--sets", type=report.listed, default=SETS, metavar="A,B", help="the demo, and sets of the folder")
    flags.add("--adapter", type=report.listed, default=(), metavar="A,B", help="models with adapters of train.depft")
    flags.add("--packet", type=report.listed, default=(), metavar="A,B", help="models with packets of train.packet")
    flags.add("--limit", type=integer(1), default=100, quick=4, metavar="N", help="questions a set")


def check(flags: Parser, chosen: Namespace) -> None:
    if chosen.data is None and chosen.sets != ["demo"]:
        flags.error("give --data for the sets of a folder, or --sets demo")
    if not chosen.adapter and not chosen.packet:
        flags.error("give --adapter, --packet or both")


def measured(chosen: Namespace, _: Session) -> Iterator[dict[str, Any]]:
    for name in chosen.sets:
        asked = demo(chosen.model, chosen.limit) if name == "demo" else dataset.load(chosen.data, name)
        found: Found = {}
        exact: dict[str, Answer] = {}
        for arm in arms(chosen):
            found |= measure(arm, asked, chosen, exact)
        yield from rows(name, found)


BENCHMARK = Benchmark("passages", __doc__, COLUMNS, measured, options, check=check, model=True)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
