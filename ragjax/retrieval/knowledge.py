"""A knowledge base: documents cut into chunks, their tokens and embeddings in SQLite, and a vector index over them.

SQLite keeps all; the index is built from the stored embeddings when the base is opened. Nothing is embedded twice. What
is stored fits one tokenizer, encoder and chunk size; opened with others it is refused.

A chunk whose KV was computed behind its nearest neighbours (FusionRAG, section 3.1) bears a mark: the digest that names
that KV. The mark goes when any of these neighbours goes, and with it all use of what they told.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ragjax.core import CHUNK_TOKENS, Chunk, Document, Hit, Indexing, RequestError, Tokens, is_unicode
from ragjax.core.recent import Recent
from ragjax.retrieval import chunk_store
from ragjax.retrieval.chunk_store import ChunkStore, nearest_chunks
from ragjax.retrieval.chunking import Chunker, finish
from ragjax.retrieval.database import free
from ragjax.retrieval.index import NONE, Ids, Vectors
from ragjax.retrieval.words import POOL, fused_order, weights_of

_BATCH_CHUNKS = 256  # committed together: what a kill can cost; and put into the index between writes of others
_STEP_CHUNKS = 16  # embedded in a step: a second or so, and batches of the encoder are full
_WIDTHS = (1, 4, 16)  # times as many chunks as are wanted are looked at, before all that a filter leaves are
_ASKED = 64  # chunks that were found lately and are remembered
_REMEMBERED = 1024  # vectors of questions, a kilobyte or two each, and what was found
FADING = 0.4  # what a question counts for the next one of a conversation; measured by benchmarks.retrieval
_BEFORE = 8  # questions before the last one that count
_QUERIES = 64  # chunks whose neighbours are searched together: a request's own search waits no longer than for these

_log = logging.getLogger(__name__)


class TextEncoder(Protocol):
    """A sentence encoder: `identity` differs whenever embeddings differ; they are normalised float32 [texts, dim]."""

    @property
    def identity(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def encode(self, texts: Sequence[str], query: bool = False) -> NDArray[np.float32]: ...


@dataclass(frozen=True)
class AddReport:
    """Numbers of documents that were new, that replaced one of the same id, and that were there already."""

    added: int
    replaced: int
    unchanged: int


@dataclass(frozen=True)
class SearchStage:
    hits: tuple[Hit, ...]
    final: bool


@dataclass(frozen=True)
class Query:
    """A question with the questions before it, the oldest first; vectors are remembered by tenant."""

    text: str
    before: tuple[str, ...] = ()
    tenant: str = ""

    @property
    def questions(self) -> tuple[str, ...]:
        return (self.text, *self.before[: -_BEFORE - 1 : -1])


class KnowledgeBase(ChunkStore):
    """Documents that can be searched by meaning. Any thread may read and write.

    A write waits until others have stored what they have embedded, not while they embed. Of a long document it waits
    for a part of the chunks to be indexed, not for all.
    """

    def __init__(
        self,
        directory: str | Path | None,
        *,
        encode_tokens: Callable[[str], Tokens],
        encoder: TextEncoder,
        model_key: str,
        index_kind: str = "flat",
        max_tokens: int = CHUNK_TOKENS,
        name: str = "default",
    ):
        """Open the knowledge base kept in a directory, made if need be; None keeps it in memory.

        encode_tokens: text → tokens of the serving model; none added, no special ones parsed. model_key: identity of
        its tokenizer. max_tokens: of a chunk. name: what errors call it.

        Raises:
            ConfigError: the directory is of another model, encoder or chunk size, broken, or in use by another process.
        """
        self._chunker = Chunker(encode_tokens, max_tokens)
        self._encoder = encoder
        place = None if directory is None else Path(directory)
        self._index_path = None if place is None else place / "index.npz"
        settings = {
            "format": chunk_store.FORMAT,
            "tokenizer": model_key,
            "encoder": encoder.identity,
            "tokens per chunk": str(max_tokens),
        }
        super().__init__(chunk_store.connect(place, settings), name)
        try:
            self._index = chunk_store.open_index(self._database, self._index_path, index_kind, encoder.dim)
        except BaseException:
            self._database.close()
            raise
        self._unindexed: set[int] = set()  # chunks that are stored, and not in the index yet
        self._asked: deque[int] = deque(maxlen=_ASKED)  # the latest first
        self.indexing: Indexing | None = None  # how far its source is read; None: it has none
        self._vectors = Recent[tuple[str, str], Vectors](_REMEMBERED)  # of questions, by tenant and text
        # by searches, as numbers with similarities
        self._found = Recent[bytes, tuple[tuple[int, float], ...]](_REMEMBERED)

    def close(self) -> None:
        with self._writing, self._reading:
            if not self._closed and self._index_path is not None and not self._index_path.exists():
                try:
                    self._index.save(self._index_path)
                except OSError as error:
                    _log.warning("%s: not saved, and built again at the next start: %s", self._index_path, error)
            self._closed = True
            self._database.close()

    def __enter__(self) -> KnowledgeBase:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, documents: Iterable[Document]) -> AddReport:
        """Store documents; one whose id is known replaces it, and one that is known word for word costs nothing."""
        return finish(self.add_steps(documents))

    def add_steps(
        self, documents: Iterable[Document], *, max_tokens: int | None = None, check: Callable[[], None] = lambda: None
    ) -> Generator[None, None, AddReport]:
        """Add documents (see `add`) in steps, each cutting some text or embedding some chunks.

        Not all steps need be taken: chunks that were stored before stay. check: called before documents are stored,
        when nothing is written by others until they are. What it raises ends this, and nothing more is stored.
        """
        documents = tuple(documents)
        _check(documents)
        chunker = self._chunker if max_tokens is None else replace(self._chunker, max_tokens=max_tokens)
        known = self._digests(document.id for document in documents)
        changed = [document for document in documents if known.get(document.id) != _digest(document, max_tokens)]
        batch: list[tuple[Document, tuple[Chunk, ...]]] = []
        for document in changed:
            batch.append((document, (yield from chunker.chunk_steps(document))))
            if document is not changed[-1] and sum(len(chunks) for _, chunks in batch) < _BATCH_CHUNKS:
                continue
            yield from self._store(batch, max_tokens, check)
            batch = []
        replaced = sum(document.id in known for document in changed)
        return AddReport(len(changed) - replaced, replaced, len(documents) - len(changed))

    def delete(self, document_ids: Iterable[str], check: Callable[[], None] = lambda: None) -> int:
        """Remove documents, and say how many. check: called when nothing is written by others until they are gone."""
        ids = list(dict.fromkeys(document_ids))
        with self._writing:
            check()
            known = self._digests(ids)
            for document_id in ids:
                if document_id not in known:
                    raise self._unknown(document_id)

            def forget() -> list[int]:
                with self._transaction() as database:
                    return self._forget(database, ids)

            self._update_index(free(self._database, forget))
        return len(ids)

    def _store(
        self, batch: Sequence[tuple[Document, tuple[Chunk, ...]]], max_tokens: int | None, check: Callable[[], None]
    ) -> Generator[None, None, None]:
        chunks = [chunk for _, cut in batch for chunk in cut]
        known = self._embedded(document.id for document, _ in batch)
        embeddings = yield from self._embeddings([chunk.text for chunk in chunks], known)
        rows = [(document.id, _digest(document, max_tokens), document.filename or None) for document, _ in batch]
        with self._writing:
            check()
            gone, numbers = self._replace(rows, chunks, embeddings)
            self._update_index(gone)
            self._unindexed.update(numbers)
        # others may write between the parts that are put into the index, and delete some of them
        for start in range(0, len(numbers), _BATCH_CHUNKS):
            with self._writing:
                if self._closed:  # the next start puts them there
                    return
                end = min(start + _BATCH_CHUNKS, len(numbers))
                left = [i for i in range(start, end) if numbers[i] in self._unindexed]
                self._unindexed.difference_update(numbers[start:end])
                self._update_index((), [numbers[i] for i in left], embeddings[left])

    def _embeddings(self, texts: Sequence[str], known: Mapping[str, Vectors]) -> Generator[None, None, Vectors]:
        """Embed texts that are not known, float32 [len(texts), dim]; those of like length together, which pads less."""
        embeddings = np.empty((len(texts), self._encoder.dim), np.float32)
        for i, text in enumerate(texts):
            if text in known:
                embeddings[i] = known[text]
        by_length = sorted((i for i, text in enumerate(texts) if text not in known), key=lambda i: len(texts[i]))
        for start in range(0, len(by_length), _STEP_CHUNKS):
            if start:
                yield
            some = by_length[start : start + _STEP_CHUNKS]
            embeddings[some] = self._encoder.encode([texts[i] for i in some])
        return embeddings

    def _update_index(
        self, gone: Sequence[int], numbers: Sequence[int] = (), embeddings: Vectors | None = None
    ) -> None:
        if self._index_path is not None:
            self._index_path.unlink(missing_ok=True)
        new = np.empty((0, self._encoder.dim), np.float32) if embeddings is None else embeddings
        indexed = [number for number in gone if number not in self._unindexed]
        self._unindexed.difference_update(gone)
        self._index.update(indexed, np.array(numbers, np.int64), new)
        self._found.clear()

    def search(
        self, question: str | Query, k: int, *, within: Container[str] | None = None, min_score: float | None = None
    ) -> tuple[Hit, ...]:
        """The k chunks that fit the question best, nearest first; fewer if there are fewer.

        They are chosen by meaning and words among the nearest (`ragjax.retrieval.words`). The questions before it count
        too, each less than the next one. within: ids of the documents that may be found (None: all). If few of the
        nearest chunks are theirs, all of theirs are compared. min_score: the least cosine similarity. RequestError: the
        knowledge base or the question is empty.
        """
        query = Query(question) if isinstance(question, str) else question
        count = self._searchable(query, k)
        if not count:
            return ()
        least = -math.inf if min_score is None else min_score
        # the earlier questions of a conversation are searched in each turn
        key = hashlib.blake2b(repr((query.tenant, query.questions, count, least)).encode()).digest()
        known, age = self._found.get(key), self._found.age
        if within is None and known is not None:
            self._asked.extendleft(number for number, _ in reversed(known))
            chunks = self._chunks([number for number, _ in known])
            return tuple(Hit(chunks[number], score) for number, score in known if number in chunks)
        best = self._best(query, self._nearest(self._vector(query), max(count, POOL), within, least), count)
        if within is None:
            self._found.keep(key, tuple((number, hit.score) for number, hit in best), age)
        return tuple(hit for _, hit in best)

    def _nearest(
        self, vector: Vectors, count: int, within: Container[str] | None, least: float
    ) -> list[tuple[int, Hit]]:
        count = min(count, len(self._index))
        if within is None:
            return _fitting(self._hits(*self._index.search(vector, count)), least)
        for wide in _WIDTHS:
            hits = self._hits(*self._index.search(vector, wide * count))
            fit = _fitting(hits, least, within)
            seen_all = wide * count >= len(self._index) or (hits and hits[-1][1].score < least)
            if len(fit) >= count or (self._index.exact and seen_all):
                return fit[:count]
        wanted = [document_id for document_id in self.document_ids if document_id in within]
        with self._opened():
            numbers = np.array(chunk_store.numbers_of(self._database, wanted), np.int64)
        return _fitting(self._hits(*self._index.search_among(vector, count, numbers)), least) if len(numbers) else []

    def _best(self, query: Query, nearest: Sequence[tuple[int, Hit]], count: int) -> list[tuple[int, Hit]]:
        """Choose those of the nearest chunks that fit the question best, by meaning and words; nearest first."""
        best = sorted(fused_order([hit.chunk.text for _, hit in nearest], weights_of(query.questions, FADING))[:count])
        self._asked.extendleft(nearest[i][0] for i in reversed(best))
        return [nearest[i] for i in best]

    def stages(self, question: str | Query, k: int, n: int) -> Iterator[SearchStage]:
        """The search in at most n stages (`VectorIndex.stages`); the last one finds what `search` does."""
        query = Query(question) if isinstance(question, str) else question
        if not (count := self._searchable(query, k)):
            return iter((SearchStage((), True),))
        stages = self._index.stages(self._vector(query), min(max(count, POOL), len(self._index)), n)
        found = ((self._best(query, self._hits(stage.ids, stage.scores), count), stage.final) for stage in stages)
        return (SearchStage(tuple(hit for _, hit in best), final) for best, final in found)

    def _vector(self, query: Query) -> Vectors:
        rows: list[Vectors] = []
        for text in query.questions:  # each is embedded by itself, so that it is the same in every turn
            known = self._vectors.get((query.tenant, text))
            if known is None:
                known = self._encoder.encode([text], query=True)[0]
                self._vectors.keep((query.tenant, text), known)
            rows.append(known)
        if len(rows) == 1:
            return rows[0]
        total_E = (FADING ** np.arange(len(rows))) @ np.stack(rows)
        return np.asarray(total_E / np.linalg.norm(total_E), np.float32)

    def _searchable(self, query: Query, k: int) -> int:
        """Number of chunks to search for: faiss makes room for k results, however few there are."""
        if k < 1:
            return 0
        count = len(self._index)
        if not count and self.indexing is not None and self.indexing.running:
            return 0
        if not count:
            raise RequestError(f"knowledge base {self.name!r} is empty: add documents first", param="rag.knowledge")
        if not query.text.strip():
            raise RequestError("the question is empty: there is nothing to search for", param="messages")
        return min(k, count)

    def _hits(self, numbers: Ids, scores: Vectors) -> list[tuple[int, Hit]]:
        found = [(int(number), float(score)) for number, score in zip(numbers, scores, strict=True) if number != NONE]
        chunks = self._chunks([number for number, _ in found])
        return [(number, Hit(chunks[number], score)) for number, score in found if number in chunks]

    def take_asked(self) -> list[int]:
        """Numbers of chunks that searches found since the last call, the latest first."""
        asked = list[int]()
        while self._asked:
            asked.append(self._asked.popleft())
        return list(dict.fromkeys(asked))

    def neighbours(self, n: int, numbers: Iterable[int] | None = None) -> dict[int, tuple[int, ...]]:
        """For chunks by number (None: all), the numbers of their n most similar other ones, best first; ties by number.

        What has a chunk's very tokens is no neighbour of it; and of several equal ones only the first is taken.
        """
        found: dict[int, tuple[int, ...]] = {}
        own = self.numbers if numbers is None else tuple(numbers)
        for begin in range(0, len(own), _QUERIES):
            with self._opened():
                found |= nearest_chunks(self._database, self._index, own[begin : begin + _QUERIES], n)
        return found

    def __len__(self) -> int:
        return len(self._index)


def _fitting(
    hits: Iterable[tuple[int, Hit]], least: float, within: Container[str] | None = None
) -> list[tuple[int, Hit]]:
    return [
        (number, hit)
        for number, hit in hits
        if hit.score >= least and (within is None or hit.chunk.document_id in within)
    ]


def _check(documents: Sequence[Document]) -> None:
    seen: set[str] = set()
    for document in documents:
        if not document.id.strip():
            raise RequestError("a document has an empty id", param="documents")
        if document.id in seen:
            raise RequestError(f"document {document.id!r} is given twice", param="documents")
        if not document.text.strip():
            raise RequestError(f"document {document.id!r} has no text", param="documents")
        if not is_unicode(document.id + document.title + document.text):
            raise RequestError(f"document {document.id!r} is not valid Unicode", param="documents")
        seen.add(document.id)


def _digest(document: Document, max_tokens: int | None) -> bytes:
    """Hash of what a document's chunks are made from; what it does not have changes nothing of the hash."""
    own = (max_tokens, document.filename or None, document.places or None)  # None: the base's own number of tokens
    parts = (document.title, document.text, *(part for part in own if part is not None))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
