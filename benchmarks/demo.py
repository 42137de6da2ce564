"""The bundled demo: does retrieval find the right documents, and do answers contain the right string?

    python -m benchmarks.demo [--model NAME_OR_PATH] [--strategy full,prefix,naive] [--limit N] [--json FILE]

An answer counts if it contains one of the question's answer strings, case aside. Greedy, 32 new tokens, top 3. The rows
with `hops` are the questions on the demo's graph, whose paths are found and read as a server does it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ragjax
from benchmarks import report
from ragjax.commands.flags import integer
from ragjax.engine import Engine
from ragjax.reuse import strategies as all_strategies

DEMO = Path(ragjax.__file__).parent / "demo"
MODEL = "smollm2-135m-instruct"
COLUMNS = ("strategy", "documents", "hops", "n", "answered", "found_top3", "found_top5", "reused_share", "ttft_ms")


def main(argv: Sequence[str] | None = None) -> int:
    """Run and report. Returns the exit code."""
    flags = report.parser("demo", __doc__ or "")
    flags.add_argument("--model", default=MODEL, metavar="NAME_OR_PATH", help="model (%(default)s)")
    flags.add_argument("--strategy", default="full,prefix,naive", help="strategies, comma-separated (%(default)s)")
    flags.add_argument("--limit", type=integer(1), metavar="N", help="use the first N questions")
    options = flags.parse_args(argv)
    unknown = [name for name in options.strategy.split(",") if name not in all_strategies()]
    if unknown:
        flags.error(f"unknown strategy {unknown[0]!r}; choose among {', '.join(all_strategies())}")
    limit = options.limit or (20 if options.quick else None)
    questions, on_graph = (_questions(name, limit) for name in ("questions", "graph_questions"))

    def measure(_: report.Header) -> list[dict[str, Any]]:
        with Engine.load(options.model, knowledge=DEMO / "documents", graph={"demo": DEMO / "facts.tsv"}) as engine:
            rows = [
                row(engine, strategy, count, [q for q in questions if len(q["documents"]) == count])
                for strategy in options.strategy.split(",")
                for count in (1, 2)
            ]
            hops = {n: [q for q in on_graph if len(q["paths"][0]) // 2 == n] for n in (1, 2)}
            return rows + [graph_row(engine, n, asked) for n, asked in hops.items()]

    return 0 if report.measured("demo", COLUMNS, options.json, measure) is not None else 1


def row(engine: Engine, strategy: str, count: int, questions: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table: questions that need `count` documents."""
    answers = [engine.answer(q["question"], strategy=strategy, max_tokens=32) for q in questions]
    pairs = list(zip(questions, answers, strict=True))
    return {
        "strategy": strategy,
        "documents": count,
        "n": len(questions),
        "answered": _share(any(a.lower() in answer.text.lower() for a in q["answers"]) for q, answer in pairs),
        "found_top3": _share(_found(engine, q, 3) for q in questions),
        "found_top5": _share(_found(engine, q, 5) for q in questions),
        "reused_share": sum(a.cached_tokens for a in answers) / max(1, sum(a.prompt_tokens for a in answers)),
        "ttft_ms": statistics.median(a.timings.ttft for a in answers) if answers else None,
    }


def graph_row(engine: Engine, hops: int, questions: list[dict[str, Any]]) -> dict[str, Any]:
    """The same of questions on the graph, whose paths have so many hops."""
    answers = [engine.answer(q["question"], graph=ragjax.Graph("demo"), max_tokens=32) for q in questions]
    pairs = list(zip(questions, answers, strict=True))
    return {
        "strategy": "dependency",
        "hops": hops,
        "n": len(questions),
        "answered": _share(any(a.lower() in answer.text.lower() for a in q["answers"]) for q, answer in pairs),
        "reused_share": sum(a.cached_tokens for a in answers) / max(1, sum(a.prompt_tokens for a in answers)),
        "ttft_ms": statistics.median(a.timings.ttft for a in answers) if answers else None,
    }


def _questions(name: str, limit: int | None) -> list[dict[str, Any]]:
    lines = (DEMO / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:limit]
    return [json.loads(line) for line in lines]


def _found(engine: Engine, question: dict[str, Any], k: int) -> bool:
    hits = engine.search(question["question"], top_k=k)
    return set(question["documents"]) <= {hit.chunk.document_id for hit in hits}


def _share(outcomes: Any) -> float:
    known = list(outcomes)
    return sum(known) / max(1, len(known))


if __name__ == "__main__":
    sys.exit(main())
