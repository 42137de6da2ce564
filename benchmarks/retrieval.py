"""How many of the right passages a search finds: by the last question, with the conversation, and by words too.

Of each set of DIR the corpus is cut and embedded as a knowledge base does it. `last` is the vector of the last question
alone, `conversation` takes the questions before it with it, `words` is what is served. `recall` at k is the share of a
question's supporting passages whose documents are among the k chunks found, which have up to `tokens` tokens, and
`context` at k the mean number of tokens that these chunks have together. `found` and `elsewhere` are the cosine of the
nearest chunk: the 5th percentile in the own corpus, the 95th in those of the other sets.

`--chunks N` measures the time of a search in a knowledge base of so many made-up chunks instead.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.questions import read_lines
from benchmarks.common.report import Benchmark, Parser, Session
from benchmarks.quality.similarity import Similarity, packaged_encoder
from ragjax.commands.flags import integer
from ragjax.core import CHUNK_TOKENS, ConfigError, Document
from ragjax.models.hub import resolve
from ragjax.models.tokenizer import Tokenizer
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.knowledge import FADING, KnowledgeBase, Query
from ragjax.retrieval.words import POOL, fused_order, weights_of

SETS = ("mtrag_un", "squad_xquad_en", "rgb_en_fact", "nq_open", "hotpotqa", "dragonball_finance_en", "musique")
DEPTHS = (3, 5, 10)
COLUMNS = (
    "set", "n", "tokens", "chunks", "method", "recall_3", "recall_5", "recall_10", "context_3", "context_5",
    "context_10", "found", "elsewhere",
)  # fmt: skip
TIMES = ("chunks", "method", "n", "median_ms", "p95_ms")


@dataclass(frozen=True)
class Asked:
    """The questions of a conversation, the latest first, and the documents that answer the latest."""

    questions: tuple[str, ...]
    right: frozenset[str]


@dataclass(frozen=True)
class Corpus:
    """The questions of a set, its chunks, and their vectors float32 [N, E]."""

    name: str
    asked: Sequence[Asked]
    documents: tuple[str, ...]  # of each chunk
    texts: tuple[str, ...]
    sizes: tuple[int, ...]  # of each chunk, tokens
    vector_NE: NDArray[np.float32]


def corpus_of(data: Path, name: str, limit: int, chunker: Chunker, encoder: Any) -> Corpus:
    path = data / "text" / name / "questions.jsonl"
    if not path.is_file():
        raise ConfigError(f"{data} has no set {name!r} (text/{name}/questions.jsonl)")
    entries = [entry for entry in read_lines(path, "id", "question", "passages") if entry["passages"]][:limit]
    passages = {passage["id"]: passage for entry in entries for passage in entry["passages"]}
    documents = [Document(one["id"], one["text"], one.get("title") or "") for one in passages.values()]
    chunks = [chunk for document in documents for chunk in chunker.chunks(document)]
    found = Similarity.of(chunks, encoder)
    return Corpus(
        name, [asked for entry in entries if (asked := _asked(entry)).right], tuple(c.document_id for c in chunks),
        tuple(c.text for c in chunks), tuple(len(c.tokens) for c in chunks), found.vectors_NE,
    )  # fmt: skip


def _asked(entry: Mapping[str, Any]) -> Asked:
    before = [turn["text"] for turn in entry.get("history", ()) if turn["speaker"] == "user"]
    right = frozenset(passage["id"] for passage in entry["passages"] if passage["is_supporting"])
    return Asked((entry["question"], *reversed(before)), right)


def measure(chosen: Namespace, _: Session) -> Iterator[dict[str, Any]]:
    if chosen.chunks:
        yield from times(chosen.chunks, chosen.limit)
        return
    encoder = packaged_encoder()
    tokenizer = Tokenizer.load(resolve("smollm2-135m-instruct").path)
    for tokens in chosen.tokens:
        chunker = Chunker(partial(tokenizer.encode, special=False, continued=True), tokens)
        corpora = [corpus_of(chosen.data, name, chosen.limit, chunker, encoder) for name in chosen.sets]
        for told in recalls(corpora, encoder):
            yield {"tokens": tokens, **told}


def recalls(corpora: Sequence[Corpus], encoder: Any) -> Iterator[dict[str, Any]]:
    for corpus in corpora:
        vectors = {text: encoder.encode([text])[0] for one in corpus.asked for text in one.questions}
        last_QE = np.stack([vectors[one.questions[0]] for one in corpus.asked])
        others = [other.vector_NE for other in corpora if other is not corpus]
        scores = {
            "found": float(np.percentile((last_QE @ corpus.vector_NE.T).max(axis=1), 5)),
            "elsewhere": float(np.percentile((last_QE @ np.concatenate(others).T).max(axis=1), 95)) if others else None,
        }
        for method, search in METHODS.items():
            ranks = [search(corpus, one, [vectors[text] for text in one.questions]) for one in corpus.asked]
            found = {f"recall_{k}": _recall(corpus, ranks, k) for k in DEPTHS}
            found |= {
                f"context_{k}": float(np.mean([sum(corpus.sizes[i] for i in r[:k]) for r in ranks])) for k in DEPTHS
            }
            told = {"set": corpus.name, "n": len(ranks), "chunks": len(corpus.texts), "method": method}
            yield {**told, **found, **(scores if method == "last" else {"found": None, "elsewhere": None})}


def _recall(corpus: Corpus, ranks: Sequence[Sequence[int]], k: int) -> float:
    shares = []
    for one, rank in zip(corpus.asked, ranks, strict=True):
        found = {corpus.documents[i] for i in rank[:k]}
        shares.append(len(found & one.right) / len(one.right))
    return float(np.mean(shares))


def _nearest(corpus: Corpus, vectors: Sequence[NDArray[np.float32]]) -> list[int]:
    total_E = np.sum([FADING**n * vector for n, vector in enumerate(vectors)], axis=0)
    return [int(i) for i in np.argsort(-(corpus.vector_NE @ total_E), kind="stable")[:POOL]]


def _words(corpus: Corpus, asked: Asked, vectors: Sequence[NDArray[np.float32]]) -> list[int]:
    pool = _nearest(corpus, vectors)
    return [pool[i] for i in fused_order([corpus.texts[i] for i in pool], weights_of(asked.questions, FADING))]


METHODS: Mapping[str, Callable[[Corpus, Asked, Sequence[NDArray[np.float32]]], list[int]]] = {
    "last": lambda corpus, _, vectors: _nearest(corpus, vectors[:1]),
    "conversation": lambda corpus, _, vectors: _nearest(corpus, vectors),
    "words": _words,
}


class MadeUp:
    """An encoder whose vectors are random: times of a search are the same."""

    identity, dim = "made up", 384

    def encode(self, texts: Sequence[str], query: bool = False) -> NDArray[np.float32]:
        """float32 [n, 384], rows of length one."""
        vector_NE = np.random.default_rng(len(texts[0])).standard_normal((len(texts), self.dim), np.float32)
        vector_NE /= np.linalg.norm(vector_NE, axis=1, keepdims=True)
        return vector_NE


def times(count: int, limit: int) -> Iterator[dict[str, Any]]:
    words = [f"word{n}" for n in range(5000)]
    rng = np.random.default_rng(0)
    with KnowledgeBase(None, encode_tokens=_tokens, encoder=MadeUp(), model_key="bytes", max_tokens=4096) as base:
        drawn = rng.zipf(1.3, (count, 120)) % len(words)
        base.add(Document(str(i), " ".join(words[w] for w in row)) for i, row in enumerate(drawn))
        questions = [" ".join(words[w] for w in rng.zipf(1.3, 12) % len(words)) for _ in range(limit)]
        searches: Mapping[str, Callable[[str], object]] = {
            "meaning": lambda text: base.chunks(base._index.search(MadeUp().encode([text])[0], 3)[0].tolist()),
            "words": lambda text: base.search(Query(text), 3),
        }
        for method, search in searches.items():
            taken = []
            for question in questions:
                began = time.perf_counter()
                search(question)
                taken.append((time.perf_counter() - began) * 1e3)
            p95 = float(np.percentile(taken, 95))
            yield {"chunks": count, "method": method, "n": limit, "median_ms": median(taken), "p95_ms": p95}


def _tokens(text: str) -> NDArray[np.int32]:
    return np.zeros(len(text) // 4, np.int32)


def options(flags: Parser) -> None:
    flags.add("--data", type=Path, default=Path("data"), metavar="DIR", help="folder with text/SET")
    flags.add("--sets", nargs="+", default=SETS, quick=SETS[:2], metavar="SET", help="sets")
    flags.add("--limit", type=integer(1), default=120, quick=40, metavar="N", help="questions of each set")
    flags.add("--tokens", nargs="+", type=integer(1), default=[CHUNK_TOKENS], metavar="N", help="of a chunk, at most")
    flags.add("--chunks", type=integer(0), default=0, metavar="N", help="measure times with so many chunks")


def columns(chosen: Namespace) -> tuple[str, ...]:
    return TIMES if chosen.chunks else COLUMNS


main = Benchmark("retrieval", __doc__, columns, measure, options).main

if __name__ == "__main__":
    sys.exit(main())
