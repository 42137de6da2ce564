"""What an answer stands on, and what it costs: nothing, passages of text, or a graph's paths (DepCache, Figure 5).

The questions are those that DIR/kg/SET and DIR/text/TEXT have in common. `none` is the question alone; `passages` the
five of the question's own that are most similar to it; `graph` its relation paths as `benchmarks.graphrag` makes them.
Methods take turns on every question, and nothing is known beforehand except to those named `-cached`, for which the
same prompt was answered just before. `slower` is the median over questions of the time to first token over that of
`none`; `accuracy` is whether one of the answers occurs in what is generated, with 95% bootstrap intervals.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.common.samples import Progress
from benchmarks.graph.plot import FIGURES
from benchmarks.graph.question import LIMIT, QUICK_LIMIT, Question, answered, opened, prompt_of, questions_of
from benchmarks.quality import dataset
from benchmarks.quality.score import column, compared
from benchmarks.quality.similarity import packaged_encoder
from ragjax.commands.flags import integer
from ragjax.core import ConfigError, Document, Hit, Message, Prompt
from ragjax.engine import Engine
from ragjax.prompting.chat import chat_prompt
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.knowledge import TextEncoder

PASSAGES = 5
METHODS = {
    "none": ("none", "full"), "passages": ("passages", "full"), "passages-cached": ("passages", "naive"),
    "graph": ("graph", "full"), "graph-dependency": ("trees", "dependency"),
    "graph-dependency-cached": ("trees", "dependency"),
}  # fmt: skip
"""Which prompt, and the strategy."""

COLUMNS = (
    "set", "method", "strategy", "n", "prompt_tokens", "hit_rate", "ttft_ms", "slower", "accuracy", "accuracy_lo",
    "accuracy_hi", "logprob",
)  # fmt: skip


def common(chosen: Namespace) -> list[tuple[Question, tuple[Document, ...]]]:
    """Questions with paths, and the passages that the other set has for them.

    Raises:
        ConfigError: if the sets have no question in common.
    """
    texts = {q.text: q.passages for q in dataset.load(chosen.data, chosen.text).questions}
    asked = questions_of(chosen.data, chosen.set, None)
    found = [(question, texts[question.text]) for question in asked if question.text in texts]
    if not found:
        raise ConfigError(f"{chosen.set} and {chosen.text} have no question in common")
    return found[: chosen.limit]


def prompts(
    engine: Engine, encoder: TextEncoder, question: Question, passages: Sequence[Document]
) -> dict[str, Prompt]:
    vectors_NE = encoder.encode([question.text, *(f"{p.title} {p.text}" for p in passages)])
    nearest = np.argsort(-(vectors_NE[1:] @ vectors_NE[0]), kind="stable")[:PASSAGES]
    chunker = Chunker(partial(engine.tokenizer.encode, special=False, continued=True))
    hits = [Hit(chunk, 1.0) for i in nearest for chunk in chunker.chunks(passages[i])]
    messages = (Message("user", question.text),)
    return {
        "none": chat_prompt(engine.tokenizer, messages, None),
        "passages": chat_prompt(engine.tokenizer, messages, hits),
        "graph": prompt_of(engine, question, trees=False),
        "trees": prompt_of(engine, question, trees=True),
    }


def measure(
    engine: Engine, encoder: TextEncoder, asked: Sequence[tuple[Question, Sequence[Document]]]
) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    progress = Progress(len(asked))
    for number, (question, passages) in enumerate([asked[0], *asked]):
        made = prompts(engine, encoder, question, passages)
        for method, (kind, strategy) in METHODS.items():
            engine.clear_cache()
            if method.endswith("-cached"):
                engine.answer_prompt(made[kind], strategy=strategy, max_tokens=1)
            sample = answered(engine, question, strategy, made[kind])
            if number:
                found[method].append(sample)
        if number:
            progress.step(question.id)
    return found


def rows(name: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    base = column(found["none"], "ttft_ms")
    for method, samples in found.items():
        times = column(samples, "ttft_ms")
        yield {
            "part": "grounding", "set": name, "method": method, "strategy": METHODS[method][1], "n": len(samples),
            **{key: float(np.mean(column(samples, key))) for key in ("prompt_tokens", "hit_rate")},
            "ttft_ms": float(np.median(times)), "slower": float(np.median(np.divide(times, base))),
            **compared(samples, ("accuracy", "logprob")),
        }  # fmt: skip


def options(flags: Parser) -> None:
    flags.add("--data", type=Path, required=True, metavar="DIR", help="a folder with kg/SET and text/TEXT")
    flags.add("--set", default="2wiki_evidence", metavar="NAME", help="set with relation paths")
    flags.add("--text", default="2wikimultihopqa", metavar="NAME", help="set with passages")
    flags.add("--limit", type=integer(1), default=LIMIT, quick=QUICK_LIMIT, metavar="N", help="questions")


def measured(chosen: Namespace, _: Session) -> Iterator[dict[str, Any]]:
    asked = common(chosen)
    with opened(chosen.model, chosen.dtype) as engine:
        yield from rows(chosen.set, measure(engine, packaged_encoder(), asked))


main = Benchmark("grounding", __doc__, COLUMNS, measured, options, model=True, figures=FIGURES).main

if __name__ == "__main__":
    sys.exit(main())
