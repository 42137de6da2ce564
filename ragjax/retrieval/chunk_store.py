"""The SQLite file of a knowledge base: its tables, the settings it must fit, the vector index over it, and the most
similar chunks of every chunk, behind which KV is computed (FusionRAG, section 3.1).
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Chunk, ConfigError, RequestError
from ragjax.retrieval.database import FairLock, checksum, compare_schema, exclusive, transaction
from ragjax.retrieval.index import IndexShape, VectorIndex, Vectors

FORMAT = "1"
"""Version of the tables."""

_SCHEMA = """
create table settings (name text primary key, value text not null);
create table documents (id text primary key, digest blob not null, filename text);
create table chunks (
    number integer primary key autoincrement,
    id text not null,
    document_id text not null references documents (id) on delete cascade,
    title text not null,
    text text not null,
    tokens blob not null,
    embedding blob not null,
    page integer,
    heading text
);
create index chunks_by_document on chunks (document_id);
create table fused (
    number integer primary key references chunks (number) on delete cascade,
    behind blob not null
);
create table neighbours (
    number integer not null references fused (number) on delete cascade,
    rank integer not null,
    neighbour integer not null,
    primary key (number, rank)
) without rowid;
create index fused_by_neighbour on neighbours (neighbour);
create table checksums (
    number integer primary key references chunks (number) on delete cascade,
    checksum blob not null
);
create table files (name text primary key, note text not null) without rowid;
"""
_SIZES = "create temp table sizes (document_id text primary key, size integer not null) without rowid"
_MEASURED = "select document_id, sum(length(cast(text as blob)) + length(tokens)) from chunks"
_CONTENT = "id, document_id, title, text, tokens, embedding, page, heading"
_CHUNK = """
select number, chunks.id, document_id, title, text, tokens, coalesce(behind, x''), coalesce(filename, ''), page, heading
from chunks left join fused using (number) join documents on documents.id = document_id
"""
_FLAGS = {"encoder": "; or name the --encoder that it was made with", "tokens per chunk": "; or give --chunk-tokens {}"}
"""What uses a directory that was made with other settings."""

_CACHED = 20_000  # chunks in memory, a few kilobytes each; those that were read first leave
_ROUNDING = 1e-5  # the index may misorder scores that are nearer to each other

_log = logging.getLogger(__name__)


def connect(directory: Path | None, settings: dict[str, str]) -> sqlite3.Connection:
    """An open database that fits these settings, held by this process alone."""
    place = None if directory is None else directory / "chunks.sqlite"

    def prepare(database: sqlite3.Connection) -> None:
        database.execute("pragma foreign_keys = on")
        database.execute("pragma temp_store = memory")
        database.execute("begin exclusive")
        _check_settings(database, place or ":memory:", settings)
        compare_schema(database, _SCHEMA)
        rows = database.execute(f"select number, checksum, {_CONTENT} from chunks left join checksums using (number)")
        for number, known, *content in rows:
            if known != _checksum(content):
                raise sqlite3.DatabaseError(f"chunk {number} is not as it was written")
        database.execute(_SIZES)  # what can be counted again is not kept on disk
        database.execute(f"insert into sizes {_MEASURED} group by document_id")
        database.execute("commit")

    return exclusive(place, prepare, f"delete {directory} and add the documents again")


def _check_settings(database: sqlite3.Connection, place: str | Path, settings: dict[str, str]) -> None:
    if not database.execute("select count(*) from sqlite_master").fetchone()[0]:
        for statement in filter(str.strip, _SCHEMA.split(";")):
            database.execute(statement)
        database.executemany("insert into settings values (?, ?)", settings.items())
        return
    stored = dict(database.execute("select name, value from settings"))
    for name, value in settings.items():
        if stored.get(name) != value:
            raise ConfigError(
                f"{place}: was made with {name} {stored.get(name)!r}, not {value!r}; choose another directory, "
                f"or delete this one and add the documents again{_FLAGS.get(name, '').format(stored.get(name))}"
            )


def _checksum(content: Sequence[object]) -> bytes:
    """Checksum of a row of `_CONTENT`, without the place if the chunk has none."""
    *others, page, heading = content
    return checksum(others if page is heading is None else content)


def open_index(database: sqlite3.Connection, kept: Path | None, kind: str, dim: int) -> VectorIndex:
    """An index of all stored chunks: the kept one, if it is just that."""
    rows = database.execute("select number, embedding from chunks order by number").fetchall()
    if kept is not None and kept.exists():
        try:
            index = VectorIndex.load(kept)
            if (
                index.shape == IndexShape.parse(kind)
                and index.dim == dim
                and index.ids == {number for number, _ in rows}
            ):
                return index
        except ConfigError as error:
            _log.warning("%s", error)
        kept.unlink()
    index = VectorIndex(kind, dim)
    vectors = np.frombuffer(b"".join(blob for _, blob in rows), np.float32).reshape(len(rows), dim)
    index.add(np.array([number for number, _ in rows], np.int64), vectors)
    return index


def insert(database: sqlite3.Connection, chunk: Chunk, embedding: NDArray[np.float32]) -> int:
    """Store a chunk and its embedding, float32 [E]; returns its number."""
    raw = (chunk.tokens.tobytes(), embedding.tobytes())
    values = (chunk.id, chunk.document_id, chunk.title, chunk.text, *raw, chunk.page, chunk.heading)
    number = database.execute(f"insert into chunks ({_CONTENT}) values (?, ?, ?, ?, ?, ?, ?, ?)", values).lastrowid
    assert number is not None
    database.execute("insert into checksums values (?, ?)", (number, _checksum(values)))
    return number


def numbers_of(database: sqlite3.Connection, document_ids: Iterable[str]) -> list[int]:
    sql = "select number from chunks where document_id = ?"
    return [number for document_id in document_ids for (number,) in database.execute(sql, (document_id,))]


def _chunk_of(row: tuple[Any, ...]) -> tuple[int, Chunk]:
    number, chunk_id, document_id, title, text, tokens, *about = row
    return number, Chunk(chunk_id, document_id, title, text, np.frombuffer(tokens, np.int32), *about)


def nearest_chunks(
    database: sqlite3.Connection, index: VectorIndex, numbers: Sequence[int], n: int
) -> dict[int, tuple[int, ...]]:
    """Do the work of `KnowledgeBase.neighbours` for chunks of these numbers; those that are gone are left out.

    Asks the index for twice as many candidates until those after the last one cannot matter.
    """
    own = _EmbeddedChunks.read(database, numbers)
    found: dict[int, tuple[int, ...]] = {}
    left, k = list(own.row), n + 1
    while left:
        ids_QK, scores_QK = index.search(own.embedding_NE[[own.row[number] for number in left]], k)
        store = _EmbeddedChunks.read(database, {*left, *ids_QK.ravel().tolist()})
        enough = k >= len(index)
        rest = []
        for number, ids_K, scores_K in zip(left, ids_QK, scores_QK, strict=True):
            nearest = store.ranked(number, ids_K.tolist())[:n]
            if enough or (len(nearest) == n and scores_K[-1] < nearest[-1][0] - _ROUNDING):
                found[number] = tuple(neighbour for _, neighbour in nearest)
            else:
                rest.append(number)
        left, k = rest, 2 * k
    return found


@dataclass(frozen=True)
class _EmbeddedChunks:
    embedding_NE: Vectors
    tokens: tuple[bytes, ...]
    row: dict[int, int]

    @staticmethod
    def read(database: sqlite3.Connection, numbers: Iterable[int]) -> _EmbeddedChunks:
        sql = "select number, tokens, embedding from chunks where number = ?"
        rows = [row for number in sorted(numbers) for row in database.execute(sql, (number,))]
        embedding = np.frombuffer(b"".join(blob for _, _, blob in rows), np.float32).reshape(max(len(rows), 1), -1)
        tokens = tuple(raw for _, raw, _ in rows)
        return _EmbeddedChunks(embedding, tokens, {number: i for i, (number, _, _) in enumerate(rows)})

    def ranked(self, number: int, candidates: Iterable[int]) -> list[tuple[float, int]]:
        """(score, number) of the candidates, best first, without those whose tokens were there before.

        Scores are computed again, pair by pair, in float64: those of the index depend in their last bits on what else
        was searched, and an order that changes would have KV computed again for nothing.
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


