"""What is asked: real questions over retrieved passages, passages drawn after Zipf, and graphs; and when."""

from __future__ import annotations

import csv
import datetime
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.questions import read_lines
from benchmarks.graph import question as graphs
from benchmarks.graph.part import requests as entity_requests
from benchmarks.quality import dataset
from ragjax.commands.flags import DEMO
from ragjax.core import ConfigError, Document

POOL = 200  # passages that the requests of `zipf` draw from
PASSAGE_WORDS = 110  # words of a passage of `zipf`: one chunk of up to 192 tokens
TOGETHER = 12  # passages of a request of `zipf`: about two thousand tokens
SKEW = 1.0  # zipf's exponent, of passages and of questions
GRAPH_SET = "metaqa"
UNKNOWN = dataset.Question("", "What is this about?", (), ())


@dataclass(frozen=True)
class Ask:
    """One request. Its knowledge is `documents`, `paths` of a graph, or what is retrieved."""

    id: str
    question: str
    output: int  # tokens of the answer, at most
    documents: tuple[str, ...] | None = None  # ids in the knowledge base
    top_k: int | None = None
    paths: tuple[tuple[str, ...], ...] | None = None


@dataclass(frozen=True)
class Workload:
    """Requests in order, and the documents of the knowledge base that they are asked over."""

    name: str
    asks: tuple[Ask, ...]
    documents: tuple[Document, ...] = field(default=(), repr=False)

    def digest(self, asks: Sequence[Ask]) -> str:
        """Tells what some of the requests measure from what those of other workloads do."""
        return hashlib.sha256(f"{self.knowledge}{tuple(asks)!r}".encode()).hexdigest()

    @cached_property
    def knowledge(self) -> str:
        """Name of the knowledge base; equal documents have one name, so that their index is made once."""
        whole = hashlib.sha256()
        for document in self.documents:
            whole.update(f"{document.id}\0{document.title}\0{document.text}\0".encode())
        return f"load-{whole.hexdigest()[:12]}"


@dataclass(frozen=True)
class Wish:
    """What the command line says about a workload."""

    data: Path
    count: int  # requests
    sets: tuple[str, ...] = ()  # of the data folder
    top_k: int = 2
    output: int | None = None  # tokens of each answer; None: as the workload has it
    seed: int = 0
    quick: bool = False
    shuffled: bool = True  # the passages of a `zipf` request stand in random order, else in the pool's
    pool: int = POOL
    together: int = TOGETHER
    words: int = PASSAGE_WORDS
    made: bool = False  # passages of `zipf` are words of the demo, and nothing is read


def questions(wish: Wish) -> Workload:
    """Questions of the sets, drawn after Zipf, over the union of their corpora; mmlu's have choices and one token."""
    sets = wish.sets or ("nq_open", "mmlu", "musique")
    asked: list[Ask] = []
    documents: dict[str, Document] = {}
    for name in sets:
        if name == "mmlu":
            asked += _choices(wish)
            continue
        found = dataset.load(wish.data, name)
        chosen = found.questions[:40] if wish.quick else found.questions
        asked += [_ask(q, wish) for q in chosen]
        documents |= {p.id: p for q in chosen for p in q.passages} if wish.quick else dict(found.corpus)
    if not documents:
        documents = {d.id: d for name in ("nq_open", "musique") for d in _few(wish, name)}
    drawn = _zipf(len(asked), wish.seed)
    asks = tuple(replace(asked[i], id=f"{n}") for n, i in zip(range(wish.count), drawn, strict=False))
    return Workload(f"questions:{'+'.join(sets)} top-{wish.top_k}", asks, tuple(documents.values()))


def _ask(question: dataset.Question, wish: Wish) -> Ask:
    return Ask(question.id, question.text, wish.output or 32, top_k=wish.top_k)


def _choices(wish: Wish) -> Iterator[Ask]:
    file = wish.data / "text" / "mmlu" / "questions.jsonl"
    if not file.is_file():
        raise ConfigError(f"{file} does not exist: leave mmlu out of --sets")
    for entry in read_lines(file, "id", "question", "choices"):
        lines = [f"{letter}. {choice}" for letter, choice in zip("ABCDEFGH", entry["choices"], strict=False)]
        text = "\n".join([entry["question"].strip(), *lines])
        yield Ask(entry["id"], text, wish.output or 1, top_k=wish.top_k)


def _few(wish: Wish, name: str) -> Sequence[Document]:
    everything = tuple(dataset.load(wish.data, name).corpus.values())
    return everything[:200] if wish.quick else everything


def _zipf(items: int, seed: int) -> Iterator[int]:
    """Numbers of items, drawn after Zipf without end; which item is popular is random."""
    random = np.random.default_rng(seed)
    order, weights = random.permutation(items), np.arange(1, items + 1) ** -SKEW
    while True:
        yield int(order[random.choice(items, p=weights / weights.sum())])


