"""A knowledge base: documents cut into chunks, their tokens and embeddings in SQLite, and a vector index over them.

SQLite is the truth. The index file is a cache of it: chunk numbers are never used twice, so an index that holds
exactly the stored numbers is the right one, and any other (the process was killed before it was saved, it is of
another kind) is built again from the stored embeddings. Nothing is embedded twice.

What is stored fits one tokenizer, one encoder and one chunk size. Opened with others it is refused, because the
source documents may be gone: the user decides to delete the directory and to add them again.

A chunk whose KV was computed behind its nearest neighbours (FusionRAG, section 3.1) bears a mark: the digest that names
that KV. The mark goes when any of these neighbours goes, and with it all use of what they told.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Chunk, ConfigError, Document, Hit, RequestError, Tokens
from ragjax.retrieval.chunking import Chunker
from ragjax.retrieval.database import exclusive
from ragjax.retrieval.index import NONE, Ids, IndexKind, VectorIndex, Vectors

_FORMAT = "1"
_BATCH_CHUNKS = 256  # committed together: what a kill can cost
_SCHEMA = """
create table settings (name text primary key, value text not null);
create table documents (id text primary key, digest blob not null);
create table chunks (
    number integer primary key autoincrement,
    id text not null,
    document_id text not null references documents (id) on delete cascade,
    title text not null,
    text text not null,
    tokens blob not null,
    embedding blob not null
);
create index chunks_by_document on chunks (document_id);
"""
_MARKS = """
create table if not exists fused (
    number integer primary key references chunks (number) on delete cascade,
    behind blob not null
);
create table if not exists neighbours (
    number integer not null references fused (number) on delete cascade,
    rank integer not null,
    neighbour integer not null,
    primary key (number, rank)
) without rowid;
create index if not exists fused_by_neighbour on neighbours (neighbour);
"""  # a directory that was made before there were marks gets these tables when it is opened
_CHUNK = """
select number, id, document_id, title, text, tokens, coalesce(behind, x'') from chunks left join fused using (number)
"""
_QUERIES = 64  # chunks whose neighbours are searched together: a request's own search waits no longer than for these
_ROUNDING = 1e-5  # the index may misorder scores that are nearer to each other

_log = logging.getLogger(__name__)


class TextEncoder(Protocol):
    """What a knowledge base needs of a sentence encoder."""

    @property
    def identity(self) -> str:
        """Differs whenever embeddings differ."""

    @property
    def dim(self) -> int:
        """Length of an embedding."""

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Normalised embeddings, float32 [len(texts), dim]."""


@dataclass(frozen=True)
class AddReport:
    """Numbers of documents that were new, that replaced one of the same id, and that were there already."""

    added: int
    replaced: int
    unchanged: int


@dataclass(frozen=True)
class _Prepared:
    document: Document
    chunks: tuple[Chunk, ...]


