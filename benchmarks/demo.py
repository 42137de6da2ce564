"""The bundled demo: does retrieval find the right documents, and do answers contain the right string?

An answer counts if it contains one of the question's answer strings, case aside. Greedy, 32 new tokens, top 3, the
passages computed behind their neighbours first, as an idle server does. The rows with `hops` are the questions on the
demo's graph, whose paths are found and read as a server does it.
"""

from __future__ import annotations

import itertools
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ragjax
from benchmarks.baseline.strategy import all_strategies
from benchmarks.common import report
from benchmarks.common.machine import median
from benchmarks.common.questions import demo_questions
from benchmarks.common.report import Benchmark, Parser, Session
from ragjax.commands.flags import DEMO, integer
from ragjax.core import Answer
from ragjax.engine import Engine
from ragjax.engine.preprocessing import preprocess

COLUMNS = ("strategy", "documents", "hops", "n", "answered", "found_top3", "found_top5", "reused_share", "ttft_ms")

Question = Mapping[str, Any]


def options(flags: Parser) -> None:
    names = report.among(("auto", *all_strategies()), "strategy")
    flags.add("--strategy", type=names, default="full,prefix,auto", help="comma-separated")
    flags.add("--limit", type=integer(1), default=1000, quick=20, metavar="N", help="use the first N questions")


def measure(chosen: Namespace, _: Session) -> Iterator[dict[str, Any]]:
    questions, on_graph = (demo_questions(name, chosen.limit) for name in ("questions", "graph_questions"))
    with Engine.load(
        chosen.model, dtype=chosen.dtype, knowledge=DEMO / "documents", graph={"demo": DEMO / "facts.tsv"}
    ) as engine:
        preprocess(engine)
        for strategy, count in itertools.product(chosen.strategy, (1, 2)):
            yield row(engine, strategy, count, [q for q in questions if len(q["documents"]) == count])
        for hops in (1, 2):
            yield graph_row(engine, hops, [q for q in on_graph if len(q["paths"][0]) // 2 == hops])


def row(engine: Engine, strategy: str, count: int, questions: Sequence[Question]) -> dict[str, Any]:
    answers = [engine.answer(q["question"], strategy=strategy, max_tokens=32) for q in questions]
    return {
        "strategy": strategy, "documents": count, **_figures(questions, answers),
        "found_top3": _share(_found(engine, q, 3) for q in questions),
        "found_top5": _share(_found(engine, q, 5) for q in questions),
    }  # fmt: skip


def graph_row(engine: Engine, hops: int, questions: Sequence[Question]) -> dict[str, Any]:
    answers = [engine.answer(q["question"], graph=ragjax.Graph("demo"), max_tokens=32) for q in questions]
    return {"strategy": "dependency", "hops": hops, **_figures(questions, answers)}


def _figures(questions: Sequence[Question], answers: Sequence[Answer]) -> dict[str, Any]:
    pairs = list(zip(questions, answers, strict=True))
    return {
        "n": len(questions),
        "answered": _share(any(a.lower() in answer.text.lower() for a in q["answers"]) for q, answer in pairs),
        "reused_share": sum(a.cached_tokens for a in answers) / max(1, sum(a.prompt_tokens for a in answers)),
        "ttft_ms": median([a.timings.ttft for a in answers]),
    }


def _found(engine: Engine, question: Question, k: int) -> bool:
    hits = engine.search(question["question"], top_k=k)
    return set(question["documents"]) <= {hit.chunk.document_id for hit in hits}


def _share(outcomes: Any) -> float:
    known = list(outcomes)
    return float(sum(known) / max(1, len(known)))


main = Benchmark("demo", __doc__, COLUMNS, measure, options, model=True).main

if __name__ == "__main__":
    sys.exit(main())