def zipf(wish: Wish) -> Workload:
    """Requests of `together` passages, drawn after Zipf without repetition from a pool, in random order."""
    pool = passages(wish)
    asked = [] if wish.made else dataset.load(wish.data, "nq_open").questions
    random = np.random.default_rng(wish.seed)
    order, weights = random.permutation(len(pool)), np.arange(1, len(pool) + 1) ** -SKEW
    asks = []
    for number in range(wish.count):
        drawn = order[random.choice(len(pool), wish.together, replace=False, p=weights / weights.sum())]
        chosen = random.permutation(drawn) if wish.shuffled else np.sort(drawn)
        question = asked[int(random.integers(len(asked)))] if asked else UNKNOWN
        ids = tuple(pool[i].id for i in chosen)
        asks.append(Ask(f"{number}", question.text, wish.output or 32, documents=ids))
    return Workload("zipf" if wish.shuffled else "zipf-ordered", tuple(asks), tuple(pool))


def passages(wish: Wish) -> list[Document]:
    """The pool: passages of nq_open's corpus, two joined into one of at most `words` words; or words of the demo."""
    if wish.made:
        texts = [file.read_text(encoding="utf-8") for file in sorted((DEMO / "documents").iterdir())]
        words = " ".join(texts).split()
        drawn = (np.random.default_rng(number).integers(len(words), size=wish.words) for number in range(wish.pool))
        return [Document(f"block-{n}", " ".join(words[i] for i in picked)) for n, picked in enumerate(drawn)]
    corpus = list(dataset.load(wish.data, "nq_open").corpus.values())
    if len(corpus) < 2 * wish.pool:
        raise ConfigError(f"nq_open has {len(corpus)} passages; a pool of {wish.pool} takes twice as many")
    pairs = zip(corpus[: 2 * wish.pool : 2], corpus[1 : 2 * wish.pool : 2], strict=True)
    return [Document(a.id, _cut(f"{a.text} {b.text}", wish.words), a.title) for a, b in pairs]


def _cut(text: str, words: int) -> str:
    return " ".join(text.split()[:words])


def graph(wish: Wish) -> Workload:
    """Requests for the paths of ten entities, drawn after Zipf (DepCache, section 6.1)."""
    name = wish.sets[0] if wish.sets else GRAPH_SET
    found = graphs.questions_of(wish.data, name, 20 if wish.quick else 100)
    asks = tuple(
        Ask(q.id, q.text, wish.output or 16, paths=tuple(p.steps for s in q.subgraphs for p in s.paths))
        for q in entity_requests(found, wish.count, wish.seed)
    )
    return Workload(f"graph:{name}", asks)


WORKLOADS: dict[str, Any] = {"questions": questions, "zipf": zipf, "graph": graph}


AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")  # columns of Azure's traces


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which `count` requests arrive, `rate` a second on average; gaps are exponential and independent."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return [float(seconds) for seconds in np.cumsum(gaps)]


def read_trace(file: Path) -> list[float]:
    """Seconds at which the requests of a trace arrive, from the first one on: Azure's .csv, or Mooncake's .jsonl.

    Raises:
        ConfigError: if the file is neither.
    """
    found = list(_azure(file) if file.suffix == ".csv" else _mooncake(file))
    if not found:
        raise ConfigError(f"{file} has no request")
    return [moment - found[0] for moment in found]


def _azure(file: Path) -> Iterator[float]:
    with file.open(encoding="utf-8", newline="") as lines:
        rows = csv.DictReader(lines)
        if not set(AZURE) <= set(rows.fieldnames or ()):
            raise ConfigError(f"{file} is not a trace of Azure's: its columns are not {', '.join(AZURE)}")
        for row in rows:
            # Azure writes seven digits of a second, Python reads six
            yield datetime.datetime.fromisoformat(row["TIMESTAMP"][:26] + "+00:00").timestamp()


def _mooncake(file: Path) -> Iterator[float]:
    for entry in read_lines(file, "timestamp", "hash_ids"):
        yield entry["timestamp"] / 1e3


def rescaled(trace: Sequence[float], rate: float, count: int) -> list[float]:
    """The times of `count` requests of a trace, stretched evenly to `rate` a second: bursts stay bursts.

    Raises:
        ConfigError: if the trace is too short.
    """
    if len(trace) < count or trace[count - 1] <= 0:
        raise ConfigError(f"the trace has {len(trace)} requests over time, {count} are needed: lower --requests")
    times = np.array(trace[:count])
    return [float(seconds) for seconds in times * (count - 1) / rate / times[-1]]
