"""What is asked of replicas: real passages, drawn by a pattern, in random order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.common.questions import spread
from benchmarks.load.workload import Ask, Wish, passages
from benchmarks.policies.workload import PATTERNS
from benchmarks.quality import dataset
from ragjax.commands.flags import DEMO
from ragjax.core import Document
from ragjax.retrieval.document import load

PASSAGE_WORDS = 110
"""Words of a passage, at most: one chunk."""
TOGETHER = 4
"""Passages of a request: with its question 500 to 700 tokens."""
OUTPUT = 4
"""Tokens of an answer: enough to see the first one come."""
POOL = 100
"""Passages of --data."""
WORKLOADS = {"zipf": 1, "temporal": 1, "zipf-topics": 8}
"""Patterns of `benchmarks.policies`, and passages of a topic: with more than one the pattern draws a topic, and the
request gets some of its passages. Each draws its own popular ones, so one workload does not warm up the other."""


def pieces(document: Document, words: int = PASSAGE_WORDS) -> list[Document]:
    """A document as passages of about equally many words."""
    text = document.text.split()
    count = math.ceil(len(text) / words)
    cuts = [round(i * len(text) / count) for i in range(count + 1)]
    bounds = pairwise(cuts)
    return [Document(f"{document.id}-{n}", " ".join(text[a:b]), document.title) for n, (a, b) in enumerate(bounds)]


def source(data: Path | None) -> tuple[list[Document], list[str]]:
    """Passages and questions: of the demo, or of a data folder's nq_open.

    Raises:
        ConfigError: the folder lacks it.
    """
    if data is None:
        found = load(DEMO / "documents").documents
        return [piece for document in found for piece in pieces(document)], spread(1_000)
    asked = dataset.load(data, "nq_open").questions
    return passages(Wish(data, 0, pool=POOL)), [question.text for question in asked]


def requests(workload: str, found: Sequence[Document], asked: Sequence[str], count: int) -> list[Ask]:
    """The requests of a workload, always the same."""
    seed, topic = list(WORKLOADS).index(workload), WORKLOADS[workload]
    random = np.random.default_rng(seed)
    draws = 1 if topic > 1 else TOGETHER
    drawn = PATTERNS[workload.removesuffix("-topics")].draw(len(found) // topic, draws, count, seed)
    near = [[number * topic + i for number in one for i in range(topic)] for one in drawn]
    return [
        Ask(
            f"{workload}-{n}",
            asked[n % len(asked)],
            (),
            OUTPUT,
            documents=tuple(found[i].id for i in random.permutation(one)[:TOGETHER]),
        )
        for n, one in enumerate(near)
    ]


def exact(asks: Sequence[Ask], output: int) -> list[Ask]:
    """The same over half of their passages each, twice: the second time the KV of the first is there."""
    short = [replace(ask, output=output, documents=(ask.documents or ())[: TOGETHER // 2]) for ask in asks]
    return [replace(ask, id=f"{ask.id}/{n}") for n in range(2) for ask in short]