class ChunkStore:
    """Documents and their chunks in an open database. Any thread may read and write."""

    def __init__(self, database: sqlite3.Connection, name: str):
        self.name = name
        self.changes = 0  # counts the times that chunks came or went
        self._database = database
        self._writing = FairLock()
        self._reading = threading.Lock()  # the connection, and the cache of chunks
        self._cache: dict[int, Chunk] = {}
        self._extent: tuple[int, int] | None = None  # counted when it is asked for; None again after a write
        self._closed = False

    def document(self, document_id: str) -> tuple[Chunk, ...]:
        """A stored document's chunks, in order. Raises RequestError if the id is unknown."""
        rows = self._rows(f"{_CHUNK} where document_id = ? order by number", document_id)
        if not rows:
            raise self._unknown(document_id)
        return tuple(_chunk_of(row)[1] for row in rows)

    def chunks(self, numbers: Iterable[int]) -> dict[int, Chunk]:
        with self._opened():
            return self._read(numbers)

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(number for (number,) in self._rows("select number from chunks order by number"))

    @property
    def document_ids(self) -> frozenset[str]:
        return frozenset(name for (name,) in self._rows("select id from documents"))

    def sizes(
        self, count: int = -1, *, after: str | None = None, before: str | None = None, last: bool = False
    ) -> list[tuple[str, int]]:
        """Documents by id, ascending, each with the bytes of the text and tokens of its chunks.

        count: at most; -1: all. after, before: ids that they stand behind and before. last: the last ones within these.
        """
        bounds = [(sign, bound) for sign, bound in ((">", after), ("<", before)) if bound is not None]
        where = " and ".join(f"document_id {sign} ?" for sign, _ in bounds) or "true"
        order = "desc" if last else "asc"
        sql = f"select document_id, size from sizes where {where} order by document_id {order} limit ?"
        found = self._rows(sql, *(bound for _, bound in bounds), count)
        return found[::-1] if last else found

    def size(self, document_id: str) -> int | None:
        rows = self._rows("select size from sizes where document_id = ?", document_id)
        return int(rows[0][0]) if rows else None

    @property
    def files(self) -> dict[str, str]:
        """Notes on the files of its source (`filling.py`), by name."""
        return dict(self._rows("select name, note from files"))

    def note_files(self, notes: Mapping[str, str], gone: Iterable[str] = ()) -> None:
        with self._writing, self._transaction() as database:
            database.executemany("delete from files where name = ?", [(name,) for name in gone])
            database.executemany("insert or replace into files values (?, ?)", notes.items())

    @property
    def extent(self) -> tuple[int, int]:
        with self._opened():
            if self._extent is None:
                sql = "select count(*), coalesce(sum(size), 0) from sizes"
                self._extent = self._database.execute(sql).fetchone()
            return self._extent

    def __contains__(self, document_id: str) -> bool:
        return bool(self._digests([document_id]))

    def mark_fused(self, number: int, neighbours: Sequence[int], behind: bytes) -> bool:
        """Note that the KV of a chunk is kept as computed behind these neighbours, in this order.

        behind: digest of their tokens (`ragjax.cache.cache.neighbours_digest`), which `Chunk.behind` has from now on.
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

    def _digests(self, document_ids: Iterable[str]) -> dict[str, bytes]:
        sql = "select id, digest from documents where id = ?"
        with self._opened():
            return dict(row for name in document_ids for row in self._database.execute(sql, (name,)))

    def _chunks(self, numbers: Sequence[int]) -> dict[int, Chunk]:
        """Stored chunks with these numbers; cached ones do not wait for a write to end."""
        found = {number: chunk for number in numbers if (chunk := self._cache.get(number)) is not None}
        absent = [number for number in numbers if number not in found]
        if absent:
            with self._opened():
                fetched = self._read(absent)
                self._cache.update(fetched)
                for number in [*islice(self._cache, max(0, len(self._cache) - _CACHED))]:
                    del self._cache[number]
            found.update(fetched)
        return found

    def _read(self, numbers: Iterable[int]) -> dict[int, Chunk]:
        sql = f"{_CHUNK} where number = ?"
        return dict(_chunk_of(row) for number in numbers for row in self._database.execute(sql, (number,)))

    def _unknown(self, document_id: str) -> RequestError:
        return RequestError(
            f"no document {document_id!r} in knowledge base {self.name!r}",
            param="rag.documents",
            code="document_not_found",
        )

    def _rows(self, sql: str, *values: object) -> list[Any]:
        with self._opened():
            return self._database.execute(sql, values).fetchall()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with self._reading:
            if self._closed:
                reason = f"knowledge base {self.name!r} is gone: name another one"
                raise RequestError(reason, param="rag.knowledge", code="not_found")
            yield

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._opened(), transaction(self._database):
            self._database.execute("begin immediate")
            yield self._database

    def _forget(self, database: sqlite3.Connection, document_ids: Sequence[str]) -> list[int]:
        """Delete what is stored of these documents, and marks that rest on it; returns the numbers of their chunks."""
        gone = numbers_of(database, document_ids)
        sql = "delete from fused where number in (select number from neighbours where neighbour = ?) returning number"
        unmarked = [row[0] for neighbour in gone for row in database.execute(sql, (neighbour,)).fetchall()]
        ids = [(document_id,) for document_id in document_ids]
        database.executemany("delete from documents where id = ?", ids)
        database.executemany("delete from sizes where document_id = ?", ids)  # no key binds a temporary table
        self.changes += bool(gone)
        self._extent = None
        for number in (*gone, *unmarked):
            self._cache.pop(number, None)
        return gone

    def _replace(
        self, documents: Sequence[tuple[str, bytes, str | None]], chunks: Sequence[Chunk], embedding_NE: Vectors
    ) -> tuple[list[int], list[int]]:
        """Store documents (id, digest, filename), each in place of one of its id; numbers that went, and that came."""
        ids = [document_id for document_id, *_ in documents]
        with self._transaction() as database:
            gone = self._forget(database, ids)
            database.executemany("insert into documents (id, digest, filename) values (?, ?, ?)", documents)
            numbers = [insert(database, chunk, row_E) for chunk, row_E in zip(chunks, embedding_NE, strict=True)]
            sql = f"insert into sizes {_MEASURED} where document_id = ? group by document_id"
            database.executemany(sql, [(document_id,) for document_id in ids])
        self.changes += 1
        return gone, numbers

    def _embedded(self, document_ids: Iterable[str]) -> dict[str, Vectors]:
        """The embeddings of these documents' chunks, by text."""
        sql = "select text, embedding from chunks where document_id = ?"
        rows = (row for document_id in document_ids for row in self._rows(sql, document_id))
        return {text: np.frombuffer(raw, np.float32) for text, raw in rows}