class KnowledgeBase:
    """Documents that can be searched by meaning. One thread at a time may write; any number may read meanwhile."""

    def __init__(
        self,
        database: sqlite3.Connection,
        index: VectorIndex,
        encoder: TextEncoder,
        chunker: Chunker,
        *,
        name: str,
        directory: Path | None,
    ):
        self.name = name
        self._database = database
        self._index = index
        self._encoder = encoder
        self._chunker = chunker
        self._index_path = None if directory is None else directory / "index.npz"
        self._writing = threading.Lock()
        self._reading = threading.Lock()  # the connection, and the cache of chunks
        self._cache: dict[int, Chunk] = {}

    @classmethod
    def open(
        cls,
        directory: str | Path | None,
        *,
        encode_tokens: Callable[[str], Tokens],
        encoder: TextEncoder,
        model_key: str,
        index_kind: IndexKind | str = IndexKind.FLAT,
        max_tokens: int = 192,
        name: str = "default",
    ) -> KnowledgeBase:
        """Open the knowledge base kept in a directory, made if need be; None keeps it in memory.

        encode_tokens: text → int32 [n] tokens of the serving model; none added, no special ones parsed.
        model_key: identity of the serving model's tokenizer.
        max_tokens: limit of a chunk.
        name: what errors call it.

        Raises:
            ConfigError: the directory is of another model, encoder or chunk size, broken, or in use by another process.
        """
        chunker = Chunker(encode_tokens, max_tokens)
        kind = IndexKind.parse(index_kind)
        place = None if directory is None else Path(directory)
        settings = {
            "format": _FORMAT,
            "tokenizer": model_key,
            "encoder": encoder.identity,
            "tokens per chunk": str(max_tokens),
        }
        database = _connect(place, settings)
        try:
            index = _open_index(database, place, kind, encoder.dim)
        except BaseException:
            database.close()
            raise
        return cls(database, index, encoder, chunker, name=name, directory=place)

    def close(self) -> None:
        """Release the directory. Using the knowledge base afterwards is an error."""
        with self._writing, self._reading:
            self._database.close()

    def __enter__(self) -> KnowledgeBase:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------ writing

    def add(self, documents: Iterable[Document], progress: Callable[[int, int], None] | None = None) -> AddReport:
        """Store documents; one whose id is known replaces it, and one that is known word for word costs nothing.

        progress: called with (documents done, documents in all).

        Raises:
            RequestError: a document without id or text, or the same id twice. Nothing is stored then.
        """
        documents = tuple(documents)
        _check(documents)
        with self._writing:
            known = self._digests(document.id for document in documents)
            changed = [document for document in documents if known.get(document.id) != _digest(document)]
            done = len(documents) - len(changed)
            for batch in self._batches(changed):
                self._store(batch)
                done += len(batch)
                if progress is not None:
                    progress(done, len(documents))
            if changed:
                self._save_index()
        replaced = sum(document.id in known for document in changed)
        return AddReport(len(changed) - replaced, replaced, len(documents) - len(changed))

    def delete(self, document_ids: Iterable[str]) -> int:
        """Remove documents, and say how many.

        Raises:
            RequestError: an id is unknown. Nothing is removed then.
        """
        ids = list(dict.fromkeys(document_ids))
        with self._writing:
            known = self._digests(ids)
            for document_id in ids:
                if document_id not in known:
                    raise self._unknown(document_id)
            with self._transaction() as database:
                gone = self._forget(database, ids)
            self._index.remove(gone)
            if gone:
                self._save_index()
        return len(ids)

    def mark_fused(self, number: int, neighbours: Sequence[int], behind: bytes) -> bool:
        """Note that the KV of a chunk is kept as computed behind these neighbours, in this order.

        behind: digest of their tokens (`ragjax.cache.cache.neighbours`), which `Chunk.behind` has from now on.
        False, and no mark, if one of them has been deleted meanwhile.
        """
        numbers = (number, *neighbours)
        with self._writing, self._transaction() as database:
            if any(not database.execute("select 1 from chunks where number = ?", (n,)).fetchone() for n in numbers):
                return False
            database.execute("delete from fused where number = ?", (number,))
            database.execute("insert into fused values (?, ?)", (number, behind))
            rows = [(number, rank, neighbour) for rank, neighbour in enumerate(neighbours)]
            database.executemany("insert into neighbours values (?, ?, ?)", rows)
            self._cache.pop(number, None)
        return True

    def _batches(self, documents: Sequence[Document]) -> Iterator[list[_Prepared]]:
        batch: list[_Prepared] = []
        for document in documents:
            batch.append(_Prepared(document, self._chunker.chunks(document)))
            if sum(len(prepared.chunks) for prepared in batch) >= _BATCH_CHUNKS:
                yield batch
                batch = []
        if batch:
            yield batch

    def _store(self, batch: Sequence[_Prepared]) -> None:
        chunks = [chunk for prepared in batch for chunk in prepared.chunks]
        embeddings = self._encoder.encode([chunk.text for chunk in chunks])
        with self._transaction() as database:
            gone = self._forget(database, [prepared.document.id for prepared in batch])
            rows = [(prepared.document.id, _digest(prepared.document)) for prepared in batch]
            database.executemany("insert into documents values (?, ?)", rows)
            numbers = [_insert(database, chunk, row) for chunk, row in zip(chunks, embeddings, strict=True)]
        self._index.update(gone, np.array(numbers, np.int64), embeddings)

    def _forget(self, database: sqlite3.Connection, document_ids: Sequence[str]) -> list[int]:
        """Delete what is stored of these documents, and marks that rest on it; returns the numbers of their chunks."""
        gone = [number for document_id in document_ids for number in _numbers(database, document_id)]
        unmarked = [number for neighbour in gone for number in _unmark(database, neighbour)]
        database.executemany("delete from documents where id = ?", [(document_id,) for document_id in document_ids])
        for number in (*gone, *unmarked):
            self._cache.pop(number, None)
        return gone

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._reading, self._database:
            self._database.execute("begin immediate")
            yield self._database

    def _save_index(self) -> None:
        if self._index_path is not None:
            self._index.save(self._index_path)

    # ------------------------------------------------------------------------------------------ reading

    def search(self, question: str, k: int) -> tuple[Hit, ...]:
        """The k chunks nearest to the question, best first; fewer if there are fewer.

        Raises:
            RequestError: the knowledge base or the question is empty.
        """
        if k < 1:
            return ()
        count = len(self._index)
        if not count:
            raise RequestError(f"knowledge base {self.name!r} is empty: add documents first", param="rag.knowledge")
        if not question.strip():
            raise RequestError("the question is empty: there is nothing to search for", param="messages")
        # faiss makes room for k results, however few there are
        numbers, scores = self._index.search(self._encoder.encode([question])[0], min(k, count))
        found = [(int(number), float(score)) for number, score in zip(numbers, scores, strict=True) if number != NONE]
        chunks = self._chunks([number for number, _ in found])
        return tuple(Hit(chunks[number], score) for number, score in found if number in chunks)

    @property
    def preprocessed(self) -> bool:
        """Whether the KV of every chunk is kept as computed behind its neighbours (`mark_fused`)."""
        query = "select exists(select 1 from chunks where number not in (select number from fused))"
        with self._reading:
            (missing,) = self._database.execute(query).fetchone()
        return not missing

    def document(self, document_id: str) -> tuple[Chunk, ...]:
        """A stored document's chunks, in order.

        Raises:
            RequestError: the id is unknown.
        """
        with self._reading:
            rows = self._database.execute(f"{_CHUNK} where document_id = ? order by number", (document_id,)).fetchall()
        if not rows:
            raise self._unknown(document_id)
        return tuple(_chunk(row)[1] for row in rows)

    def chunks(self, numbers: Iterable[int]) -> dict[int, Chunk]:
        """Those of the chunks with these numbers that are stored, by number."""
        with self._reading:
            return self._read(numbers)

    def neighbours(self, n: int) -> dict[int, tuple[int, ...]]:
        """For every chunk, by number, the numbers of its n most similar other ones, best first; ties by number.

        Similarity is that of the embeddings, as far as the index finds it (`VectorIndex.exact`). What has a chunk's
        very tokens tells nothing new and is no neighbour of it; and of several equal ones only the first is taken.

        Raises:
            ValueError: if n is not positive.
        """
        if n < 1:
            raise ValueError(f"a chunk has at least 1 neighbour, not {n}")
        with self._reading:
            rows = self._database.execute("select number, tokens, embedding from chunks order by number").fetchall()
        if not rows:
            return {}
        store = _Embedded.of(rows)
        found: dict[int, tuple[int, ...]] = {}
        for begin in range(0, len(rows), _QUERIES):
            found |= self._nearest(store, store.numbers_N[begin : begin + _QUERIES], n)
        return found

    def _nearest(self, store: _Embedded, numbers_Q: Ids, n: int) -> dict[int, tuple[int, ...]]:
        """Asks the index for ever more candidates until those behind the last one cannot matter."""
        found: dict[int, tuple[int, ...]] = {}
        left, k = [int(number) for number in numbers_Q], n + 1
        while left:
            ids_QK, scores_QK = self._index.search(store.embedding_NE[[store.row[number] for number in left]], k)
            enough = k >= len(self._index)
            rest = []
            for number, ids_K, scores_K in zip(left, ids_QK, scores_QK, strict=True):
                nearest = store.ranked(number, ids_K.tolist())[:n]
                if enough or (len(nearest) == n and scores_K[-1] < nearest[-1][0] - _ROUNDING):
                    found[number] = tuple(neighbour for _, neighbour in nearest)
                else:
                    rest.append(number)
            left, k = rest, 2 * k
        return found

    @property
    def document_ids(self) -> frozenset[str]:
        """The ids of all documents."""
        with self._reading:
            return frozenset(row[0] for row in self._database.execute("select id from documents"))

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._index)

    def _digests(self, document_ids: Iterable[str]) -> dict[str, bytes]:
        """Content hashes of those that are stored."""
        sql = "select id, digest from documents where id = ?"
        with self._reading:
            return dict(row for name in document_ids for row in self._database.execute(sql, (name,)))

    def _chunks(self, numbers: Sequence[int]) -> dict[int, Chunk]:
        """Those of the chunks that are (still) stored. Cached ones do not wait for a write to end."""
        found = {number: chunk for number in numbers if (chunk := self._cache.get(number)) is not None}
        absent = [number for number in numbers if number not in found]
        if absent:
            with self._reading:
                fetched = self._read(absent)
                self._cache.update(fetched)
            found.update(fetched)
        return found

    def _read(self, numbers: Iterable[int]) -> dict[int, Chunk]:
        sql = f"{_CHUNK} where number = ?"
        return dict(_chunk(row) for number in numbers for row in self._database.execute(sql, (number,)))

    def _unknown(self, document_id: str) -> RequestError:
        return RequestError(
            f"no document {document_id!r} in knowledge base {self.name!r}",
            param="rag.documents",
            code="document_not_found",
        )


