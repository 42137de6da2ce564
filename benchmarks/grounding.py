"""What an answer stands on, and what it costs: nothing, passages of text, or a graph's paths (DepCache, Figure 5).

    python -m benchmarks.grounding --data DIR [--set NAME --text NAME] [--limit N] [--model NAME_OR_PATH] [--dtype D]
        [--plot DIR] [--quick] [--json FILE]

The questions are those that DIR/kg/SET and DIR/text/TEXT have in common. `none` is the question alone; `passages` the
five of the question's own that are most similar to it; `graph` its relation paths as `benchmarks.graphrag` makes them.
Methods take turns on every question, and nothing is known beforehand except to those named `-cached`, for which the
same prompt was answered just before. `slower` is the median over questions of the time to first token over that of
`none`; `accuracy` is whether one of the answers occurs in what is generated, with 95% bootstrap intervals.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import dataset, graphrag, plot_graphrag, report
from benchmarks.graphrag import LIMIT, MODEL, QUICK_LIMIT, Question
from benchmarks.quality import packaged_encoder
from benchmarks.score import Bootstrap
from benchmarks.similarity import TextEncoder
from ragjax.core import ConfigError, Hit, Message, Prompt
from ragjax.engine import Engine
from ragjax.prompting.chat import chat_prompt
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.document import Document

PASSAGES = 5
METHODS = {
    "none": ("none", "full"),
    "passages": ("passages", "full"),
    "passages-cached": ("passages", "naive"),
    "graph": ("graph", "full"),
    "graph-dependency": ("trees", "dependency"),
    "graph-dependency-cached": ("trees", "dependency"),
}
"""Which prompt, and the strategy."""

COLUMNS = (
    "set", "method", "strategy", "n", "prompt_tokens", "hit_rate", "ttft_ms", "slower", "accuracy", "accuracy_lo",
    "accuracy_hi", "logprob",
)  # fmt: skip


def common(chosen: argparse.Namespace) -> list[tuple[Question, tuple[Document, ...]]]:
    """Questions with paths, and the passages that the other set has for them.

    Raises:
        ConfigError: if the sets have no question in common.
    """
    texts = {q.text: q.passages for q in dataset.load(chosen.data, chosen.text).questions}
    asked = graphrag.questions_of(chosen.data, chosen.set, None)
    found = [(question, texts[question.text]) for question in asked if question.text in texts]
    if not found:
        raise ConfigError(f"{chosen.set} and {chosen.text} have no question in common")
    return found[: chosen.limit]


def prompts(
    engine: Engine, encoder: TextEncoder, question: Question, passages: Sequence[Document]
) -> dict[str, Prompt]:
    """The prompt of each kind."""
    vectors_NE = encoder.encode([question.text, *(f"{p.title} {p.text}" for p in passages)])
    nearest = np.argsort(-(vectors_NE[1:] @ vectors_NE[0]), kind="stable")[:PASSAGES]
    chunker = Chunker(partial(engine.tokenizer.encode, special=False, continued=True))
    hits = [Hit(chunk, 1.0) for i in nearest for chunk in chunker.chunks(passages[i])]
    messages = (Message("user", question.text),)
    return {
        "none": chat_prompt(engine.tokenizer, messages, None),
        "passages": chat_prompt(engine.tokenizer, messages, hits),
        "graph": graphrag.prompt_of(engine, question, trees=False),
        "trees": graphrag.prompt_of(engine, question, trees=True),
    }


def measure(
    engine: Engine, encoder: TextEncoder, asked: Sequence[tuple[Question, Sequence[Document]]]
) -> dict[str, list[dict[str, Any]]]:
    """Samples of each method; the first question runs twice, as what runs first pays for what is lazy."""
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in METHODS}
    progress = report.Progress(len(asked))
    for number, (question, passages) in enumerate([asked[0], *asked]):
        made = prompts(engine, encoder, question, passages)
        for method, (kind, strategy) in METHODS.items():
            engine.clear_cache()
            if method.endswith("-cached"):
                engine.answer_prompt(made[kind], strategy=strategy, max_tokens=1)
            sample = graphrag.answered(engine, question, strategy, made[kind])
            if number:
                found[method].append(sample)
        if number:
            progress.step(question.id)
    return found


def rows(name: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """A row for each method."""
    bootstrap = Bootstrap([name] * len(found["none"]))
    base = np.array([sample["ttft_ms"] for sample in found["none"]])
    for method, samples in found.items():
        times = np.array([sample["ttft_ms"] for sample in samples])
        yield {
            "part": "grounding",
            "set": name,
            "method": method,
            "strategy": METHODS[method][1],
            "n": len(samples),
            "prompt_tokens": float(np.mean([sample["prompt_tokens"] for sample in samples])),
            "hit_rate": float(np.mean([sample["hit_rate"] for sample in samples])),
            "ttft_ms": float(np.median(times)),
            "slower": float(np.median(times / base)),
            **bootstrap.mean([sample["accuracy"] for sample in samples]).columns("accuracy"),
            **bootstrap.mean([sample["logprob"] for sample in samples]).columns("logprob"),
        }


# ------------------------------------------------------------------------------------ command line


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    flags = report.parser("grounding", (__doc__ or "").partition("\n")[0])
    add = flags.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="a folder with kg/SET and text/TEXT")
    add("--set", default="2wiki_evidence", metavar="NAME", help="set with relation paths (%(default)s)")
    add("--text", default="2wikimultihopqa", metavar="NAME", help="set with passages (%(default)s)")
    add("--limit", type=int, metavar="N", help=f"questions ({LIMIT}; {QUICK_LIMIT} with --quick)")
    add("--model", default=MODEL, metavar="NAME_OR_PATH", help="model (%(default)s)")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of weights and KV (%(default)s)")
    add("--plot", type=Path, metavar="DIR", help="also draw the figure")
    chosen = flags.parse_args(arguments)
    if chosen.limit is None:
        chosen.limit = QUICK_LIMIT if chosen.quick else LIMIT
    if chosen.limit < 1:
        flags.error("--limit must be at least 1")
    return chosen


def run(chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure everything; the rows."""
    asked = common(chosen)
    with graphrag.opened(chosen.model, chosen.dtype) as engine:
        return list(rows(chosen.set, measure(engine, packaged_encoder(), asked)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    chosen = options(arguments)
    made = report.measured("grounding", COLUMNS, chosen.json, lambda _: run(chosen))
    if made is None:
        return 1
    if chosen.plot is not None:
        plot_graphrag.report_figures(made, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
