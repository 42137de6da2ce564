"""Questions over graphs, the prompts that serving makes of them, and one answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.special import log_softmax  # type: ignore[import-untyped]

from benchmarks.common.questions import read_lines
from benchmarks.quality import dataset, score
from ragjax.core import ConfigError, Message, Prompt
from ragjax.engine import Engine
from ragjax.prompting.chat import graph_prompt
from ragjax.retrieval.graph import KnowledgeGraph
from ragjax.retrieval.knowledge import TextEncoder
from ragjax.retrieval.triple_files import read_triples
from ragjax.retrieval.triples import RelationPath, Subgraph, subgraphs_of
from ragjax.reuse.base import Strategy
from train.maker import from_question
from train.sample import MOST_ANSWERS
from train.walk import Limits

SETS = ("metaqa", "geo_made", "2wiki_evidence")
LIMIT, QUICK_LIMIT = 100, 3  # questions of a set
LIMITS = Limits()
FORCED = 12  # tokens of the first answer over which log-probabilities are taken


@dataclass(frozen=True)
class Question:
    """A question, what answers it, and the paths it gets."""

    id: str
    text: str
    answers: tuple[str, ...]
    subgraphs: tuple[Subgraph, ...]


def questions_of(folder: Path, name: str, limit: int) -> list[Question]:
    """The first questions of a set that have a path and an answer.

    Raises:
        ConfigError: if there is no such set.
    """
    file = folder / "kg" / name / "questions.jsonl"
    if not file.exists():
        known = ", ".join(sorted(path.parent.name for path in folder.glob("kg/*/questions.jsonl"))) or "none"
        raise ConfigError(f"{file} does not exist; sets of {folder}: {known}")
    found = []
    for number, value in enumerate(read_lines(file, "answers")):
        try:
            sample = from_question(value, LIMITS, 0, number)
        except ValueError:
            continue  # a question without any path is none for a graph
        answers = tuple(str(answer) for answer in value["answers"])
        found.append(Question(sample.id, sample.question, answers, subgraphs_of(map(RelationPath, sample.paths))))
        if len(found) == limit:
            break
    return found


def extracted(folder: Path, name: str, limit: int, triples: Path, encoder: TextEncoder) -> list[Question]:
    """The first questions of a set of text that are about an entity of the graph extracted from it.

    Raises:
        ConfigError: if there is no such set, or its triples cannot be read.
    """
    found: list[Question] = []
    with KnowledgeGraph(None, encoder) as graph:
        graph.add(read_triples(triples))
        for question in dataset.load(folder, name).questions:
            subgraphs = graph.subgraphs(question.text)
            if subgraphs and len(found) < limit:
                found.append(Question(question.id, question.text, question.answers, tuple(subgraphs)))
    return found


def prompt_of(engine: Engine, question: Question, trees: bool) -> Prompt:
    return graph_prompt(engine.tokenizer, (Message("user", question.text),), question.subgraphs, trees=trees)


def opened(model: str, dtype: str, gigabytes: float = 0.5, context: int | None = None) -> Engine:
    return Engine.load(model, strategy="dependency", dtype=dtype, device_cache_gb=gigabytes, max_context=context)


def answered(engine: Engine, question: Question, strategy: str | Strategy, prompt: Prompt) -> dict[str, float]:
    reference = engine.tokenizer.encode(question.answers[0], special=False, continued=True)[:FORCED]
    answer = engine.answer_prompt(prompt, strategy=strategy, max_tokens=24, continuation=reference)
    assert answer.scores is not None
    logprob = log_softmax(answer.scores.astype(np.float64), axis=-1)
    return {
        "accuracy": score.answered(answer.text, question.answers),
        "f1": score.f1(answer.text, [", ".join(question.answers[:MOST_ANSWERS])]),
        "logprob": float(logprob[np.arange(len(reference)), reference].mean()),
        "top1": float((logprob.argmax(-1) == reference).mean()), "prompt_tokens": answer.prompt_tokens,
        "hit_rate": answer.cached_tokens / answer.prompt_tokens, "ttft_ms": answer.timings.ttft,
    }  # fmt: skip