# -------------------------------------------------------------------------------------------- neighbours


@dataclass(frozen=True)
class _Embedded:
    """Chunks as neighbours of each other: N numbers, embeddings [N, E], tokens, and the row of each number."""

    numbers_N: Ids
    embedding_NE: Vectors
    tokens: tuple[bytes, ...]
    row: dict[int, int]

    @staticmethod
    def of(rows: Sequence[tuple[int, bytes, bytes]]) -> _Embedded:
        numbers = np.array([number for number, _, _ in rows], np.int64)
        embedding = np.frombuffer(b"".join(blob for _, _, blob in rows), np.float32).reshape(len(rows), -1)
        tokens = tuple(raw for _, raw, _ in rows)
        return _Embedded(numbers, embedding, tokens, {number: i for i, (number, _, _) in enumerate(rows)})

    def ranked(self, number: int, candidates: Iterable[int]) -> list[tuple[float, int]]:
        """(score, number) of the candidates, best first, without those whose tokens were there before.

        Scores are computed anew, pair by pair, in float64: those of the index depend in their last bits on what else
        was searched, and an order that wavers would have KV computed again for nothing.
        """
        known = [candidate for candidate in candidates if candidate in self.row]
        query_E = self.embedding_NE[self.row[number]].astype(np.float64)
        scores = [float((self.embedding_NE[self.row[candidate]] * query_E).sum()) for candidate in known]
        seen, ranked = {self.tokens[self.row[number]]}, []
        for score, candidate in sorted(zip(scores, known, strict=True), key=lambda pair: (-pair[0], pair[1])):
            raw = self.tokens[self.row[candidate]]
            if raw not in seen:
                seen.add(raw)
                ranked.append((score, candidate))
        return ranked


