"""The SQLite file of a knowledge base: its tables, the settings it must fit, the vector index over it, and the most
similar chunks of every chunk, behind which KV is computed (FusionRAG, section 3.1).
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragjax.core import Chunk, ConfigError
from ragjax.retrieval.database import checksum, compare_schema, exclusive
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
CHUNK = """
select number, chunks.id, document_id, title, text, tokens, coalesce(behind, x''), coalesce(filename, ''), page, heading
from chunks left join fused using (number) join documents on documents.id = document_id
"""
"""Rows that `chunk_of` takes."""

_FLAGS = {"encoder": "; or name the --encoder that it was made with", "tokens per chunk": "; or give --chunk-tokens {}"}
"""What uses a directory that was made with other settings."""

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

    return exclusive(place, prepare, f"delete {directory} and add the documents again", implicit=False)


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


def measure(database: sqlite3.Connection, document_ids: Iterable[str]) -> None:
    sql = f"insert into sizes {_MEASURED} where document_id = ? group by document_id"
    database.executemany(sql, [(document_id,) for document_id in document_ids])


def numbers(database: sqlite3.Connection, document_id: str) -> list[int]:
    return [row[0] for row in database.execute("select number from chunks where document_id = ?", (document_id,))]


def chunk_of(row: tuple[Any, ...]) -> tuple[int, Chunk]:
    number, chunk_id, document_id, title, text, tokens, *about = row
    return number, Chunk(chunk_id, document_id, title, text, np.frombuffer(tokens, np.int32), *about)


def embeddings(database: sqlite3.Connection, document_ids: Iterable[str]) -> dict[str, Vectors]:
    sql = "select text, embedding from chunks where document_id = ?"
    rows = (row for document_id in document_ids for row in database.execute(sql, (document_id,)))
    return {text: np.frombuffer(raw, np.float32) for text, raw in rows}


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
