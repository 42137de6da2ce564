"""What prompt lookup is worth: tokens a second of greedy answers with and without it.

The set `demo` is the bundled documents and questions; others are questions of DIR/text/SET over their own passages.
Each question is answered once beforehand, so that its prompt's KV is kept (`prefix`), then by both engines in turn;
`faster` is the ratio of the tokens a second. With one client a second is one of decoding, without the time to first
token; with more it is one of the whole. `tokens_per_step` is the mean over answers, `equal` the share of answers whose
tokens are the same: steps of other shapes round otherwise.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.common import report
from benchmarks.common.questions import demo_questions
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.quality import dataset
from ragjax.commands.flags import DEMO, integer
from ragjax.core import Answer, Document
from ragjax.core.options import MOST_LOOKUP
from ragjax.engine import Engine

COLUMNS = ("set", "clients", "n", "tokens", "tokens_per_s_off", "tokens_per_s", "faster", "tokens_per_step", "equal")
SETS = ("squad_xquad_en", "musique", "dialogsum")


@dataclass(frozen=True)
class Case:
    """A question and the passages that it is asked over (None: those that are found)."""

    question: str
    documents: tuple[Document, ...] | None = None


def options(flags: Parser) -> None:
    flags.add("--data", type=report.existing_folder, metavar="DIR", help="folder of question sets")
    flags.add("--sets", type=report.listed, default=SETS, help="sets of DIR, by comma")
    flags.add("--lookup", type=integer(1, MOST_LOOKUP), default=MOST_LOOKUP, help="tokens")
    flags.add("--clients", type=report.numbers(integer(1)), default=[1, 8], help="at once, by comma")
    flags.add("--limit", type=integer(1), default=24, quick=8, help="questions of a set")
    flags.add("--tokens", type=integer(2), default=64, help="of an answer, at most")


def measure(chosen: Namespace, _: Session) -> Iterator[dict[str, Any]]:
    cases = {"demo": [Case(entry["question"]) for entry in demo_questions(limit=chosen.limit)]}
    for name in chosen.sets if chosen.data is not None else ():
        questions = dataset.load(chosen.data, name).questions[: chosen.limit]
        cases[name] = [Case(q.text, q.passages[:5]) for q in questions]
    with ExitStack() as stack:
        engines = [
            stack.enter_context(Engine.load(
                chosen.model, dtype=chosen.dtype, knowledge=DEMO / "documents", lookup=lookup, max_context=4096,
                device_cache_gb=1.0,
            )) for lookup in (0, chosen.lookup)
        ]  # fmt: skip
        for name, of_set in cases.items():
            for clients in chosen.clients:
                yield row(engines, name, of_set, clients, chosen.tokens)


def row(engines: Sequence[Engine], name: str, cases: Sequence[Case], clients: int, tokens: int) -> dict[str, Any]:
    seconds, said = [0.0, 0.0], [0, 0]
    equal, per_step = 0, list[float]()
    for begin in range(0, len(cases), clients):
        group = cases[begin : begin + clients]
        found = []
        for i, engine in enumerate(engines):
            answered(engine, group, tokens)
            began = time.perf_counter()
            answers = answered(engine, group, tokens)
            spent = time.perf_counter() - began
            if clients == 1:
                spent = (answers[0].timings.total - answers[0].timings.ttft) / 1e3
            seconds[i] += spent
            said[i] += sum(len(answer.tokens) - (clients == 1) for answer in answers)
            found.append(answers)
        equal += sum(one.tokens == other.tokens for one, other in zip(*found, strict=True))
        per_step += [answer.figures.get("tokens_per_step", 1.0) for answer in found[1]]
    off, on = (n / max(s, 1e-9) for n, s in zip(said, seconds, strict=True))
    return {
        "set": name, "clients": clients, "n": len(cases), "tokens": said[1], "tokens_per_s_off": off,
        "tokens_per_s": on, "faster": on / off, "tokens_per_step": sum(per_step) / len(per_step),
        "equal": equal / len(cases),
    }  # fmt: skip


def answered(engine: Engine, cases: Sequence[Case], tokens: int) -> list[Answer]:
    def ask(case: Case) -> Answer:
        return engine.answer(case.question, strategy="prefix", documents=case.documents, max_tokens=tokens)

    with ThreadPoolExecutor(len(cases)) as threads:
        return list(threads.map(ask, cases))


main = Benchmark("decode", __doc__, COLUMNS, measure, options, model=True).main

if __name__ == "__main__":
    sys.exit(main())