# --------------------------------------------------------------------------------------------- documents


def _check(documents: Sequence[Document]) -> None:
    seen: set[str] = set()
    for document in documents:
        if not document.id.strip():
            raise RequestError("a document has an empty id", param="documents")
        if document.id in seen:
            raise RequestError(f"document {document.id!r} is given twice", param="documents")
        if not document.text.strip():
            raise RequestError(f"document {document.id!r} has no text", param="documents")
        try:
            "".join((document.id, document.title, document.text)).encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(f"document {document.id!r} is not valid Unicode: {error}", param="documents") from error
        seen.add(document.id)


def _digest(document: Document) -> bytes:
    parts = (document.title, document.text)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()


# ---------------------------------------------------------------------------------------------- storage


def _connect(directory: Path | None, settings: dict[str, str]) -> sqlite3.Connection:
    """An open database that fits these settings, held by this process alone."""
    place = None if directory is None else directory / "chunks.sqlite"

    def prepare(database: sqlite3.Connection) -> None:
        database.execute("pragma foreign_keys = on")
        database.execute("begin exclusive")
        _check_settings(database, place or ":memory:", settings)
        _run(database, _MARKS)
        database.execute("commit")

    return exclusive(place, prepare, f"delete {directory} and add the documents again", implicit=False)


def _check_settings(database: sqlite3.Connection, place: str | Path, settings: dict[str, str]) -> None:
    if not database.execute("select count(*) from sqlite_master").fetchone()[0]:
        _run(database, _SCHEMA)
        database.executemany("insert into settings values (?, ?)", settings.items())
        return
    stored = dict(database.execute("select name, value from settings"))
    for name, value in settings.items():
        if stored.get(name) != value:
            raise ConfigError(
                f"{place}: was made with {name} {stored.get(name)!r}, not {value!r}; "
                "choose another directory, or delete this one and add the documents again"
            )


def _run(database: sqlite3.Connection, statements: str) -> None:
    for statement in filter(str.strip, statements.split(";")):
        database.execute(statement)


def _open_index(database: sqlite3.Connection, directory: Path | None, kind: IndexKind, dim: int) -> VectorIndex:
    """The saved index if it is the one of this database, else a new one from the stored embeddings."""
    numbers = {number for (number,) in database.execute("select number from chunks")}
    path = None if directory is None else directory / "index.npz"
    if path is not None and path.exists():
        try:
            index = VectorIndex.load(path)
        except ConfigError as error:
            _log.warning("%s", error)
        else:
            if index.kind is kind and index.dim == dim and index.ids == numbers:
                return index
    index = VectorIndex(kind, dim)
    if numbers:
        _log.info("building the %s index of %d chunks", kind, len(numbers))
        rows = database.execute("select number, embedding from chunks order by number").fetchall()
        vectors = np.frombuffer(b"".join(blob for _, blob in rows), np.float32).reshape(len(rows), dim)
        index.add(np.array([number for number, _ in rows], np.int64), vectors)
        if path is not None:
            index.save(path)
    return index


def _insert(database: sqlite3.Connection, chunk: Chunk, embedding: NDArray[np.float32]) -> int:
    values = (chunk.id, chunk.document_id, chunk.title, chunk.text, chunk.tokens.tobytes(), embedding.tobytes())
    sql = "insert into chunks (id, document_id, title, text, tokens, embedding) values (?, ?, ?, ?, ?, ?)"
    number = database.execute(sql, values).lastrowid
    assert number is not None
    return number


def _numbers(database: sqlite3.Connection, document_id: str) -> list[int]:
    return [row[0] for row in database.execute("select number from chunks where document_id = ?", (document_id,))]


def _unmark(database: sqlite3.Connection, neighbour: int) -> list[int]:
    """Take the marks from the chunks that were fused behind a neighbour; returns their numbers."""
    sql = "delete from fused where number in (select number from neighbours where neighbour = ?) returning number"
    return [number for (number,) in database.execute(sql, (neighbour,)).fetchall()]


def _chunk(row: tuple[int, str, str, str, str, bytes, bytes]) -> tuple[int, Chunk]:
    number, chunk_id, document_id, title, text, tokens, behind = row
    return number, Chunk(chunk_id, document_id, title, text, np.frombuffer(tokens, np.int32), behind)
